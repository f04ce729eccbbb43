"""The specification in plain torch: forward and backward computed item by item from the schedule.

With `S = softmax_scale * q.k`, `P = exp(S - lse)` on visible pairs and `delta = rowsum(out * grad_out)`:
`dS = P * (grad_out.v - delta)`, `dQ = scale * dS.K`, `dK = scale * dS^T.Q`, `dV = P^T.grad_out`.
Every kernel is held to it. Memory is linear in T.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from . import _validate
from .schedule import BLOCK_KEYS, MSABackwardSchedule

# Name of the progress bar over the schedule's items; None shows none.
PROGRESS: ContextVar[str | None] = ContextVar("PROGRESS", default=None)


@dataclass(frozen=True)
class _Segment:
    """The queries of one item: they share an index head and a key block."""

    index_head: int
    tokens: Tensor  # int64 [n]
    keys: slice  # workspace rows
    visible: Tensor  # bool [n, 128]


def _segments(schedule: MSABackwardSchedule) -> Iterator[_Segment]:
    device = schedule.device
    count = min(int(schedule.work_count), schedule.work_capacity)
    items = schedule.scheduler_metadata[:count].tolist()
    row_ptr = schedule.row_ptr.tolist()
    cu_seqlens = schedule.cu_seqlens.tolist()
    starts = schedule.document_workspace_starts.tolist()
    offsets = [0] * len(starts) if schedule.query_offsets is None else schedule.query_offsets.tolist()
    key_in_block = torch.arange(BLOCK_KEYS, device=device)
    name = PROGRESS.get()
    for head, row, begin, size, entry, local_block in tqdm(
        items, desc=name, unit="item", disable=name is None, leave=False
    ):
        first_edge = row_ptr[head][row] + begin
        query = schedule.q_indices[head, first_edge : first_edge + size].long()
        position = offsets[entry] + query
        first_key = starts[entry] + BLOCK_KEYS * local_block
        yield _Segment(
            head,
            cu_seqlens[entry] + query,
            slice(first_key, first_key + BLOCK_KEYS),
            BLOCK_KEYS * local_block + key_in_block <= position[:, None],
        )


@contextlib.contextmanager
def _exact() -> Iterator[None]:
    """No autograd history, and products in the dtype of their operands, whatever autocast says."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def _check_tensors(schedule: MSABackwardSchedule, **tensors: Tensor) -> None:
    if not isinstance(schedule, MSABackwardSchedule):
        raise TypeError(f"schedule: expected an MSABackwardSchedule, got {type(schedule).__name__}")
    for name, tensor in tensors.items():
        _validate.tensor(name, tensor)
        _validate.contents(name, tensor)
    _validate.contents("schedule", schedule.row_ptr)


def _group_and_scale(
    q: Tensor, k_aligned: Tensor, softmax_scale: float | None, compute_dtype: torch.dtype
) -> tuple[int, float]:
    if compute_dtype not in (torch.float32, torch.float64):
        raise ValueError(f"compute_dtype: expected torch.float32 or torch.float64, got {compute_dtype}")
    num_heads, num_kv_heads = q.shape[1], k_aligned.shape[1]
    if num_heads % num_kv_heads:
        raise ValueError(f"q: expected a multiple of {num_kv_heads} heads (k_aligned's), got {num_heads}")
    return num_heads // num_kv_heads, q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale


