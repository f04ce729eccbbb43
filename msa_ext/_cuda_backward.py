"""The CUDA pipeline of `run_backward`: addresses and sizes for the extension."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from . import _cuda, _runtime, debug
from .schedule import MSABackwardSchedule


class Arguments(NamedTuple):
    """Validated operands and outputs of one call."""

    q: Tensor
    k_aligned: Tensor
    v_aligned: Tensor
    grad_out: Tensor
    lse: Tensor
    out: Tensor
    schedule: MSABackwardSchedule
    softmax_scale: float
    dq: Tensor
    dk: Tensor
    dv: Tensor


@lru_cache(maxsize=256)
def _plan(sizes: tuple[int, ...], dq_accum: str, guard_bytes: int) -> tuple[int, list[tuple[str, int, int]]]:
    """Total bytes and sections of the workspace; the same for every call of these shapes."""
    return _runtime.extension().plan_workspace(sizes, dq_accum, guard_bytes)


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
    guard_bytes = _cuda.guard_bytes()
    with _runtime.guard(device):
        total_bytes, sections = _plan(sizes, dq_accum, guard_bytes)
        workspace = _cuda.workspace(total_bytes, sections, device)
        kept, operands = _cuda.operands((a.q, a.grad_out, a.out, a.k_aligned, a.v_aligned))
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
        _cuda.check(device, flags, workspace, sections)
    del kept
