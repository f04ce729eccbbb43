"""What the CUDA pipelines share: tensors made ready for kernels, the workspace, and the checks of MSA_CHECK=1.

A pipeline is one file beside this one: it takes validated tensors and hands addresses and sizes to `_C`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from torch import Tensor

from . import _runtime, debug

# MSA_CHECK=1 when the package is imported: every call synchronises, raises on bad schedule entries and on writes
# between the workspace's sections.
CHECK = os.environ.get("MSA_CHECK") == "1"
_CHECK_GUARD_BYTES = 4096
_GUARD_PATTERN = 0xA5


def guard_bytes() -> int:
    """Room between the workspace's sections, for a pipeline's plan."""
    return _CHECK_GUARD_BYTES if CHECK else 0


def workspace(total_bytes: int, sections: list[tuple[str, int, int]], device: torch.device) -> Tensor:
    """The one scratch allocation of a call, with its guards set."""
    scratch = _runtime.workspace(total_bytes, sections, device)
    if CHECK:
        scratch.fill_(_GUARD_PATTERN)
    return scratch


def operands(tensors: Iterable[Tensor]) -> tuple[tuple[Tensor, ...], tuple[tuple[int, int, int], ...]]:
    """`[rows, heads, 128]` tensors the kernels can read, and (address, row stride, head stride) of each.

    Copies, if any, must stay referenced until the launches are enqueued; the allocator orders their reuse.
    """
    kept, described = zip(*map(_operand, tensors))
    return kept, described


def _operand(tensor: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    row_stride, head_stride, last_stride = tensor.stride()
    address = _runtime.address(tensor)
    aligned = row_stride % 8 == head_stride % 8 == address % 16 == 0
    # Broadcast (zero-stride) views cannot be described to TMA.
    if not (aligned and last_stride == 1 and row_stride > 0 and head_stride > 0):
        tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
        row_stride, head_stride, _ = tensor.stride()
        address = _runtime.address(tensor)
    return tensor, (address, row_stride, head_stride)


def check(device: torch.device, flags: Tensor, scratch: Tensor, sections: list[tuple[str, int, int]]) -> None:
    """Under MSA_CHECK=1 raises on fatal flags and on writes between the workspace's sections; synchronises."""
    if not CHECK or _runtime.is_capturing(device):
        return
    _runtime.synchronize(device)
    raised = int(flags)
    if raised & debug.FATAL:
        names = ", ".join(sorted(debug.decode(raised)))
        raise ValueError(f"schedule: expected valid contents, got {names} (offending tasks were skipped)")
    ends = [offset for _, offset, _ in sections[1:]] + [scratch.numel()]
    for (name, offset, size), end in zip(sections, ends):
        gap = scratch[offset + size : end]
        if bool((gap != _GUARD_PATTERN).any()):
            raise RuntimeError(f"msa_ext: a kernel wrote past the end of workspace section {name}")