@_exact()
def forward(
    q: Tensor,
    k_aligned: Tensor,
    v_aligned: Tensor,
    schedule: MSABackwardSchedule,
    *,
    softmax_scale: float | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """The sparse attention forward.

    Args:
        q: `[T, Hq, D]`; k_aligned, v_aligned: `[W, Hkv, D]`; any float dtype, one device.
        softmax_scale: default `D ** -0.5`.
        compute_dtype: torch.float32 or torch.float64.

    Returns:
        `out` `[T, Hq, D]` in q's dtype, and `lse` `[T, Hq]` in `compute_dtype`, natural log. Tokens without a
        visible key have out 0 and lse -inf. Neither records autograd history.

    Raises:
        TypeError, NotImplementedError: something that is no ordinary tensor, or a traced call.
        ValueError: another compute_dtype, or heads of q that are no multiple of k_aligned's. The schedule's
            contents are trusted: `schedule.validate()` checks them.
    """
    _check_tensors(schedule, q=q, k_aligned=k_aligned, v_aligned=v_aligned)
    num_tokens, num_heads, head_dim = q.shape
    group, scale = _group_and_scale(q, k_aligned, softmax_scale, compute_dtype)
    acc = torch.zeros(num_tokens, num_heads, head_dim, dtype=compute_dtype, device=q.device)
    row_max = torch.full((num_tokens, num_heads), -torch.inf, dtype=compute_dtype, device=q.device)
    row_sum = torch.zeros_like(row_max)
    for seg in _segments(schedule):
        heads = slice(seg.index_head * group, (seg.index_head + 1) * group)
        k = k_aligned[seg.keys, seg.index_head].to(compute_dtype)
        v = v_aligned[seg.keys, seg.index_head].to(compute_dtype)
        s = scale * (q[seg.tokens, heads].to(compute_dtype) @ k.T)
        s.masked_fill_(~seg.visible[:, None, :], -torch.inf)
        old_max = row_max[seg.tokens, heads]
        new_max = torch.maximum(old_max, s.amax(dim=-1))
        safe_max = new_max.masked_fill(new_max == -torch.inf, 0.0)  # exp(-inf - 0) = 0, not NaN
        p = torch.exp(s - safe_max[..., None])
        shrink = torch.exp(old_max - safe_max)
        row_sum[seg.tokens, heads] = row_sum[seg.tokens, heads] * shrink + p.sum(dim=-1)
        acc[seg.tokens, heads] = acc[seg.tokens, heads] * shrink[..., None] + p @ v
        row_max[seg.tokens, heads] = new_max
    out = acc / row_sum.masked_fill(row_sum == 0, 1.0)[..., None]
    return out.to(q.dtype), row_max + torch.log(row_sum)


@_exact()
def backward(
    q: Tensor,
    k_aligned: Tensor,
    v_aligned: Tensor,
    grad_out: Tensor,
    lse: Tensor,
    out: Tensor,
    schedule: MSABackwardSchedule,
    *,
    softmax_scale: float | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sparse attention backward.

    Args:
        q, grad_out, out: `[T, Hq, D]`; k_aligned, v_aligned: `[W, Hkv, D]`; lse: `[T, Hq]`, natural log; any
            float dtype, one device.
        softmax_scale: default `D ** -0.5`.
        compute_dtype: torch.float32 or torch.float64.

    Returns:
        `dq` `[T, Hq, D]`, `dk`, `dv` `[W, Hkv, D]` in `compute_dtype`, exactly zero where nothing is visible.

    Raises:
        TypeError, NotImplementedError, ValueError: as `forward`.
    """
    _check_tensors(schedule, q=q, k_aligned=k_aligned, v_aligned=v_aligned, grad_out=grad_out, lse=lse, out=out)
    group, scale = _group_and_scale(q, k_aligned, softmax_scale, compute_dtype)
    dq = torch.zeros(q.shape, dtype=compute_dtype, device=q.device)
    dk = torch.zeros(k_aligned.shape, dtype=compute_dtype, device=q.device)
    dv = torch.zeros_like(dk)
    for seg in _segments(schedule):
        heads = slice(seg.index_head * group, (seg.index_head + 1) * group)
        q_rows = q[seg.tokens, heads].to(compute_dtype)
        grad_rows = grad_out[seg.tokens, heads].to(compute_dtype)
        lse_rows = lse[seg.tokens, heads].to(compute_dtype)
        delta = (out[seg.tokens, heads].to(compute_dtype) * grad_rows).sum(dim=-1)
        k = k_aligned[seg.keys, seg.index_head].to(compute_dtype)
        v = v_aligned[seg.keys, seg.index_head].to(compute_dtype)
        p = torch.exp(scale * (q_rows @ k.T) - lse_rows[..., None])
        hidden = ~seg.visible[:, None, :] | (lse_rows == -torch.inf)[..., None]
        p.masked_fill_(hidden, 0.0)
        ds = p * (grad_rows @ v.T - delta[..., None])
        ds.masked_fill_(hidden, 0.0)  # delta of a token without visible keys may be anything
        dq[seg.tokens, heads] += scale * (ds @ k)
        dk[seg.keys, seg.index_head] += scale * (ds.flatten(0, 1).T @ q_rows.flatten(0, 1))
        dv[seg.keys, seg.index_head] += p.flatten(0, 1).T @ grad_rows.flatten(0, 1)
    return dq, dk, dv
