# SPDX-License-Identifier: Apache-2.0
"""Checks that an array on a GPU lives until the GPU has read it, and no longer.

Usage: fake_gpu_array.py LIBRARY ADDRESS MODEL, the first as for fake_gpu_training.py.
"""

from __future__ import annotations

import ctypes
import sys

import ema_client
import torch
from ema_client._client import gpu
from fake_gpu_training import put_on_gpu
from torch.multiprocessing.reductions import StorageWeakRef


def main() -> None:
    library, address, model = sys.argv[1:]
    client = ema_client.Client(address)
    client.create_model(model, {"w": torch.ones(1000)}, tracks={"raw": "copy"})
    with client.open_run(model) as run:
        driver = put_on_gpu(library)
        # Its default stream would wait for the copy here and now.
        driver.ema_fake_cuda_new_stream.restype = ctypes.c_void_p
        stream = driver.ema_fake_cuda_new_stream()
        gpu.current_streams = lambda gpus: [(index, stream) for index in gpus]
        array = torch.full((1000,), 3.0)
        storage = StorageWeakRef(array.untyped_storage())
        driver.ema_fake_cuda_hold()
        try:
            push = run.start_push(step=1, weights={"w": array})
            del array
            assert push.wait_released(max_wait_s=60), "the copy was not queued"
            assert not storage.expired(), "the array is gone before its copy"
        finally:
            driver.ema_fake_cuda_release()
        push.wait()
        assert storage.expired(), "the array is still there"
    assert torch.equal(client.pull(model, track="raw")["w"], torch.full((1000,), 3.0))


if __name__ == "__main__":
    main()
