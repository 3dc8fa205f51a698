# SPDX-License-Identifier: Apache-2.0
"""Trains one model twice with one seed: once as it is, once as if its weights were on a GPU.

Usage: fake_gpu_training.py LIBRARY URL_HOST URL_GPU DTYPE
The GPU's driver is LIBRARY, in host memory; its default stream is the calling thread. Prints how
many copies the driver has made.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import ema_client
import torch
from ema_client._client import gpu

_KDLCUDA = 2
_kept: list[Any] = []


class Exchange(ctypes.Structure):
    """The head of DLPackExchangeAPI, the interface for C."""

    _fields_ = [
        ("version", ctypes.c_uint64),
        ("older", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("from_object", ctypes.c_void_p),
    ]


def put_exchange_on_gpu(address_of: Any) -> None:
    """The same for the interface that PyTorch has since 2.10."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return
    name = b"dlpack_exchange_api"
    theirs = Exchange.from_address(address_of(capsule, name))
    signature = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(ctypes.c_void_p))
    from_object = signature(theirs.from_object)

    def from_gpu_object(tensor: torch.Tensor, out: Any) -> int:
        status = from_object(tensor, out)
        if status == 0:
            # DLManagedTensorVersioned begins with 32 bytes of its own.
            ctypes.c_int32.from_address(out[0] + 32 + 8).value = _KDLCUDA
        return status

    # Whoever has the capsule does not keep what it points to.
    _kept.append(signature(from_gpu_object))
    address = ctypes.cast(_kept[0], ctypes.c_void_p)
    _kept.append(Exchange(theirs.version, None, None, address))
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    _kept.append(ctypes.c_char_p(name))
    torch.Tensor.__dlpack_c_exchange_api__ = new_capsule(ctypes.addressof(_kept[1]), _kept[2], None)


def put_on_gpu(library: str) -> ctypes.CDLL:
    """Lets pushes take torch tensors for CUDA's, by their DLPack device."""
    # Found by its name when the client asks for libcuda.so.1.
    driver = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    address_of = ctypes.pythonapi.PyCapsule_GetPointer
    address_of.restype = ctypes.c_void_p
    address_of.argtypes = [ctypes.py_object, ctypes.c_char_p]
    to_dlpack = torch.utils.dlpack.to_dlpack

    def to_gpu_dlpack(tensor: torch.Tensor) -> Any:
        capsule = to_dlpack(tensor)
        # DLManagedTensor begins with the address of the data and the kind of the device.
        kind = ctypes.c_int32.from_address(address_of(capsule, b"dltensor") + 8)
        kind.value = _KDLCUDA
        return capsule

    torch.utils.dlpack.to_dlpack = to_gpu_dlpack
    put_exchange_on_gpu(address_of)
    gpu.is_readable = lambda tensor: True
    return driver


def train(url: str, dtype: str) -> None:
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(300, 1000), torch.nn.BatchNorm1d(1000), torch.nn.Linear(1000, 7)
    )
    model[2].to(getattr(torch, dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    with ema_client.attach(
        model, optimizer, url, half_life="3ba", max_wait_s=300, timeout_s=300, on_error="raise"
    ) as ema:
        for _ in range(10):
            optimizer.zero_grad()
            hidden = model[1](model[0](torch.randn(16, 300)))
            model[2](hidden.to(model[2].weight.dtype)).float().square().mean().backward()
            optimizer.step()
        assert ema.wait_pushed(timeout_s=300).number == 10
        assert ema.stats.skipped == 0


def main() -> None:
    library, url_host, url_gpu, dtype = sys.argv[1:]
    # Before there is the other driver, so that torch has looked for one, and will not again.
    assert not torch.cuda.is_available()
    train(url_host, dtype)
    driver = put_on_gpu(library)
    driver.ema_fake_cuda_made_copies.restype = ctypes.c_int64
    train(url_gpu, dtype)
    print(driver.ema_fake_cuda_made_copies())


if __name__ == "__main__":
    main()
