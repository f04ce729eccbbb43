"""The differentiable operator: `msa_ext.attention`, on compact tensors and straight from the selection.

`torch.ops.msa_ext.attention` and `attention_backward` are what is registered with torch: one implementation each for
every device, which calls the reference or the CUDA kernels by the name of its backend. The forward's third output is
what the backward can use again (`tasks`, opaque); it is the forward's backend that defines it.
"""

from __future__ import annotations

import math
import os
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _validate, reference_attention
from .reference_attention import Layout
from .schedule import BLOCK_KEYS

HEAD_DIM = 128
MAX_TOP_K = 64
DQ_ACCUMS = ("bf16", "fp16", "fp32")
# MSA_CHECK=1 when the package is imported: contents are checked too, which synchronises with the host.
CHECK = os.environ.get("MSA_CHECK") == "1"
_REFERENCE = "reference"
_REFERENCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    topk: Tensor,
    cu_seqlens: Tensor,
    *,
    cu_seqlens_k: Tensor | None = None,
    query_offsets: Tensor | None = None,
    entry_documents: Tensor | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    dq_accum: str | None = None,
    deterministic: bool | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """MiniMax Sparse Attention of packed documents, differentiable in q, k and v.

    Token t of entry b attends, in head h, to the keys of b's document at or before its own position in the blocks
    `topk[h // (Hq / Hkv), t]`. Rows past `cu_seqlens[-1]` belong to nobody and are not read.

    Args:
        q: bfloat16 `[T, Hq, 128]`; k, v: `[Tk, Hkv, 128]`, documents one after the other, unaligned. The CPU also takes
            float16, float32 and float64. Under autocast float32 and float16 are cast to bfloat16.
        topk: int32 `[Hkv, T, K]`, 1 <= K <= 64: ids of 128-key blocks counted from the document's first key, in any
            order, -1 = empty. Ids outside the document or wholly in the token's future are ignored, duplicates count
            once.
        cu_seqlens: int32 `[entries + 1]`, where each entry's queries begin.
        cu_seqlens_k: int32 `[documents + 1]`, where each document's keys begin; default `cu_seqlens`.
        query_offsets: int32 `[entries]`, position of an entry's first query in its document; default: its keys less its
            queries.
        entry_documents: int32 `[entries]`, whose keys an entry attends to; default 0, 1, 2, ...
        softmax_scale: default `128 ** -0.5`.
        return_lse: also return the log-sum-exp, which is differentiable.
        dq_accum: "bf16", "fp16" or "fp32", how the backward accumulates dQ; default: the backend's.
        deterministic: bitwise reproducible gradients; None follows `torch.are_deterministic_algorithms_enabled()`.
        backend: "reference" or a name of `support.explain()`; default by device.

    Returns:
        out like q, or (out, lse float32 `[T, Hq]`, natural log; float64 for float64 inputs). Tokens without a visible
        key get 0 and -inf, and no gradient.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came; nothing has been launched.
        NotImplementedError: no backend for the device or what was asked for; functorch transforms and forward-mode
            derivatives, and second derivatives (when they are computed).
    """
    if isinstance(q, Tensor) and torch.is_autocast_enabled(q.device.type):
        q, k, v = (_autocast(x) for x in (q, k, v))
    _check_tensors(q, k, v, topk)
    _check_layout(cu_seqlens, cu_seqlens_k, query_offsets, entry_documents, q.device)
    _check_transforms(q, k, v)
    scale = _check_scale(softmax_scale)
    if not isinstance(return_lse, bool):
        raise TypeError(f"return_lse: expected a bool, got {type(return_lse).__name__}")
    backend, dq_accum, deterministic = _resolve(q, k, backend, dq_accum, deterministic)
    out, lse, _ = torch.ops.msa_ext.attention(
        q,
        k,
        v,
        topk,
        cu_seqlens,
        cu_seqlens_k,
        query_offsets,
        entry_documents,
        scale,
        backend,
        dq_accum,
        deterministic,
    )
    return (out, lse) if return_lse else out


