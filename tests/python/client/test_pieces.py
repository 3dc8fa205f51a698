# SPDX-License-Identifier: Apache-2.0
"""Where the piece of a DTensor lies. In a process of its own, as one rank of four that are not there."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from ema_client._client.ranges import box_around, boxes_of_range, index_of

RANK_2_OF_4 = """
import torch
import torch.distributed as dist
from ema_client._client import pieces
from ema_client._client.pieces import BoxCache, local_of, piece_of
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
line = init_device_mesh("cpu", (4,))
square = init_device_mesh("cpu", (2, 2))
asked = []


def counting(name, tensor):
    asked.append(name)
    return piece_of(name, tensor)


pieces.piece_of = counting
boxes = BoxCache()
# Local shapes are the same: only how the tensors are spread tells where the pieces lie.
spreads = {
    (4, 0): (line, [Shard(0)]),
    (0, 8): (line, [Shard(1)]),
    (2, 0): (square, [Shard(0), Replicate()]),
    (0, 0): (square, [Replicate(), Shard(0)]),
    (0, 4): (square, [Shard(1), Replicate()]),
}
for times in (1, 2):
    for offsets, (mesh, placements) in spreads.items():
        for name in "ab":
            tensor = DTensor.from_local(torch.zeros(2, 4), mesh, placements, run_check=False)
            tensor.requires_grad_()
            assert boxes.offsets_of(name, tensor) == piece_of(name, tensor).box.offsets == offsets
            assert local_of(tensor).data_ptr() == piece_of(name, tensor).local.data_ptr()
    assert asked == ["a"] * len(spreads), asked
"""


def test_pytorch_is_asked_once_for_all_that_are_spread_in_the_same_way():
    done = subprocess.run(
        [sys.executable, "-c", RANK_2_OF_4],
        timeout=100,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (2, 1, 3, 2)])
def test_a_range_consists_of_boxes_and_lies_in_one(shape):
    elements = np.arange(math.prod(shape)).reshape(shape)

    def within(box):
        assert len(box.offsets) == len(box.extents) == len(shape)
        places = zip(box.offsets, box.extents)
        return elements[tuple(slice(first, first + n) for first, n in places)].reshape(-1).tolist()

    for first in range(elements.size):
        for count in range(elements.size - first + 1):
            expected = list(range(first, first + count))
            boxes = boxes_of_range("w", shape, first, count)
            assert sum(map(within, boxes), []) == expected
            assert len(boxes) <= max(1, 2 * len(shape) - 1)
            if count > 0:
                around = box_around("w", shape, first, count)
                start = first - index_of(around.offsets, shape)
                assert within(around)[start : start + count] == expected
