"""The public entry point: `run_backward`."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from . import _cuda_backward, _runtime, _validate, reference, support
from ._cuda_backward import Arguments
from .schedule import BLOCK_KEYS, MSABackwardSchedule, align_kv, build_schedule, unalign_kv

__all__ = ["MSABackwardSchedule", "align_kv", "build_schedule", "run_backward", "unalign_kv"]

HEAD_DIM = 128
CUDA_GROUPS = (16, 8)
DQ_ACCUMS = ("bf16", "fp16", "fp32")


def run_backward(
    q: Tensor,
    k_aligned: Tensor,
    v_aligned: Tensor,
    grad_out: Tensor,
    lse: Tensor,
    out: Tensor,
    schedule: MSABackwardSchedule,
    *,
    softmax_scale: float | None = None,
    dq_accum: str | None = None,
    deterministic: bool = False,
    backend: str | None = None,
    kv_grad_dtype: torch.dtype = torch.bfloat16,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of MiniMax Sparse Attention.

    On CUDA everything is enqueued on the current stream of the tensors' device, without host synchronisation, and
    can be captured in a CUDA graph. Views are used without a copy where the last dimension is contiguous, the other
    strides are multiples of 16 bytes and the address is 16-byte aligned; otherwise they are copied once.

    Args:
        q, grad_out, out: bfloat16 `[T, Hq, 128]`; `out` as the forward stored it.
        k_aligned, v_aligned: bfloat16 `[W, Hkv, 128]`, the block-aligned workspace of `align_kv`, padding zero.
        lse: float32 `[T, Hq]`, natural log of the summed exponentials of scaled scores; -inf = no visible key.
        schedule: on the same device; see `build_schedule`. Contents are validated on the CPU only; on CUDA bad
            entries are skipped and reported by `msa_ext.debug.last_flags` (an exception under MSA_CHECK=1).
        softmax_scale: default `128 ** -0.5`.
        dq_accum: "bf16", "fp16" or "fp32", how dQ is accumulated; default: the backend's, see `support.explain`.
            The reference takes all three and accumulates in float32.
        deterministic: bitwise reproducible results; only the reference offers it.
        backend: "reference", "simple", "sm90", ...; default by device.
        kv_grad_dtype: torch.bfloat16, or torch.float32 for unrounded dk and dv.
        dq, dk, dv: contiguous outputs to fill in place.

    Returns:
        dq bfloat16 `[T, Hq, 128]`, dk and dv `kv_grad_dtype` `[W, Hkv, 128]`; exactly zero where nothing is visible.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came; nothing has been launched.
        NotImplementedError: no backend for the device, the backend lacks what was asked for, or the call is traced.
        RuntimeError: a backend that is not deterministic under `torch.use_deterministic_algorithms(True)`.
    """
    if not _agree(q, k_aligned, v_aligned, grad_out, lse, out, schedule):
        _check_inputs(q, k_aligned, v_aligned, grad_out, lse, out, schedule)
    device = q.device
    scale = _check_scale(softmax_scale)
    if kv_grad_dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"kv_grad_dtype: expected torch.bfloat16 or torch.float32, got {kv_grad_dtype}")
    chosen, accum = _resolve(q, k_aligned, backend, dq_accum, deterministic)

    inputs = (q, k_aligned, v_aligned, grad_out, lse, out)
    targets = (
        ("dq", dq, q, torch.bfloat16),
        ("dk", dk, k_aligned, kv_grad_dtype),
        ("dv", dv, v_aligned, kv_grad_dtype),
    )
    taken = None  # extents an output must not touch; only worked out when one is given
    for name, given, like, dtype in targets:
        if given is not None:
            if taken is None:
                taken = [_extent(x) for x in inputs] + [_extent(x) for _, x in schedule.named_tensors()]
            taken.append(_check_output(name, given, like.shape, dtype, device, taken))
    if chosen == "reference":
        schedule.validate(
            num_tokens=q.shape[0], workspace_rows=k_aligned.shape[0], group=q.shape[1] // k_aligned.shape[1]
        )
    outputs = [_runtime.empty_like(like, dtype) if given is None else given for _, given, like, dtype in targets]
    arguments = Arguments(*inputs, schedule, scale, *outputs)
    if chosen == "reference":
        gradients = reference.backward(*inputs, schedule, softmax_scale=scale)
        with torch.inference_mode():  # outputs may be inference tensors
            for target, gradient in zip(outputs, gradients):
                target.copy_(gradient)
    else:
        _cuda_backward.launch(arguments, chosen, accum)
    return tuple(outputs)