def _autocast(x: Tensor) -> Tensor:
    castable = isinstance(x, Tensor) and x.dtype in (torch.float32, torch.float16)
    return x.to(torch.bfloat16) if castable else x


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, topk: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _validate.any_tensor(name, tensor)
    dtypes = _REFERENCE_DTYPES
    if q.dtype not in dtypes:
        raise TypeError(f"q: expected dtype torch.bfloat16 (on the CPU any float dtype), got {q.dtype}")
    for name, tensor in (("k", k), ("v", v)):
        _validate.any_tensor(name, tensor, dtype=q.dtype)
    _validate.any_tensor("topk", topk, dtype=torch.int32)
    for name, tensor, expected in (("q", q, ("T", "Hq", HEAD_DIM)), ("k", k, ("Tk", "Hkv", HEAD_DIM))):
        if tensor.dim() == 3 and tensor.shape[2] != HEAD_DIM:
            raise NotImplementedError(f"{name}: expected head_dim {HEAD_DIM}, got {list(tensor.shape)}")
        _validate.shape(name, tensor, expected)
    num_tokens, num_heads = q.shape[:2]
    num_kv_heads = k.shape[1]
    _validate.shape("v", v, (k.shape[0], num_kv_heads, HEAD_DIM))
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"q: expected Hq to be a multiple of Hkv = {num_kv_heads}, got {num_heads}")
    if (
        topk.dim() == 3
        and topk.shape[:2] != (num_kv_heads, num_tokens)
        and topk.shape[:2] == (num_tokens, num_kv_heads)
    ):
        raise ValueError(
            f"topk: expected shape [Hkv, T, K] = [{num_kv_heads}, {num_tokens}, K], got token-major "
            f"{list(topk.shape)}; pass topk.transpose(0, 1)"
        )
    _validate.shape("topk", topk, (num_kv_heads, num_tokens, "K"))
    if not 1 <= topk.shape[2] <= MAX_TOP_K:
        raise ValueError(f"topk: expected K in [1, {MAX_TOP_K}], got {topk.shape[2]}")
    for name, tensor in (("k", k), ("v", v), ("topk", topk)):
        _validate.device(name, tensor, q.device, "q's")


def _check_layout(
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor | None,
    query_offsets: Tensor | None,
    entry_documents: Tensor | None,
    device: torch.device,
) -> None:
    _validate.any_tensor("cu_seqlens", cu_seqlens, dtype=torch.int32)
    _validate.shape("cu_seqlens", cu_seqlens, ("entries + 1",))
    if cu_seqlens.shape[0] < 1:
        raise ValueError("cu_seqlens: expected shape [entries + 1 >= 1], got [0]")
    num_entries = cu_seqlens.shape[0] - 1
    if cu_seqlens_k is not None:
        _validate.any_tensor("cu_seqlens_k", cu_seqlens_k, dtype=torch.int32)
        _validate.shape("cu_seqlens_k", cu_seqlens_k, ("documents + 1",))
        if cu_seqlens_k.shape[0] < 1:
            raise ValueError("cu_seqlens_k: expected shape [documents + 1 >= 1], got [0]")
        if entry_documents is None and cu_seqlens_k.shape[0] != cu_seqlens.shape[0]:
            raise ValueError(
                f"entry_documents: expected a tensor where entries ({num_entries}) and documents "
                f"({cu_seqlens_k.shape[0] - 1}) differ in number, got None"
            )
    for name, tensor in (("query_offsets", query_offsets), ("entry_documents", entry_documents)):
        if tensor is not None:
            _validate.any_tensor(name, tensor, dtype=torch.int32)
            _validate.shape(name, tensor, (num_entries,))
    for name, tensor in (
        ("cu_seqlens", cu_seqlens),
        ("cu_seqlens_k", cu_seqlens_k),
        ("query_offsets", query_offsets),
        ("entry_documents", entry_documents),
    ):
        if tensor is not None:
            _validate.device(name, tensor, device, "q's")


def _check_transforms(*tensors: Tensor) -> None:
    if torch.compiler.is_compiling():
        return
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "msa_ext.attention: expected no torch.func transform (vmap, grad, jvp, ...); use packed documents instead "
            "of vmap, torch.autograd instead of grad"
        )
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError("msa_ext.attention: expected no dual tensors, forward-mode derivatives do not exist")


def _check_scale(softmax_scale: float | None) -> float:
    if softmax_scale is None:
        return HEAD_DIM**-0.5
    if not isinstance(softmax_scale, (int, float)) or isinstance(softmax_scale, bool):
        raise TypeError(f"softmax_scale: expected a float, got {type(softmax_scale).__name__}")
    if not math.isfinite(softmax_scale):
        raise ValueError(f"softmax_scale: expected a finite value, got {softmax_scale}")
    return float(softmax_scale)


