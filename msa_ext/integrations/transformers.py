"""`attn_implementation="msa_ext"` for transformers' MiniMax M3 (`minimax_m3_vl`), trainable; see `register`."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..attention import HEAD_DIM, MAX_TOP_K, attention
from ..reference_attention import Layout, select_blocks
from ..schedule import BLOCK_KEYS

NAME = "msa_ext"
_MIN_VERSION = (5, 20)
_use_index_kernels = False


def register(*, use_index_kernels: bool = False) -> None:
    """Makes `attn_implementation="msa_ext"` known to transformers; may be called again to change the option.

    Layers with an indexer use `msa_ext.attention`, all others PyTorch's SDPA. A batch may be padded on the right, or
    hold packed documents (`position_ids` that begin anew, no attention mask, `use_cache=False`), whose blocks are then
    counted from each document's first token. Looking for these synchronises with the host, twice a sparse layer.

    Args:
        use_index_kernels: choose blocks by `select_blocks` always, not only for packed batches: never T x T scores.

    Raises:
        ImportError: transformers is missing or older than 5.20.
    """
    global _use_index_kernels
    import transformers
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < _MIN_VERSION:
        raise ImportError(f"transformers: expected version 5.20 or newer, got {transformers.__version__}")
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as modeling

    if not isinstance(use_index_kernels, bool):
        raise TypeError(f"use_index_kernels: expected a bool, got {type(use_index_kernels).__name__}")
    _use_index_kernels = use_index_kernels
    ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)
    indexer = modeling.MiniMaxM3VLIndexer
    if not hasattr(indexer.forward, "original"):
        indexer.forward = _indexer_forward(indexer.forward, modeling.apply_rotary_pos_emb)


def _mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, *args, attention_mask=None, **kwargs):
    """SDPA's mask, for the dense layers; padding anywhere but on the right is refused."""
    from transformers.masking_utils import sdpa_mask

    if attention_mask is not None and attention_mask.dim() == 2:
        present = attention_mask.to(torch.int8)
        if bool((present[:, 1:] > present[:, :-1]).any()):
            raise NotImplementedError(
                'attention_mask: expected padding on the right (tokenizer.padding_side = "right")'
            )
    return sdpa_mask(
        batch_size, q_length, kv_length, q_offset, kv_offset, *args, attention_mask=attention_mask, **kwargs
    )


def _rows(position_ids: Tensor | None, batch: int, q_length: int, key_length: int, device: torch.device) -> Layout:
    """Which of the `batch * q_length` queries and `batch * key_length` keys belong together."""

    def row_starts(length: int) -> Tensor:
        return torch.arange(0, batch * length + 1, max(1, length), dtype=torch.int32, device=device)

    if key_length != q_length:  # a cache holds what came before; a batch row is a document
        return Layout(row_starts(q_length), row_starts(key_length))
    if position_ids is None:
        return Layout(row_starts(q_length))
    position_ids = position_ids.expand(batch, -1)
    first = torch.ones(batch, q_length, dtype=torch.bool, device=device)
    first[:, 1:] = position_ids.diff(dim=1) != 1
    starts = first.flatten().nonzero().flatten()
    return Layout(torch.nn.functional.pad(starts, (0, 1), value=batch * q_length).to(torch.int32))


def _indexer_forward(original, rotate):
    """The indexer's forward: `original`, except for models on msa_ext with packed batches or `use_index_kernels`."""

    @functools.wraps(original)
    def forward(self, hidden_states, position_embeddings, cache, position_ids):
        if self.config._attn_implementation != NAME:
            return original(self, hidden_states, position_embeddings, cache, position_ids)
        batch, q_length, _ = hidden_states.shape
        past = 0
        if cache is not None:
            _check_cache(cache, self.layer_idx)
            past = cache.get_seq_length(self.layer_idx) - q_length  # keys of this call are in it already
        layout = _rows(position_ids, batch, q_length, past + q_length, hidden_states.device)
        if not _use_index_kernels and layout.cu_seqlens.shape[0] == batch + 1:
            return original(self, hidden_states, position_embeddings, cache, position_ids)
        query = self.q_norm(self.q_proj(hidden_states).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden_states))[:, None]
        cos, sin = (x[..., : self.head_dim] for x in position_embeddings)
        query, key = rotate(query, key, cos, sin)
        if cache is not None:
            key = cache.layers[self.layer_idx].update_index(key)
        topk, _ = select_blocks(
            _compact(query), _compact(key), layout, top_k=self.topk_blocks, local_blocks=self.local_blocks
        )
        return topk.unflatten(1, (batch, q_length)).transpose(0, 1).long()

    forward.original = original
    return forward


def _check_cache(cache, layer_idx: int) -> None:
    from transformers.cache_utils import StaticLayer

    if isinstance(cache.layers[layer_idx], StaticLayer):
        raise NotImplementedError(
            'cache_implementation: attn_implementation="msa_ext" expects "dynamic", got a static cache'
        )


def _compact(x: Tensor) -> Tensor:
    """`[B, heads, S, D]` as `[B * S, heads, D]`."""
    return x.transpose(1, 2).flatten(0, 1)


def _attend(module, query, key, value, attention_mask, dropout=0.0, scaling=None, block_indices=None, **kwargs):
    """transformers' attention interface: `[B, heads, S, D]` in, (`[B, S, heads, D]`, None) out."""
    if block_indices is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    batch, _, q_length, head_dim = query.shape
    _check_config(module.config, head_dim, key.shape[1], block_indices.shape[1], dropout)
    layout = _rows(kwargs.get("position_ids"), batch, q_length, key.shape[2], query.device)
    out = attention(
        _compact(query),
        _compact(key),
        _compact(value),
        block_indices.to(torch.int32).transpose(0, 1).flatten(1, 2),
        layout.cu_seqlens,
        cu_seqlens_k=layout.cu_seqlens_k,
        softmax_scale=scaling,
    )
    return out.unflatten(0, (batch, q_length)), None


def _check_config(config, head_dim: int, num_kv_heads: int, index_heads: int, dropout: float) -> None:
    for option, expected, got in (
        ("head_dim", HEAD_DIM, head_dim),
        ("index_block_size", BLOCK_KEYS, config.index_block_size),
        ("index_n_heads", num_kv_heads, index_heads),
        ("attention_dropout", 0.0, dropout),
    ):
        if got != expected:
            raise NotImplementedError(f'{option}: attn_implementation="msa_ext" expects {expected}, got {got}')
    if config.index_topk_blocks > MAX_TOP_K:
        got = config.index_topk_blocks
        raise NotImplementedError(
            f'index_topk_blocks: attn_implementation="msa_ext" expects at most {MAX_TOP_K}, got {got}'
        )