def _agree(q, k_aligned, v_aligned, grad_out, lse, out, schedule) -> bool:
    """Whether types, shapes and devices are all as expected; a few microseconds, for every call."""
    try:
        num_tokens, num_heads, head_dim = shape = q.shape
        num_rows, num_kv_heads, _ = kv_shape = k_aligned.shape
        device = q.device
        return (
            type(schedule) is MSABackwardSchedule
            and head_dim == kv_shape[2] == HEAD_DIM
            and num_rows % BLOCK_KEYS == 0
            and num_kv_heads == schedule.num_kv_heads
            and num_heads > 0
            and num_heads % num_kv_heads == 0
            and shape == grad_out.shape == out.shape
            and kv_shape == v_aligned.shape
            and lse.shape == (num_tokens, num_heads)
            and q.dtype == k_aligned.dtype == v_aligned.dtype == grad_out.dtype == out.dtype == torch.bfloat16
            and lse.dtype == torch.float32
            and device == k_aligned.device == v_aligned.device == grad_out.device
            and device == lse.device == out.device == schedule.device
            and all(map(_validate.is_ordinary, (q, k_aligned, v_aligned, grad_out, lse, out)))
            and _validate.tracer() is None
        )
    except (AttributeError, ValueError):  # not a tensor, or not three dimensions
        return False


def _check_inputs(q, k_aligned, v_aligned, grad_out, lse, out, schedule) -> None:
    """Raises for the first input that is not as expected."""
    wide = {"q": q, "k_aligned": k_aligned, "v_aligned": v_aligned, "grad_out": grad_out, "out": out}
    for name, tensor in wide.items():
        _validate.tensor(name, tensor, dtype=torch.bfloat16)
    _validate.tensor("lse", lse, dtype=torch.float32)
    if not isinstance(schedule, MSABackwardSchedule):
        raise TypeError(f"schedule: expected an MSABackwardSchedule, got {type(schedule).__name__}")
    _check_shapes(q, k_aligned, v_aligned, grad_out, lse, out, schedule)
    for name, tensor in {**wide, "lse": lse, "schedule": schedule}.items():
        _validate.device(name, tensor, q.device, "q's")


def _check_shapes(q, k_aligned, v_aligned, grad_out, lse, out, schedule) -> None:
    _validate.shape("q", q, ("T", "Hq", HEAD_DIM))
    num_tokens, num_heads = q.shape[:2]
    _validate.shape("k_aligned", k_aligned, ("W", "Hkv", HEAD_DIM))
    num_rows, num_kv_heads = k_aligned.shape[:2]
    if num_rows % BLOCK_KEYS:
        raise ValueError(f"k_aligned: expected a multiple of {BLOCK_KEYS} rows, got {num_rows}")
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"q: expected Hq to be a multiple of Hkv = {num_kv_heads}, got {num_heads}")
    _validate.shape("v_aligned", v_aligned, (num_rows, num_kv_heads, HEAD_DIM))
    _validate.shape("grad_out", grad_out, (num_tokens, num_heads, HEAD_DIM))
    _validate.shape("out", out, (num_tokens, num_heads, HEAD_DIM))
    if lse.shape == (num_heads, num_tokens) and num_heads != num_tokens:
        raise ValueError(
            f"lse: expected shape [T, Hq] = [{num_tokens}, {num_heads}], got its transpose "
            f"[{num_heads}, {num_tokens}]; pass lse.T"
        )
    _validate.shape("lse", lse, (num_tokens, num_heads))
    if schedule.num_kv_heads != num_kv_heads:
        raise ValueError(
            f"schedule: expected Hkv = {num_kv_heads} index heads as in k_aligned, got {schedule.num_kv_heads}"
        )


