"""Argument checks: each names the argument, what was expected and what came."""

from __future__ import annotations

import torch
from torch import Tensor


def tensor(name: str, value: object, dtype: torch.dtype | None = None) -> None:
    """Raises TypeError unless `value` is a tensor, of `dtype` if one is given."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    if dtype is not None and value.dtype != dtype:
        raise TypeError(f"{name}: expected dtype {dtype}, got {value.dtype}")
    if value.layout != torch.strided:
        raise ValueError(f"{name}: expected a dense tensor (torch.strided), got {value.layout}")


def contents(name: str, value: Tensor) -> None:
    """Raises NotImplementedError unless the tensor's values can be read."""
    if value.device.type == "meta":
        raise NotImplementedError(f"{name}: expected a CPU or CUDA device, got meta")


def shape(name: str, value: Tensor, expected: tuple[int | str, ...]) -> None:
    """Raises ValueError unless the shape matches; a string stands for any size."""
    got = value.shape
    if len(got) != len(expected) or any(want != size for want, size in zip(expected, got) if not isinstance(want, str)):
        raise ValueError(f"{name}: expected shape [{', '.join(map(str, expected))}], got {list(got)}")


def device(name: str, value: Tensor, expected: torch.device, whose: str) -> None:
    """Raises ValueError unless `value` lives on `expected`, which is `whose` device."""
    if value.device != expected:
        raise ValueError(f"{name}: expected {whose} device {expected}, got {value.device}")


def integer(name: str, value: object, low: int, high: int) -> None:
    """Raises unless `value` is an int in [low, high]."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if not low <= value <= high:
        raise ValueError(f"{name}: expected a value in [{low}, {high}], got {value}")
