# SPDX-License-Identifier: Apache-2.0
"""A Ray actor that receives and averages weights, on the same host: through Ray's shared memory,
where the actor reads them in place.

The best that Ray has for it: the arrays in one object, and torch's fused average over all of them.
"""

from __future__ import annotations

import os

# Before Ray is loaded: it reports nothing to anybody.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import numpy
import peer_loop
import ray
import torch

UPDATE_WEIGHT = 0.25


@ray.remote(num_cpus=1)
class Averager:
    def __init__(self, tensors: int, elements: int, threads: int) -> None:
        torch.set_num_threads(threads)
        self.average = [torch.zeros(elements) for _ in range(tensors)]

    def pid(self) -> int:
        return os.getpid()

    def push(self, arrays: list[numpy.ndarray]) -> None:
        # Only read, though torch cannot know it of an array that must not be written.
        weights = [torch.frombuffer(memoryview(array), dtype=torch.float32) for array in arrays]
        torch._foreach_lerp_(self.average, weights, UPDATE_WEIGHT)


def main() -> None:
    tensors, elements = peer_loop.shape(peer_loop.parser(__doc__).parse_args())
    ray.init(
        num_cpus=2,
        # The weights of a round, and of the one before that may not have gone yet.
        object_store_memory=max(3 * 4 * tensors * elements, 100_000_000),
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
    )
    arrays = [numpy.full(elements, i, dtype=numpy.float32) for i in range(tensors)]
    actor = Averager.remote(tensors, elements, os.cpu_count())
    pid = ray.get(actor.pid.remote())
    peer_loop.serve(lambda: ray.get(actor.push.remote(ray.put(arrays))), os.getpid(), pid)
    ray.shutdown()


if __name__ == "__main__":
    main()
