"""The one seam for device, stream, guard, allocation and the extension module.

Callers write `_runtime.f(...)`, so that replacing an attribute of this module reaches all of them.
"""

from __future__ import annotations

import contextlib
import importlib
from functools import cache
from types import ModuleType

import torch
from torch import Tensor


@cache
def extension() -> ModuleType:
    """The compiled module `msa_ext._C`.

    Raises:
        RuntimeError: it is missing or does not load; says why and what to do.
    """
    try:
        return importlib.import_module("msa_ext._C")
    except ImportError as error:
        raise RuntimeError(
            f"msa_ext._C does not load ({error}). Install with a CUDA 13 toolkit (`pip install .` with nvcc on PATH "
            "or CUDA_HOME set), and check that the nvidia-cuda-runtime wheel is installed."
        ) from error


@cache  # the name of a device's type is made anew whenever it is asked for
def is_cuda(device: torch.device) -> bool:
    """Whether tensors of this device are computed by CUDA kernels."""
    return device.type == "cuda"


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)


_NO_GUARD = contextlib.nullcontext()


def guard(device: torch.device) -> contextlib.AbstractContextManager:
    """Makes `device` current inside the block."""
    if device.index == torch.cuda.current_device():
        return _NO_GUARD
    return torch.cuda.device(device)


def stream(device: torch.device) -> int:
    """Raw handle of the current stream of `device`."""
    # As torch.compile's own launches do: torch.cuda.current_stream builds a Stream for its handle.
    return torch._C._cuda_getCurrentRawStream(device.index)


def empty_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """An uninitialised contiguous output of the tensor's shape and device."""
    return torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)


def workspace(total_bytes: int, sections: list[tuple[str, int, int]], device: torch.device) -> Tensor:
    """The one scratch allocation of a call, uint8; `sections` are its (name, offset, bytes)."""
    return torch.empty(total_bytes, dtype=torch.uint8, device=device)


# Address of a tensor that is handed to a kernel, 0 if it is empty.
address = Tensor.data_ptr


def synchronize(device: torch.device) -> None:
    """Waits for all work of `device`."""
    torch.cuda.synchronize(device)


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return torch.cuda.is_current_stream_capturing()
