"""The specification of the layer in plain torch, on compact tensors: attention, its backward, block selection.

Works in float32, or in float64 if the inputs are. Entry by entry and chunk by chunk of queries, all heads at once,
against the keys of the blocks that any query of the chunk chose; memory, beside the results, is bounded by
`_CHUNK_SCORES` scores of a chunk, or by one query's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .schedule import BLOCK_KEYS

_CHUNK_SCORES = 1 << 22


@dataclass(frozen=True)
class Layout:
    """Which rows belong together: see `msa_ext.attention` for the tensors and their defaults."""

    cu_seqlens: Tensor
    cu_seqlens_k: Tensor | None = None
    query_offsets: Tensor | None = None
    entry_documents: Tensor | None = None

    def entries(self, num_tokens: int, num_keys: int) -> Iterator[tuple[range, range, int]]:
        """(tokens, key rows, position of the first query) of every entry.

        Rows are cut to those that exist; an entry of a document that does not exist is left out.
        """
        cu = self.cu_seqlens.tolist()
        cu_k = cu if self.cu_seqlens_k is None else self.cu_seqlens_k.tolist()
        documents = range(len(cu) - 1) if self.entry_documents is None else self.entry_documents.tolist()
        offsets = None if self.query_offsets is None else self.query_offsets.tolist()
        for entry, document in enumerate(documents):
            if not 0 <= document < len(cu_k) - 1:
                continue
            tokens = range(max(0, cu[entry]), min(num_tokens, cu[entry + 1]))
            keys = range(max(0, cu_k[document]), min(num_keys, cu_k[document + 1]))
            yield tokens, keys, len(keys) - len(tokens) if offsets is None else offsets[entry]


@dataclass(frozen=True)
class _Chunk:
    tokens: slice
    positions: Tensor  # int64 [n], of the queries in their document
    first_key: int  # row of the document's first key
    num_keys: int  # of the document, no further than the last query's position

    def keys_and_mask(self, topk: Tensor) -> tuple[Tensor, Tensor]:
        """Keys of the chosen blocks, int64 `[m]` in the document, and which each query sees, bool `[Hkv, n, m]`."""
        num_blocks = -(-self.num_keys // BLOCK_KEYS)
        ids = topk[:, self.tokens].long()
        ids = ids.where((ids >= 0) & (ids < num_blocks), num_blocks)  # the surplus column is dropped
        chosen = torch.zeros(*ids.shape[:2], num_blocks + 1, dtype=torch.bool, device=ids.device)
        chosen = chosen.scatter_(2, ids, True)[:, :, :num_blocks]
        block = chosen.any(dim=1).any(dim=0).nonzero()
        key = (BLOCK_KEYS * block + torch.arange(BLOCK_KEYS, device=ids.device)).flatten()
        key = key[key < self.num_keys]
        return key, chosen[:, :, key // BLOCK_KEYS] & (key <= self.positions[:, None])


def _chunks(layout: Layout, num_tokens: int, num_keys: int, num_heads: int, device: torch.device) -> Iterator[_Chunk]:
    for tokens, keys, offset in layout.entries(num_tokens, num_keys):
        begin = tokens.start
        while begin < tokens.stop:
            seen = min(len(keys), offset + len(tokens))  # by the entry's last query
            end = min(tokens.stop, begin + max(1, _CHUNK_SCORES // max(1, num_heads * seen)))
            first, last = offset + begin - tokens.start, offset + end - tokens.start
            if min(len(keys), last) > 0:
                positions = torch.arange(first, last, device=device)
                yield _Chunk(slice(begin, end), positions, keys.start, min(len(keys), last))
            begin = end


def compute_dtype(x: Tensor) -> torch.dtype:
    """What is computed in, and lse's dtype: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _grouped(x: Tensor, num_kv_heads: int, dtype: torch.dtype) -> Tensor:
    """Rows `[n, Hq, ...]` of a chunk as `[Hkv, n, G, ...]`."""
    return x.to(dtype).unflatten(1, (num_kv_heads, -1)).movedim(1, 0)


def _ungrouped(x: Tensor) -> Tensor:
    return x.movedim(0, 1).flatten(1, 2)


