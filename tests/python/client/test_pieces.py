# SPDX-License-Identifier: Apache-2.0
"""Where the piece of a DTensor lies. In a process of its own, as one rank of four that are not there."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from ema_client._client.pieces import Held, HeldWeights
from ema_client._client.ranges import box_around, boxes_of_range, index_of, moved
from testing import assert_same_bits

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


def test_ranks_push_ranges_of_the_elements_of_their_boxes(client, model):
    """Two ranks share the left columns of a matrix, two the right ones; and the same with the halves of a vector."""
    whole = {"m": torch.randn(4, 6), "v": torch.randn(6)}
    client.create_model(model, whole, tracks={"raw": "copy"})
    pushes = []
    for rank in range(4):
        shards, weights = [], HeldWeights()
        for name, tensor in whole.items():
            half = tensor[..., 3 * (rank // 2) : 3 * (rank // 2) + 3]
            offsets = (0,) * (tensor.dim() - 1) + (3 * (rank // 2),)
            first, count = [(0, 2), (2, half.numel() - 2)][rank % 2]
            boxes = boxes_of_range(name, tuple(half.shape), first, count)
            shards += [moved(box, offsets) for box in boxes]
            values = half.flatten()[first : first + count].clone()
            weights[name] = Held(values, (first, *offsets, *half.shape))
        run = client.open_run(model, launch_id="x", rank=rank, world_size=4, shards=shards)
        pushes.append((run, weights))
    pending = [run.start_push(step=1, weights=weights) for run, weights in pushes]
    for push in pending:
        push.wait()
    assert_same_bits(whole, client.pull(model, track="raw"))