def _resolve(
    q: Tensor, k: Tensor, backend: str | None, dq_accum: str | None, deterministic: bool | None
) -> tuple[str, str | None, bool]:
    """The backend's name, how it accumulates dQ, and whether gradients must be reproducible."""
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend: expected a str or None, got {type(backend).__name__}")
    if dq_accum is not None and dq_accum not in DQ_ACCUMS:
        raise ValueError(f"dq_accum: expected one of {', '.join(DQ_ACCUMS)} or None, got {dq_accum!r}")
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    elif not isinstance(deterministic, bool):
        raise TypeError(f"deterministic: expected a bool or None, got {type(deterministic).__name__}")
    kind = q.device.type
    if backend == _REFERENCE or kind in ("cpu", "meta"):
        if backend not in (None, _REFERENCE):
            raise NotImplementedError(f"backend: expected reference or None for tensors on the CPU, got {backend!r}")
        return _REFERENCE, dq_accum, deterministic
    if kind != "cuda":
        raise NotImplementedError(f"q: expected a CPU or CUDA device, got {q.device}")
    cuda = _cuda_kernels(q.device)
    if q.dtype != torch.bfloat16:
        raise TypeError(f"q: expected dtype torch.bfloat16 on CUDA, got {q.dtype}")
    return (*cuda.resolve(q.device, q.shape[1] // k.shape[1], backend, dq_accum, deterministic), deterministic)


def _cuda_kernels(device: torch.device) -> ModuleType:
    """The CUDA half, `msa_ext._attention_cuda`.

    resolve(device, group, backend, dq_accum, deterministic) -> (backend, dq_accum), or NotImplementedError
    num_task_words(q, k, topk, layout, backend) -> int, from shapes alone (sizes may be symbolic)
    forward(q, k, v, topk, layout, softmax_scale, backend) -> (out, lse, tasks int32 [num_task_words]), contiguous
    backward(grad_out, grad_lse or None, q, k, v, out, lse, topk, tasks, layout, softmax_scale, backend, dq_accum,
        deterministic) -> (dq, dk, dv) like q, k, v, contiguous
    """
    try:
        from . import _attention_cuda
    except ModuleNotFoundError as error:
        raise NotImplementedError(f"q: expected a CPU device, no CUDA attention is built, got {device}") from error
    return _attention_cuda


def check_contents(topk: Tensor, layout: Layout, num_keys: int) -> None:
    """Checks ids and offsets, with host synchronisations.

    Raises:
        ValueError: naming the first that is not as `attention` expects.
    """
    heads, num_tokens, _ = topk.shape
    cu = _offsets("cu_seqlens", layout.cu_seqlens, "T", num_tokens)
    cu_k = cu
    if layout.cu_seqlens_k is not None:
        cu_k = _offsets("cu_seqlens_k", layout.cu_seqlens_k, "Tk", num_keys)
    elif cu[-1] > num_keys:
        raise ValueError(f"cu_seqlens[-1]: expected at most Tk = {num_keys}, got {cu[-1]}")
    documents = len(cu_k) - 1
    if layout.entry_documents is not None:
        for entry, document in enumerate(layout.entry_documents.tolist()):
            if not 0 <= document < documents:
                raise ValueError(f"entry_documents[{entry}]: expected a value in [0, {documents}), got {document}")
    for entry, (tokens, keys, offset) in enumerate(layout.entries(num_tokens, num_keys)):
        if len(tokens) and not 0 <= offset <= len(keys) - len(tokens):
            raise ValueError(
                f"query_offsets[{entry}]: expected {len(tokens)} queries at positions within the document's "
                f"{len(keys)} keys, got {offset}"
            )
        num_blocks = -(-len(keys) // BLOCK_KEYS)
        ids = topk[:, tokens.start : tokens.stop]
        bad = ((ids < -1) | (ids >= num_blocks)).nonzero()
        if bad.numel():
            head, token, slot = bad[0].tolist()
            raise ValueError(
                f"topk[{head}, {tokens.start + token}, {slot}]: expected -1 or a block of the document in "
                f"[0, {num_blocks}), got {int(ids[head, token, slot])}"
            )


def _offsets(name: str, values: Tensor, limit_name: str, limit: int) -> list[int]:
    offsets = values.tolist()
    if offsets[0] != 0 or any(a > b for a, b in zip(offsets, offsets[1:])):
        raise ValueError(f"{name}: expected non-decreasing offsets from 0, got {offsets}")
    if offsets[-1] > limit:
        raise ValueError(f"{name}[-1]: expected at most {limit_name} = {limit}, got {offsets[-1]}")
    return offsets


_LIBRARY = torch.library.Library("msa_ext", "FRAGMENT")
_LAYOUT = "Tensor cu_seqlens, Tensor? cu_seqlens_k, Tensor? query_offsets, Tensor? entry_documents"
_OPTIONS = "float softmax_scale, str backend, str? dq_accum, bool deterministic"
_TAGS = (torch.Tag.pt2_compliant_tag,)
_LIBRARY.define(
    f"attention(Tensor q, Tensor k, Tensor v, Tensor topk, {_LAYOUT}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
_LIBRARY.define(
    "attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"Tensor topk, Tensor tasks, {_LAYOUT}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)


@torch.library.impl(_LIBRARY, "attention", "CompositeExplicitAutograd")
def _forward(
    q,
    k,
    v,
    topk,
    cu_seqlens,
    cu_seqlens_k,
    query_offsets,
    entry_documents,
    softmax_scale,
    backend,
    dq_accum,
    deterministic,
):
    layout = Layout(cu_seqlens, cu_seqlens_k, query_offsets, entry_documents)
    if CHECK and not (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        check_contents(topk, layout, k.shape[0])
    if backend != _REFERENCE:
        return _cuda_kernels(q.device).forward(q, k, v, topk, layout, softmax_scale, backend)
    out, lse = reference_attention.forward(q, k, v, topk, layout, softmax_scale)
    return out, lse, torch.empty(0, dtype=torch.int32, device=q.device)


@torch.library.register_fake("msa_ext::attention", lib=_LIBRARY)
def _forward_fake(
    q,
    k,
    v,
    topk,
    cu_seqlens,
    cu_seqlens_k,
    query_offsets,
    entry_documents,
    softmax_scale,
    backend,
    dq_accum,
    deterministic,
):
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=reference_attention.compute_dtype(q), device=q.device)
    words = 0
    if backend != _REFERENCE:
        layout = Layout(cu_seqlens, cu_seqlens_k, query_offsets, entry_documents)
        words = _cuda_kernels(q.device).num_task_words(q, k, topk, layout, backend)
    return out, lse, torch.empty(words, dtype=torch.int32, device=q.device)


@torch.library.impl(_LIBRARY, "attention_backward", "CompositeExplicitAutograd")
def _backward(
    grad_out, grad_lse, q, k, v, out, lse, topk, tasks, cu_seqlens, cu_seqlens_k, query_offsets, entry_documents,
    softmax_scale, backend, dq_accum, deterministic,
):  # fmt: skip
    layout = Layout(cu_seqlens, cu_seqlens_k, query_offsets, entry_documents)
    saved = (grad_out, grad_lse, q, k, v, out, lse, topk)
    if backend != _REFERENCE:
        options = (layout, softmax_scale, backend, dq_accum, deterministic)
        return _cuda_kernels(q.device).backward(*saved, tasks, *options)
    return reference_attention.backward(*saved, layout, softmax_scale)


@torch.library.register_fake("msa_ext::attention_backward", lib=_LIBRARY)
def _backward_fake(grad_out, grad_lse, q, k, v, *saved_and_options):
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))


def _setup_context(ctx, inputs, output) -> None:
    q, k, v, topk, *layout_and_options = inputs
    layout, ctx.options = layout_and_options[:4], layout_and_options[4:]
    out, lse, tasks = output
    ctx.save_for_backward(q, k, v, out, lse, topk, tasks, *layout)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad_out, grad_lse, _):
    saved = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(saved[3])
    gradients = torch.ops.msa_ext.attention_backward(grad_out, grad_lse, *saved, *ctx.options)
    return (*gradients, *[None] * 9)


def _refuse(ctx, *gradients):
    raise NotImplementedError("msa_ext.attention: expected one backward, second derivatives do not exist")


torch.library.register_autograd("msa_ext::attention", _differentiate, setup_context=_setup_context, lib=_LIBRARY)
torch.library.register_autograd("msa_ext::attention_backward", _refuse, lib=_LIBRARY)