class _Products:
    """Matrix products of a chunk, a batch over KV heads: query rows are `[Hkv, n, G, ...]`."""

    @staticmethod
    def with_keys(rows: Tensor, keys: Tensor) -> Tensor:
        """`[Hkv, n, G, D]` times `[Hkv, m, D]` -> `[Hkv, n, G, m]`."""
        return (rows.flatten(1, 2) @ keys.transpose(1, 2)).unflatten(1, rows.shape[1:3])

    @staticmethod
    def over_keys(weights: Tensor, keys: Tensor) -> Tensor:
        """`[Hkv, n, G, m]` times `[Hkv, m, D]` -> `[Hkv, n, G, D]`."""
        return (weights.flatten(1, 2) @ keys).unflatten(1, weights.shape[1:3])

    @staticmethod
    def over_queries(weights: Tensor, rows: Tensor) -> Tensor:
        """`[Hkv, n, G, m]` times `[Hkv, n, G, D]` -> `[m, Hkv, D]`."""
        return (weights.flatten(1, 2).transpose(1, 2) @ rows.flatten(1, 2)).movedim(0, 1)


def _autocast_off(x: Tensor) -> torch.autocast:
    return torch.autocast(x.device.type, enabled=False)


@torch.no_grad()
def forward(
    q: Tensor, k: Tensor, v: Tensor, topk: Tensor, layout: Layout, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """The attention of `msa_ext.attention`, any head dimension and float dtype.

    Returns:
        `out` `[T, Hq, D]` in q's dtype and `lse` `[T, Hq]` in the dtype of computation, natural log; 0 and -inf for
        tokens that see no key, those outside every entry among them.
    """
    dtype, num_kv_heads = compute_dtype(q), k.shape[1]
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=dtype, device=q.device)
    with _autocast_off(q):
        for chunk in _chunks(layout, q.shape[0], min(k.shape[0], v.shape[0]), q.shape[1], q.device):
            key, mask = chunk.keys_and_mask(topk)
            k_rows, v_rows = (x[chunk.first_key + key].to(dtype).movedim(1, 0) for x in (k, v))
            hidden = ~mask[:, :, None]
            scores = softmax_scale * _Products.with_keys(_grouped(q[chunk.tokens], num_kv_heads, dtype), k_rows)
            scores.masked_fill_(hidden, -torch.inf)
            row_lse = scores.logsumexp(dim=-1)
            p = scores.sub_(row_lse[..., None]).exp_().masked_fill_(hidden, 0.0)  # -inf less -inf is NaN
            out[chunk.tokens] = _ungrouped(_Products.over_keys(p, v_rows)).to(q.dtype)
            lse[chunk.tokens] = _ungrouped(row_lse)
    return out, lse


