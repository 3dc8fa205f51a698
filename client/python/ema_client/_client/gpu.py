# SPDX-License-Identifier: Apache-2.0
"""GPUs and streams of PyTorch, for pushes of weights on GPUs."""

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
    """Whether PyTorch's "cuda" devices are NVIDIA's, not AMD's."""
    return sys.modules["torch"].version.hip is None


def current_streams(gpus: Iterable[int]) -> list[tuple[int, int]]:
    """The current stream of this thread on each GPU: (index, handle)."""
    torch = _working_torch()
    return [
        (gpu, 0 if torch is None else int(torch.cuda.current_stream(gpu).cuda_stream))
        for gpu in sorted(set(gpus))
    ]


def is_capturing() -> bool:
    """Whether this thread is capturing a CUDA graph: its operations are recorded, not executed."""
    torch = _working_torch()
    return torch is not None and bool(torch.cuda.is_current_stream_capturing())


def _working_torch() -> Any:
    """PyTorch, if it has initialized CUDA in this process."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None
