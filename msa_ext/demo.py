"""The demo: an MSA backward on a real pack's documents, checked against the float64 oracle."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from . import reference, support
from .backward import run_backward
from .packs import load_packs
from .schedule import BLOCK_KEYS, build_schedule, ceil_to_block, unalign_kv
from .testing import compare, oracle

HEAD_DIM = 128
NUM_HEADS = 64
NUM_KV_HEADS = 4
INDEX_DIM = 128
TOPK = 16
WHOLE_CHECK_TOKENS = 512  # up to here every gradient is checked, beyond a sample
SAMPLED_TOKENS = 24
SAMPLED_BLOCKS = 6


@dataclass
class Step:
    name: str
    milliseconds: float


class _Clock:
    """Wall time of named steps, device work included."""

    def __init__(self, device: torch.device):
        self.device = device
        self.steps: list[Step] = []

    def run(self, name: str, work: Callable):
        begin = time.perf_counter()
        result = work()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.steps.append(Step(name, 1e3 * (time.perf_counter() - begin)))
        return result


def _bar(name: str, work: Callable[[], Any]) -> Callable[[], Any]:
    """`work` with a progress bar on what the reference computes in it."""

    def run() -> Any:
        token = reference.PROGRESS.set(name)
        try:
            return work()
        finally:
            reference.PROGRESS.reset(token)

    return run


def select_blocks(index_q: Tensor, index_k: Tensor, lengths: list[int], progress: bool = False) -> Tensor:
    """Blocks as the MSA indexer picks them: int32 `[Hkv, T, 16]`, document-local.

    A block's score is the largest `index_q . index_k` over its visible keys; the token's own block is forced.

    Args:
        index_q, index_k: `[T, Hkv, 128]`.
        lengths: document lengths, T in all.
    """
    num_tokens, heads, _ = index_q.shape
    chosen = torch.full((heads, num_tokens, TOPK), -1, dtype=torch.int32, device=index_q.device)
    begin = 0
    for length in tqdm(lengths, desc="select", unit="doc", disable=not progress, leave=False):
        q, k = index_q[begin : begin + length], index_k[begin : begin + length]
        padded = torch.nn.functional.pad(k, (0, 0, 0, 0, 0, ceil_to_block(length) - length))
        for first in range(0, length, BLOCK_KEYS):  # the queries of one block: they share the own block
            rows = slice(first, min(first + BLOCK_KEYS, length))
            own = first // BLOCK_KEYS
            key = torch.arange((own + 1) * BLOCK_KEYS, device=q.device)
            scores = torch.einsum("thd,khd->htk", q[rows], padded[: len(key)])
            query = torch.arange(rows.start, rows.stop, device=q.device)
            scores.masked_fill_(key[None, None, :] > query[None, :, None], -torch.inf)
            block_scores = scores.view(heads, len(query), own + 1, BLOCK_KEYS).amax(dim=3)
            block_scores[:, :, own] = torch.inf
            count = min(TOPK, own + 1)
            ids = block_scores.topk(count, dim=2).indices
            chosen[:, begin + rows.start : begin + rows.stop, :count] = ids.to(torch.int32)
        begin += length
    return chosen


def _check(problem: oracle.Problem, grad_out, lse, out, gradients, accum, seed: int) -> tuple[str, list[compare.Error]]:
    """Errors against the float64 oracle, on everything when small, else on sampled tokens and key blocks."""
    num_tokens = problem.q.shape[0]
    dead = torch.isneginf(lse)
    if num_tokens <= WHOLE_CHECK_TOKENS:
        expected = oracle.backward(problem, grad_out, lse, out)
        return "every token and key", compare.compare_all(gradients, expected, dead, dq_accum=accum)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randperm(num_tokens, generator=generator)[:SAMPLED_TOKENS].sort().values
    num_blocks = problem.k_aligned.shape[0] // BLOCK_KEYS
    blocks = torch.randperm(num_blocks, generator=generator)[:SAMPLED_BLOCKS].sort().values
    dq = oracle.sampled_dq(problem, grad_out, lse, out, tokens.tolist())
    dk, dv = oracle.sampled_dkv(problem, grad_out, lse, out, blocks.tolist())
    got = [gradients[0][tokens]]
    got += [x.unflatten(0, (-1, BLOCK_KEYS))[blocks].flatten(0, 1) for x in gradients[1:]]
    expected = (dq, dk.flatten(0, 1), dv.flatten(0, 1))
    what = f"{len(tokens)} sampled tokens, {len(blocks)} sampled key blocks"
    return what, compare.compare_all(tuple(got), expected, dead[tokens], dq_accum=accum)


def _gpu_backend() -> support.Backend | None:
    """The backend of the first GPU; None where there is no GPU or nothing that runs on it is built."""
    if not torch.cuda.is_available():
        return None
    try:
        return support.cuda_backends().get(support.default_backend(torch.cuda.get_device_capability(0)))
    except RuntimeError:  # the extension does not load
        return None


def run(pack: str, num_tokens: int, device_name: str, seed: int, save: Path | None) -> bool:
    """Runs the demo and prints its report; True if every gradient is within tolerance.

    Raises:
        ValueError: unknown pack, a token budget out of range, a device or a folder to save in that is not there.
    """
    packs = load_packs()
    if pack not in packs:
        raise ValueError(f"--pack: expected one of {', '.join(packs)}, got {pack!r}")
    if not 1 <= num_tokens <= packs[pack].cu_seqlens[-1]:
        raise ValueError(f"--tokens: expected a value in [1, {packs[pack].cu_seqlens[-1]}], got {num_tokens}")
    gpu_backend = _gpu_backend()
    if device_name == "auto":
        device_name = "cpu" if gpu_backend is None else "cuda"
    if device_name == "cuda" and gpu_backend is None:
        raise ValueError(
            "--device: expected a GPU that a built backend runs on for cuda, got none (`python -m msa_ext info` says "
            "why); try --device cpu"
        )
    if not -(2**63) <= seed < 2**64:  # what torch.Generator takes
        raise ValueError(f"--seed: expected a value in [-2**63, 2**64 - 1], got {seed}")
    if save is not None and not save.parent.is_dir():
        raise ValueError(f"--save: expected a file in an existing folder, got {save}")
    if save is not None and save.is_dir():
        raise ValueError(f"--save: expected a file, got the folder {save}")
    if save is not None and not os.access(save if save.exists() else save.parent, os.W_OK):
        raise ValueError(f"--save: expected a file that can be written, got {save}")
    device = torch.device(device_name, 0) if device_name == "cuda" else torch.device("cpu")

    lengths = packs[pack].document_lengths(num_tokens)
    generator = torch.Generator(device).manual_seed(seed)
    clock = _Clock(device)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + ceil_to_block(length))
    q, grad_out = (normal(num_tokens, NUM_HEADS, HEAD_DIM).bfloat16() for _ in range(2))
    is_key = torch.zeros(starts[-1], dtype=torch.bool, device=device)
    for start, length in zip(starts, lengths):
        is_key[start : start + length] = True
    k, v = ((normal(starts[-1], NUM_KV_HEADS, HEAD_DIM) * is_key[:, None, None]).bfloat16() for _ in range(2))
    index_q, index_k = (normal(num_tokens, NUM_KV_HEADS, INDEX_DIM) for _ in range(2))

    topk = clock.run("select blocks", lambda: select_blocks(index_q, index_k, lengths, progress=True))
    schedule = clock.run("build schedule", lambda: build_schedule(topk, cu_seqlens))
    out, lse = clock.run("forward (reference)", _bar("forward", lambda: reference.forward(q, k, v, schedule)))
    if device.type == "cuda":
        run_backward(q, k, v, grad_out, lse, out, schedule)  # module load is not the kernel's time
        torch.cuda.synchronize(device)
    gradients = clock.run("backward", _bar("backward", lambda: run_backward(q, k, v, grad_out, lse, out, schedule)))
    problem = oracle.Problem(
        q.cpu(),
        k.cpu(),
        v.cpu(),
        topk.cpu(),
        cu_seqlens.tolist(),
        starts[:-1],
        [0] * len(lengths),
        HEAD_DIM**-0.5,
        progress="check",
    )
    backend = gpu_backend if device.type == "cuda" else support.REFERENCE
    cpu = [x.cpu() for x in (grad_out, lse, out)]
    checked, errors = clock.run(
        "check (float64 oracle)",
        lambda: _check(problem, *cpu, tuple(x.cpu() for x in gradients), backend.default_dq_accum, seed),
    )
    if save is not None:
        _save(save, gradients, cu_seqlens, torch.tensor(starts[:-1], dtype=torch.int32, device=device))

    edges = int(schedule.row_ptr[:, -1].sum())
    items = schedule.scheduler_metadata[: int(schedule.work_count)]
    tasks = int(((items[:, 3] + 7) // 8).sum())
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"device     {where}, backend {backend.name}, dq_accum {backend.default_dq_accum}")
    print(f"pack       {pack}: {len(lengths)} documents, {num_tokens} tokens, longest {max(lengths)}")
    print(f"attention  Hq {NUM_HEADS}, Hkv {NUM_KV_HEADS}, D {HEAD_DIM}, top {TOPK} blocks of {BLOCK_KEYS} keys")
    print(f"schedule   {edges} edges, {tasks} tasks of 8 queries x 16 heads")
    for step in clock.steps:
        print(f"time       {step.name:24} {step.milliseconds:10.1f} ms")
    print(f"check      {checked}")
    for error in errors:
        print(f"           {error}")
    if save is not None:
        print(f"saved      {save}")
    passed = all(error.passed for error in errors)
    print("PASS" if passed else "FAIL")
    return passed


def _save(path: Path, gradients: tuple[Tensor, ...], cu_seqlens: Tensor, starts: Tensor) -> None:
    """dq, and dk, dv without the workspace's padding, in BF16."""
    from safetensors.torch import save_file

    dq, dk, dv = gradients
    tensors = {"dq": dq, "dk": unalign_kv(dk, cu_seqlens, starts), "dv": unalign_kv(dv, cu_seqlens, starts)}
    tensors["cu_seqlens"] = cu_seqlens
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, path)