@torch.no_grad()
def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    topk: Tensor,
    layout: Layout,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `forward`: `dS = P * (grad_out.v - delta)` with `delta = rowsum(out * grad_out) - grad_lse`.

    Returns:
        dq, dk, dv like q, k, v, contiguous; exactly zero where no visible pair touches a row.
    """
    dtype, num_kv_heads = compute_dtype(q), k.shape[1]
    dq = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    dk = torch.zeros(k.shape, dtype=dtype, device=q.device)
    dv = torch.zeros(v.shape, dtype=dtype, device=q.device)
    with _autocast_off(q):
        for chunk in _chunks(layout, q.shape[0], min(k.shape[0], v.shape[0]), q.shape[1], q.device):
            key, mask = chunk.keys_and_mask(topk)
            rows = chunk.first_key + key
            k_rows, v_rows = (x[rows].to(dtype).movedim(1, 0) for x in (k, v))
            q_rows, grad_rows, out_rows, row_lse = (
                _grouped(x[chunk.tokens], num_kv_heads, dtype) for x in (q, grad_out, out, lse)
            )
            delta = (out_rows * grad_rows).sum(dim=-1)
            if grad_lse is not None:
                delta -= _grouped(grad_lse[chunk.tokens], num_kv_heads, dtype)
            dead = row_lse == -torch.inf
            hidden = ~mask[:, :, None] | dead[..., None]
            p = (softmax_scale * _Products.with_keys(q_rows, k_rows)).sub_(row_lse[..., None]).exp_()
            p.masked_fill_(hidden, 0.0)
            ds = _Products.with_keys(grad_rows, v_rows).sub_(delta[..., None]).mul_(p)
            ds.masked_fill_(hidden, 0.0)  # what reaches a dead token may be anything
            grad_rows = grad_rows.masked_fill(dead[..., None], 0.0)
            q_rows = q_rows.masked_fill(dead[..., None], 0.0)
            dq[chunk.tokens] = (softmax_scale * _ungrouped(_Products.over_keys(ds, k_rows))).to(q.dtype)
            dk[rows] += softmax_scale * _Products.over_queries(ds, q_rows)
            dv[rows] += _Products.over_queries(p, grad_rows)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


@torch.no_grad()
def select_blocks(
    index_q: Tensor,
    index_k: Tensor,
    layout: Layout,
    *,
    top_k: int = 16,
    local_blocks: int = 1,
    init_blocks: int = 0,
    softmax_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Each token's best key blocks: the last `local_blocks` up to its own, the first `init_blocks`, then by score.

    A block's score is the largest `index_q . index_k` over its keys that the token sees; of equal ones the lower id
    wins. Blocks without a visible key are never chosen.

    Args:
        index_q: `[T, Hidx, D]`; index_k: `[Tk, 1, D]`; any float dtype.
        softmax_scale: of the log-sum-exp, default `D ** -0.5`.

    Returns:
        `topk` int32 `[Hidx, T, top_k]`, ascending document-local ids, -1 last, and `index_lse` `[T, Hidx]` in the
        dtype of computation, over the chosen blocks' visible keys; -inf where there are none.
    """
    dtype, (num_tokens, num_heads, head_dim) = compute_dtype(index_q), index_q.shape
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    topk = torch.full((num_heads, num_tokens, top_k), -1, dtype=torch.int32, device=index_q.device)
    index_lse = torch.full((num_tokens, num_heads), -torch.inf, dtype=dtype, device=index_q.device)
    with _autocast_off(index_q):
        for chunk in _chunks(layout, num_tokens, index_k.shape[0], num_heads, index_q.device):
            key = torch.arange(chunk.num_keys, device=index_q.device)
            k_rows = index_k[chunk.first_key : chunk.first_key + chunk.num_keys, 0].to(dtype)
            scores = index_q[chunk.tokens].to(dtype).movedim(1, 0) @ k_rows.T  # [Hidx, n, keys]
            scores.masked_fill_(key > chunk.positions[:, None], -torch.inf)
            num_blocks = -(-chunk.num_keys // BLOCK_KEYS)
            padded = torch.nn.functional.pad(
                scores, (0, num_blocks * BLOCK_KEYS - chunk.num_keys), value=-torch.inf
            ).unflatten(2, (num_blocks, BLOCK_KEYS))
            block = torch.arange(num_blocks, device=index_q.device)
            own = (chunk.positions // BLOCK_KEYS)[:, None]
            forced = (block > own - local_blocks) | (block < init_blocks)
            # Rank by (visible, forced, score), stable: the lower id first.
            order = padded.amax(dim=3).argsort(dim=2, descending=True, stable=True)
            rank = torch.where(block > own, 0, torch.where(forced, 2, 1)).expand(num_heads, -1, -1)
            order = order.gather(2, rank.gather(2, order).argsort(dim=2, descending=True, stable=True))
            ids = order[:, :, :top_k]
            ids = ids.where(rank.gather(2, ids) > 0, num_blocks).sort(dim=2).values
            ids = torch.where(ids < num_blocks, ids, -1)
            topk[:, chunk.tokens, : ids.shape[2]] = ids.to(torch.int32)
            visible, mask = chunk.keys_and_mask(topk)
            chosen_scores = scale * scores[:, :, visible]
            index_lse[chunk.tokens] = chosen_scores.masked_fill_(~mask, -torch.inf).logsumexp(dim=-1).T
    return topk, index_lse
