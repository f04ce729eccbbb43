"""The CUDA half of `run_backward`: addresses and sizes for the extension."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import _runtime, debug

if TYPE_CHECKING:
    from .backward import Arguments

# MSA_CHECK=1 when the package is imported: every call synchronises, raises on bad schedule entries and on writes
# between the workspace's sections.
CHECK = os.environ.get("MSA_CHECK") == "1"
_CHECK_GUARD_BYTES = 4096
_GUARD_PATTERN = 0xA5


@lru_cache(maxsize=256)
def _plan(sizes: tuple[int, ...], dq_accum: str, guard_bytes: int) -> tuple[int, list[tuple[str, int, int]]]:
    """Total bytes and sections of the workspace; the same for every call of these shapes."""
    return _runtime.extension().plan_workspace(sizes, dq_accum, guard_bytes)


def _operand(tensor: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """A `[rows, heads, 128]` tensor the kernels can read, and (address, row stride, head stride)."""
    row_stride, head_stride, last_stride = tensor.stride()
    address = _runtime.address(tensor)
    aligned = row_stride % 8 == head_stride % 8 == address % 16 == 0
    # Broadcast (zero-stride) views cannot be described to TMA.
    if not (aligned and last_stride == 1 and row_stride > 0 and head_stride > 0):
        tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
        row_stride, head_stride, _ = tensor.stride()
        address = _runtime.address(tensor)
    return tensor, (address, row_stride, head_stride)


def launch(arguments: Arguments, backend: str, dq_accum: str, stages: int = 0x1F) -> None:
    """Enqueues the backward on the current stream of the tensors' device.

    `stages` is a mask of pipeline stages (delta, clear, task build, main, postprocess), for benchmarks.
    """
    a, schedule = arguments, arguments.schedule
    device = a.q.device
    num_tokens, num_heads, _ = a.q.shape
    workspace_rows, num_kv_heads, _ = a.k_aligned.shape
    sizes = (
        num_tokens,
        num_heads,
        num_kv_heads,
        workspace_rows,
        schedule.num_entries,
        schedule.num_rows,
        schedule.edge_capacity,
        schedule.work_capacity,
    )
    guard_bytes = _CHECK_GUARD_BYTES if CHECK else 0
    with _runtime.guard(device):
        total_bytes, sections = _plan(sizes, dq_accum, guard_bytes)
        workspace = _runtime.workspace(total_bytes, sections, device)
        if CHECK:
            workspace.fill_(_GUARD_PATTERN)
        # Copies, if any, stay referenced until the launches are enqueued; the allocator orders their reuse.
        kept, operands = zip(*map(_operand, (a.q, a.grad_out, a.out, a.k_aligned, a.v_aligned)))
        lse = a.lse.contiguous()
        flags = debug.flags_tensor(device)
        tables = (
            schedule.row_ptr,
            schedule.q_indices,
            schedule.scheduler_metadata,
            schedule.work_count,
            schedule.cu_seqlens,
            schedule.document_workspace_starts,
        )
        offsets = schedule.query_offsets
        _runtime.extension().backward(
            backend,
            0 if device.index is None else device.index,
            _runtime.stream(device),
            sizes,
            operands,
            _runtime.address(lse),
            (*map(_runtime.address, tables), 0 if offsets is None else _runtime.address(offsets)),
            _runtime.address(workspace),
            (_runtime.address(a.dq), _runtime.address(a.dk), _runtime.address(a.dv)),
            a.dk.dtype == torch.float32,
            a.softmax_scale,
            dq_accum,
            _runtime.address(flags),
            guard_bytes,
            stages,
        )
        if CHECK and not _runtime.is_capturing(device):
            _check(device, flags, workspace, sections)
    del kept


def _check(device: torch.device, flags: Tensor, workspace: Tensor, sections: list[tuple[str, int, int]]) -> None:
    """MSA_CHECK=1: raises on fatal flags and on writes between the workspace's sections; synchronises."""
    _runtime.synchronize(device)
    raised = int(flags)
    if raised & debug.FATAL:
        names = ", ".join(sorted(debug.decode(raised)))
        raise ValueError(f"schedule: expected valid contents, got {names} (offending tasks were skipped)")
    ends = [offset for _, offset, _ in sections[1:]] + [workspace.numel()]
    for (name, offset, size), end in zip(sections, ends):
        gap = workspace[offset + size : end]
        if bool((gap != _GUARD_PATTERN).any()):
            raise RuntimeError(f"msa_ext: a kernel wrote past the end of workspace section {name}")
