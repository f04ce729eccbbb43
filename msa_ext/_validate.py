"""Argument checks: each names the argument, what was expected and what came."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _functorch
from torch.utils import _python_dispatch


def tracer() -> str | None:
    """What records or fakes the operations of the caller, if anything does: our kernels would not show in it."""
    if torch.jit.is_tracing():
        return "torch.jit.trace"
    if not torch._C._len_torch_dispatch_stack():
        return None
    # Modes of users, which only watch, are none of these.
    modes = (type(mode) for mode in _python_dispatch._get_current_dispatch_mode_stack() if mode.is_infra_mode())
    return next((mode.__name__ for mode in modes), None)


def is_ordinary(value: Tensor) -> bool:
    """Whether the tensor's memory holds its values; a microsecond."""
    return (
        type(value).__torch_dispatch__ is Tensor.__torch_dispatch__
        and value.layout is torch.strided
        and not value.is_neg()
        and not value.is_conj()
        and not value._is_zerotensor()
        and not value.is_nested
        and not _functorch.is_functorch_wrapped_tensor(value)
    )


def _refuse(name: str, value: Tensor) -> None:
    """Raises for a tensor that is not ordinary."""
    if _functorch.is_functorch_wrapped_tensor(value):
        raise NotImplementedError(f"{name}: expected a tensor outside torch.func transforms, got one inside")
    if type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise TypeError(f"{name}: expected a torch.Tensor with memory of its own, got {type(value).__name__}")
    if value.layout is not torch.strided or value.is_nested:
        got = "a nested tensor" if value.is_nested else value.layout
        raise ValueError(f"{name}: expected a dense tensor (torch.strided), got {got}")
    if value._is_zerotensor():
        raise ValueError(f"{name}: expected a tensor with memory, got a lazy zero; pass a clone")
    lazy, resolved = ("negated", "resolve_neg") if value.is_neg() else ("conjugated", "resolve_conj")
    raise ValueError(f"{name}: expected values as they stand in memory, got a lazily {lazy} view; pass {resolved}()")


def tensor(name: str, value: object, dtype: torch.dtype | None = None) -> None:
    """Raises unless `value` is an ordinary tensor, of `dtype` if one is given, and nothing traces the caller."""
    any_tensor(name, value)
    assert isinstance(value, Tensor)
    if not is_ordinary(value):
        _refuse(name, value)
    if (traced := tracer()) is not None:
        raise NotImplementedError(f"{name}: expected a call that nothing traces, got one under {traced}")
    any_tensor(name, value, dtype)


def any_tensor(name: str, value: object, dtype: torch.dtype | None = None) -> None:
    """Raises TypeError unless `value` is a tensor, of `dtype` if one is given; an operator may be traced."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    if dtype is not None and value.dtype != dtype:
        raise TypeError(f"{name}: expected dtype {dtype}, got {value.dtype}")


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
