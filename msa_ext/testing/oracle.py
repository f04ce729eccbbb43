"""A second, independent computation: dense float64 attention with masks made from topk.

It shares no code with `msa_ext.reference` and never sees a schedule. Memory, beside the results, is one head's
dense [queries, keys] matrix of a chunk of one entry at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

_CHUNK_TOKENS = 512


@dataclass(frozen=True)
class Problem:
    """Inputs of one attention: shapes as in `msa_ext.backward.run_backward`.

    `topk` is int32 `[Hkv, T, K]`; `starts`, `offsets` hold each entry's first workspace row and the position of
    its first query.
    """

    q: Tensor
    k_aligned: Tensor
    v_aligned: Tensor
    topk: Tensor
    cu_seqlens: Sequence[int]
    starts: Sequence[int]
    offsets: Sequence[int]
    softmax_scale: float
    progress: str | None = None  # name of a progress bar over the chunks

    def chunks(self) -> Iterator[tuple[int, int, int, int]]:
        """(first token, end token, first workspace row, first position) of up to 512 tokens of one entry.

        The chunk's last token sees keys at positions below first position + number of tokens, no others.
        """
        chunks = []
        for b, (start, offset) in enumerate(zip(self.starts, self.offsets)):
            first, end = self.cu_seqlens[b : b + 2]
            for begin in range(first, end, _CHUNK_TOKENS):
                chunks.append((begin, min(begin + _CHUNK_TOKENS, end), start, offset + begin - first))
        yield from tqdm(chunks, desc=self.progress, unit="chunk", disable=self.progress is None, leave=False)

    def mask(self, tokens: Tensor, positions: Tensor, head: int, key_begin: int, key_end: int) -> Tensor:
        """bool `[tokens, keys]`: key position in [key_begin, key_end) is selected and not in the future."""
        key = torch.arange(key_begin, key_end, device="cpu")
        num_blocks = key_end // 128 + 1
        selected = torch.zeros(len(tokens), num_blocks, dtype=torch.bool, device="cpu")
        for slot in self.topk[head, tokens].long().T:
            inside = (slot >= 0) & (slot < num_blocks)
            selected[inside.nonzero()[:, 0], slot[inside]] = True
        return selected[:, key // 128] & (key <= positions[:, None])


def _rows(x: Tensor, rows: Tensor | slice, head: int) -> Tensor:
    return x[rows, head].to(torch.float64)


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """`out` `[T, Hq, D]` and `lse` `[T, Hq]`, float64 on the CPU; 0 and -inf where no key is visible."""
    q = problem.q
    group = q.shape[1] // problem.k_aligned.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float64, device="cpu")
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64, device="cpu")
    for begin, end, start, offset in problem.chunks():
        tokens = torch.arange(begin, end, device="cpu")
        num_keys = offset + end - begin
        for head in range(problem.k_aligned.shape[1]):
            mask = problem.mask(tokens, offset + tokens - begin, head, 0, num_keys)
            k = _rows(problem.k_aligned, slice(start, start + num_keys), head)
            v = _rows(problem.v_aligned, slice(start, start + num_keys), head)
            for h in range(head * group, (head + 1) * group):
                scores = problem.softmax_scale * _rows(q, tokens, h) @ k.T
                scores = torch.where(mask, scores, -torch.inf)
                lse[tokens, h] = torch.logsumexp(scores, dim=1)
                out[tokens, h] = torch.nan_to_num(torch.softmax(scores, dim=1)) @ v
    return out, lse


def backward(problem: Problem, grad_out: Tensor, lse: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`dq` `[T, Hq, D]`, `dk`, `dv` `[W, Hkv, D]`, float64 on the CPU, from the stored `lse` and `out`."""
    dq = torch.zeros(problem.q.shape, dtype=torch.float64, device="cpu")
    dk = torch.zeros(problem.k_aligned.shape, dtype=torch.float64, device="cpu")
    dv = torch.zeros_like(dk)
    for begin, end, start, offset in problem.chunks():
        tokens = torch.arange(begin, end, device="cpu")
        num_keys = offset + end - begin
        for head in range(problem.k_aligned.shape[1]):
            mask = problem.mask(tokens, offset + tokens - begin, head, 0, num_keys)
            part = _dense(problem, grad_out, lse, out, tokens, head, mask, slice(start, start + num_keys))
            dq[tokens] += part[0]
            dk[start : start + num_keys, head] += part[1]
            dv[start : start + num_keys, head] += part[2]
    return dq, dk, dv


