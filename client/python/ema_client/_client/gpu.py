# SPDX-License-Identifier: Apache-2.0
"""What a push of weights on GPUs has to know of PyTorch's streams, and of its own memory."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

# Default and minimum of `max_staging_bytes`.
STAGING_BYTES = 64 << 20


def is_readable(tensor: Any) -> bool:
    """Whether a torch tensor is on a GPU whose memory a push reads in place."""
    return tensor.device.type == "cuda" and reads_cuda()


def reads_cuda() -> bool:
    """Whether what PyTorch calls "cuda" is NVIDIA's, not AMD's."""
    return sys.modules["torch"].version.hip is None


def current_streams(gpus: Iterable[int]) -> list[tuple[int, int]]:
    """Of each GPU, by its index, the stream on which this thread works."""
    torch = _working_torch()
    return [
        (gpu, 0 if torch is None else int(torch.cuda.current_stream(gpu).cuda_stream))
        for gpu in sorted(set(gpus))
    ]


def is_capturing() -> bool:
    """Whether this thread records what it does into a CUDA graph, instead of doing it."""
    torch = _working_torch()
    return torch is not None and bool(torch.cuda.is_current_stream_capturing())


def _working_torch() -> Any:
    """PyTorch, if this process uses a GPU with it."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None