def _check_scale(softmax_scale: float | None) -> float:
    if softmax_scale is None:
        return HEAD_DIM**-0.5
    if not isinstance(softmax_scale, (int, float)) or isinstance(softmax_scale, bool):
        raise TypeError(f"softmax_scale: expected a float, got {type(softmax_scale).__name__}")
    try:
        scale = float(softmax_scale)
    except OverflowError:
        scale = math.inf
    if not math.isfinite(scale):
        raise ValueError(f"softmax_scale: expected a finite value, got {scale}")
    return scale


def _resolve(
    q: Tensor, k_aligned: Tensor, backend: str | None, dq_accum: str | None, deterministic: bool
) -> tuple[str, str]:
    """The backend's name and the dQ accumulation it will use."""
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend: expected a str or None, got {type(backend).__name__}")
    if not isinstance(deterministic, bool):
        raise TypeError(f"deterministic: expected a bool, got {type(deterministic).__name__}")
    if dq_accum is not None and dq_accum not in DQ_ACCUMS:
        raise ValueError(f"dq_accum: expected one of {', '.join(DQ_ACCUMS)} or None, got {dq_accum!r}")
    device = q.device
    if _runtime.is_cuda(device):
        known = _cuda_backend(device, backend)
        group = q.shape[1] // k_aligned.shape[1]
        if known.major >= 0 and group not in CUDA_GROUPS:
            raise NotImplementedError(f"q: backend {known.name} expects Hq / Hkv of 16 or 8, got {group}")
    elif device.type == "cpu":
        known = support.REFERENCE
        if backend not in (None, known.name):
            raise NotImplementedError(f"backend: expected reference or None for tensors on the CPU, got {backend!r}")
    else:
        raise NotImplementedError(f"q: expected a CPU or CUDA device, got {device}")
    if deterministic and not known.deterministic:
        raise NotImplementedError(f"deterministic: backend {known.name} expects False, got True")
    if torch.are_deterministic_algorithms_enabled() and not known.deterministic:
        _alert_not_deterministic(known.name)
    accum = dq_accum or known.default_dq_accum
    if accum not in known.dq_accums:
        raise NotImplementedError(
            f"dq_accum: backend {known.name} expects one of {', '.join(known.dq_accums)}, got {accum!r}"
        )
    return known.name, accum


def _alert_not_deterministic(name: str) -> None:
    """What torch's own operators do under torch.use_deterministic_algorithms(True)."""
    message = (
        f"run_backward: backend {name} adds gradients atomically, in no fixed order, and has no deterministic "
        "implementation, but torch.use_deterministic_algorithms(True) is set"
    )
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(f"{message}; turn it off for this call, or set warn_only=True")
    warnings.warn(message, stacklevel=4)


def _cuda_backend(device: torch.device, backend: str | None) -> support.Backend:
    if backend == support.REFERENCE.name:
        return support.REFERENCE
    capability = _runtime.capability(device)
    found = support.usable_backends(capability).get(backend or support.default_backend(capability))
    if found is None:
        archs = ", ".join(_runtime.extension().built_archs())
        raise NotImplementedError(
            f"backend: expected one for {device} of compute capability {capability[0]}.{capability[1]}, got "
            f"{backend!r}; built are {', '.join(support.cuda_backends())} ({archs})"
        )
    return found


def _check_output(name, given, shape, dtype, device, taken) -> tuple[int, int]:
    """Raises unless `given` can be filled in place without touching the `taken` extents; returns its own."""
    _validate.tensor(name, given, dtype=dtype)
    _validate.shape(name, given, shape)
    _validate.device(name, given, device, "q's")
    if not given.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {given.stride()}")
    if given.data_ptr() % 16:
        raise ValueError(f"{name}: expected an address aligned to 16 bytes, got {given.data_ptr():#x}")
    begin, end = _extent(given)
    for other_begin, other_end in taken:
        if begin < other_end and other_begin < end:
            raise ValueError(f"{name}: expected memory that overlaps no other argument, got an overlap")
    return begin, end


def _extent(tensor: Tensor) -> tuple[int, int]:
    """First and end address a tensor may touch."""
    if tensor.numel() == 0:
        return 0, 0
    begin = tensor.data_ptr()
    if tensor.is_contiguous():
        return begin, begin + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return begin, begin + (last + 1) * tensor.element_size()