def _dense(
    problem: Problem,
    grad_out: Tensor,
    lse: Tensor,
    out: Tensor,
    tokens: Tensor,
    head: int,
    mask: Tensor,
    keys: slice,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `tokens` and `keys` of one KV head give each other: dq `[tokens, Hq, D]`, dk, dv `[keys, D]`."""
    q, scale = problem.q, problem.softmax_scale
    group = q.shape[1] // problem.k_aligned.shape[1]
    k, v = _rows(problem.k_aligned, keys, head), _rows(problem.v_aligned, keys, head)
    dq = torch.zeros(len(tokens), q.shape[1], q.shape[2], dtype=torch.float64, device="cpu")
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for h in range(head * group, (head + 1) * group):
        rows, grad = _rows(q, tokens, h), _rows(grad_out, tokens, h)
        row_lse = lse[tokens, h].to(torch.float64)
        seen = mask & (row_lse > -torch.inf)[:, None]
        p = torch.where(seen, torch.exp(scale * rows @ k.T - row_lse[:, None]), 0.0)
        delta = (_rows(out, tokens, h) * grad).sum(1)
        ds = torch.where(seen, p * (grad @ v.T - delta[:, None]), 0.0)
        dq[:, h] = scale * ds @ k
        dk += scale * ds.T @ rows
        dv += p.T @ grad
    return dq, dk, dv


def sampled_dq(problem: Problem, grad_out: Tensor, lse: Tensor, out: Tensor, tokens: Sequence[int]) -> Tensor:
    """Rows `tokens` of dq, `[len(tokens), Hq, D]` float64."""
    dq = torch.zeros(len(tokens), *problem.q.shape[1:], dtype=torch.float64, device="cpu")
    for begin, end, start, offset in problem.chunks():
        for i, token in enumerate(tokens):
            if begin <= token < end:
                one = torch.tensor([token], device="cpu")
                position = offset + token - begin
                for head in range(problem.k_aligned.shape[1]):
                    mask = problem.mask(one, torch.tensor([position], device="cpu"), head, 0, position + 1)
                    keys = slice(start, start + position + 1)
                    dq[i] += _dense(problem, grad_out, lse, out, one, head, mask, keys)[0][0]
    return dq


def sampled_dkv(
    problem: Problem, grad_out: Tensor, lse: Tensor, out: Tensor, workspace_blocks: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """dk, dv of 128-key workspace blocks, each `[len(workspace_blocks), 128, Hkv, D]` float64."""
    heads, head_dim = problem.k_aligned.shape[1:]
    dk = torch.zeros(len(workspace_blocks), 128, heads, head_dim, dtype=torch.float64, device="cpu")
    dv = torch.zeros_like(dk)
    for begin, end, start, offset in problem.chunks():
        for i, block in enumerate(workspace_blocks):
            key_begin = 128 * block - start
            if not 0 <= key_begin < offset + end - begin:
                continue
            tokens = torch.arange(begin + max(0, key_begin - offset), end, device="cpu")  # earlier ones see none of it
            positions = offset + tokens - begin
            keys = slice(128 * block, 128 * (block + 1))
            for head in range(heads):
                mask = problem.mask(tokens, positions, head, key_begin, key_begin + 128)
                _, part_k, part_v = _dense(problem, grad_out, lse, out, tokens, head, mask, keys)
                dk[i, :, head] += part_k
                dv[i, :, head] += part_v
    return dk, dv
