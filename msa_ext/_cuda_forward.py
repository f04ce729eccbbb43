"""The CUDA pipeline of the attention's forward: addresses and sizes for the extension."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _cuda, _runtime
from .reference_attention import Layout


def launch(
    q: Tensor, k: Tensor, v: Tensor, topk: Tensor, layout: Layout, softmax_scale: float, kernel: str
) -> tuple[Tensor, Tensor]:
    """Enqueues the forward of validated tensors on the current stream of their device; (out, lse), both new."""
    device = q.device
    cu_seqlens_k = layout.cu_seqlens if layout.cu_seqlens_k is None else layout.cu_seqlens_k
    tables = [
        None if x is None else x.contiguous()
        for x in (layout.cu_seqlens, cu_seqlens_k, layout.query_offsets, layout.entry_documents)
    ]
    with _runtime.guard(device):
        out = _runtime.empty_like(q, q.dtype)
        lse = _runtime.empty_like(q[:, :, 0], torch.float32)
        kept, operands = _cuda.operands((q, k, v))
        topk = topk.contiguous()
        _runtime.extension().forward(
            kernel,
            0 if device.index is None else device.index,
            _runtime.stream(device),
            (q.shape[0], k.shape[0], q.shape[1], k.shape[1], topk.shape[2]),
            operands,
            _runtime.address(topk),
            [0 if x is None else _runtime.address(x) for x in tables],
            (layout.cu_seqlens.shape[0] - 1, cu_seqlens_k.shape[0] - 1),
            (_runtime.address(out), _runtime.address(lse)),
            softmax_scale,
        )
    del kept
    return out, lse
