"""Times the backward and its stages on a GPU, against the matmul and copy rates of the same run.

    PYTHONPATH=.:tests python benchmarks/bench_backward.py [--cases T8192,pack16384] [--json FILE] [--peers sdpa,flex]

Every time is the median of CUDA-event timings, before each of which other data has been read into the L2. Useful FLOP
= 1280 * Hq * E, with E the visible (query, key) pairs of one query head. `ratio` is useful FLOP/s over the best bf16
8192^3 matmul measured before and after; on an H200 a run whose matmul is below 740 TFLOP/s is void. Stages are timed
alone; in the total the task build runs beside delta and clear. `outside main` is 1 - main / total.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch

import cases
from msa_ext import _cuda_backward, _runtime, reference, support
from msa_ext.backward import Arguments, run_backward
from msa_ext.schedule import build_schedule

STAGES = ("delta", "clear", "task_build", "main", "postprocess")
H200_MATMUL_FLOOR = 740.0
FLOP_PER_PAIR = 1280  # 5 GEMMs of 128, a multiply and an add each


class Timer:
    """Median milliseconds of work on the current stream; the L2 is cold, and clean, before each repeat."""

    def __init__(self, repeats: int):
        self.repeats = repeats
        self.other = torch.zeros(64 * 2**20, device="cuda")

    def __call__(self, work: Callable[[], object]) -> tuple[float, float]:
        """(median, half the spread between the 10th and 90th percentile)."""
        for _ in range(3):
            work()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.repeats)]
        for begin, end in events:
            self.other.sum()  # a write would leave dirty lines for `work` to write back
            begin.record()
            work()
            end.record()
        torch.cuda.synchronize()
        times = sorted(begin.elapsed_time(end) for begin, end in events)
        low, high = times[len(times) // 10], times[-1 - len(times) // 10]
        return statistics.median(times), (high - low) / 2


def matmul_tflops() -> float:
    """Best bf16 8192^3 matmul rate of ten timed products on random data."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    best = float("inf")
    for _ in range(13):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        a @ b
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end))
    return 2 * 8192**3 / best * 1e-9


def copy_gbytes_per_s(timer: Timer) -> float:
    """Device-to-device copy, bytes read plus written."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    median, _ = timer(lambda: target.copy_(source))
    return 2 * source.numel() * 4 / median * 1e-6


def host_microseconds(call: Callable[[], object]) -> float:
    """Median time until an asynchronous call returns."""
    times = []
    for _ in range(10):
        torch.cuda.synchronize()
        for _ in range(10):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return statistics.median(times) * 1e6


def visible_pairs(data: cases.CaseData) -> int:
    """(query, key) pairs over all index heads."""
    schedule = data.schedule
    items = schedule.scheduler_metadata[: int(schedule.work_count)].long()
    head, row, begin, size, entry, block = items.unbind(1)
    item = torch.repeat_interleave(torch.arange(len(items), device=items.device), size)
    within = torch.arange(len(item), device=items.device) - (size.cumsum(0) - size)[item]
    edge = (schedule.row_ptr.long()[head, row] + begin)[item] + within
    offsets = torch.tensor(data.query_offsets, device=items.device)
    position = offsets[entry[item]] + schedule.q_indices[head[item], edge].long()
    return int((position - 128 * block[item] + 1).clamp_max(128).sum())


def stage_bytes(data: cases.CaseData, accum: str) -> dict[str, int]:
    """Bytes that delta and clear + postprocess must move at least."""
    rows = data.q.shape[0] * data.q.shape[1]
    dq_pool = rows * 128 * (4 if accum == "fp32" else 2)
    kv_pool = 2 * data.k_aligned.numel() * 4
    return {
        "delta": rows * (2 * 256 + 4 + 8),
        "clear": dq_pool + kv_pool,
        "postprocess": dq_pool + kv_pool + rows * 256 + 2 * data.k_aligned.numel() * 2,
    }


def bench_case(case: cases.Case, timer: Timer, backend: str, accum: str, matmul: float, copy: float) -> dict:
    data = cases.make(
        case,
        device="cuda",
        forward=lambda q, k, v, s, scale: reference.forward(q, k, v, s, softmax_scale=scale),
    )
    schedule = data.schedule
    pairs = visible_pairs(data)
    outputs = [torch.empty_like(data.q), torch.empty_like(data.k_aligned), torch.empty_like(data.v_aligned)]

    def call():
        return run_backward(
            *data.arguments(), backend=backend, dq_accum=accum, dq=outputs[0], dk=outputs[1], dv=outputs[2]
        )

    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    total, spread = timer(call)
    peak = torch.cuda.max_memory_allocated() - base
    host_us = host_microseconds(lambda: run_backward(*data.arguments(), backend=backend, dq_accum=accum))

    # Stages alone, on one workspace that a whole call has filled.
    kept, original = {}, _runtime.workspace

    def keep(total_bytes, sections, device):
        if "tensor" not in kept:
            kept["tensor"] = original(total_bytes, sections, device)
        return kept["tensor"]

    arguments = Arguments(*data.arguments(), data.softmax_scale, *outputs)
    _runtime.workspace = keep
    try:
        _cuda_backward.launch(arguments, backend, accum)
        stages = {
            name: timer(lambda bit=1 << i: _cuda_backward.launch(arguments, backend, accum, stages=bit))[0]
            for i, name in enumerate(STAGES)
        }
    finally:
        _runtime.workspace = original
    items = schedule.scheduler_metadata[: int(schedule.work_count), 3].long()
    flop = FLOP_PER_PAIR * case.group * pairs
    tflops = flop / total * 1e-9
    moved = stage_bytes(data, accum)
    rates = {name: size / stages[name] * 1e-6 for name, size in moved.items()}
    pools_ms = stages["clear"] + stages["postprocess"]
    rates["clear+postprocess"] = (moved["clear"] + moved["postprocess"]) / pools_ms * 1e-6
    return {
        "case": case.name,
        "backend": backend,
        "dq_accum": accum,
        "shape": [data.q.shape[0], case.num_heads, case.num_kv_heads, data.k_aligned.shape[0]],
        "edges": int(items.sum()),
        "tasks": int(((items + 128 // case.group - 1) // (128 // case.group)).sum()),
        "stage_ms": stages,
        "total_ms": total,
        "spread_ms": spread,
        "host_us": host_us,
        "useful_tflop": flop * 1e-12,
        "useful_tflops": tflops,
        "ratio": tflops / matmul,
        "outside_main": 1 - stages["main"] / total,
        "copy_share": {name: rate / copy for name, rate in rates.items()},
        "peak_bytes": peak,
    }


def bench_task_build(num_tokens: int, timer: Timer, backend: str) -> dict:
    """The task build alone, for one document of `num_tokens` tokens, Hq 64, Hkv 4, 16 blocks a token."""
    own = torch.arange(num_tokens, device="cuda")[None, :, None] // 128
    stride = 1 + torch.arange(4, device="cuda")[:, None, None]
    topk = (own - stride * torch.arange(16, device="cuda")).to(torch.int32)
    schedule = build_schedule(topk, torch.tensor([0, num_tokens], dtype=torch.int32, device="cuda"))
    rows = -(-num_tokens // 128) * 128
    q = torch.zeros(num_tokens, 64, 128, dtype=torch.bfloat16, device="cuda")
    k = torch.zeros(rows, 4, 128, dtype=torch.bfloat16, device="cuda")
    arguments = Arguments(q, k, k, q, torch.zeros(num_tokens, 64, device="cuda"), q, schedule, 1.0, q, k, k)
    bit = 1 << STAGES.index("task_build")
    median, spread = timer(lambda: _cuda_backward.launch(arguments, backend, "bf16", stages=bit))
    tasks = int(((schedule.scheduler_metadata[: int(schedule.work_count), 3] + 7) // 8).sum())
    return {"num_tokens": num_tokens, "tasks": tasks, "ms": median, "spread_ms": spread}


def backward_ms(timer: Timer, out: torch.Tensor, inputs: list[torch.Tensor]) -> float:
    """Milliseconds of autograd's backward from `out` to `inputs`."""
    grad = torch.randn_like(out)
    return timer(lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True))[0]


def attention_inputs(length: int, num_heads: int, num_kv_heads: int) -> list[torch.Tensor]:
    """Random q, k, v `[1, heads, length, 128]`."""
    shapes = [(1, heads, length, 128) for heads in (num_heads, num_kv_heads, num_kv_heads)]
    return [torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes]


def bench_sdpa(case: cases.Case, timer: Timer) -> dict[str, float]:
    """Milliseconds of the backward of dense causal SDPA, each document alone."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def sdpa_ms(length: int, kind: SDPBackend) -> float:
        qkv = attention_inputs(length, case.num_heads, case.num_heads)
        with sdpa_kernel(kind):
            out = torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
        return backward_ms(timer, out, qkv)

    results = {}
    for name, kind in (("sdpa_cudnn", SDPBackend.CUDNN_ATTENTION), ("sdpa_flash", SDPBackend.FLASH_ATTENTION)):
        try:
            results[name] = sum(sdpa_ms(length, kind) for length in case.documents)
        except RuntimeError as error:
            print(f"{name}: {error}", file=sys.stderr)
    return results


def bench_flex(case: cases.Case, timer: Timer) -> dict[str, float]:
    """Milliseconds of the backward of FlexAttention, the selection as its mask; compiling takes about a minute."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    length = sum(case.documents)
    no_forward = lambda q, k, v, s, scale: (torch.zeros_like(q), torch.zeros(q.shape[:2], device="cuda"))  # noqa: E731
    data = cases.make(case, device="cuda", forward=no_forward)
    lengths = torch.tensor(case.documents, device="cuda")
    document = torch.repeat_interleave(torch.arange(len(lengths), device="cuda"), lengths)
    first = torch.tensor(data.cu_seqlens, device="cuda")[document]
    selected = torch.zeros(case.num_kv_heads, length, length // 128 + 1, dtype=torch.bool, device="cuda")
    selected.scatter_(2, torch.where(data.topk >= 0, data.topk, length // 128).long(), True)

    def mask(b, h, i, j):
        visible = (document[i] == document[j]) & (j <= i)
        return visible & selected[h // case.group, i, (j - first[j]) // 128]

    torch.compiler.reset()
    begin = time.perf_counter()
    try:
        block_mask = create_block_mask(mask, 1, case.num_heads, length, length, device="cuda", _compile=True)
        qkv = attention_inputs(length, case.num_heads, case.num_kv_heads)
        out = torch.compile(flex_attention, dynamic=False)(*qkv, block_mask=block_mask, enable_gqa=True)
        return {"flex_attention": backward_ms(timer, out, qkv)}
    except RuntimeError as error:
        print(f"flex_attention: {error}", file=sys.stderr)
        return {}
    finally:
        print(f"flex_attention: {case.name} took {time.perf_counter() - begin:.0f} s", file=sys.stderr)


PEERS = {"sdpa": bench_sdpa, "flex": bench_flex}


def print_row(row: dict) -> None:
    shape = "x".join(map(str, row["shape"]))
    stages = " ".join(f"{name} {ms:.3f}" for name, ms in row["stage_ms"].items())
    print(
        f"{row['case']:16} {row['backend']}/{row['dq_accum']} T,Hq,Hkv,W {shape} "
        f"edges {row['edges']} tasks {row['tasks']} | "
        f"{stages} | total {row['total_ms']:.3f} +- {row['spread_ms']:.3f} ms | "
        f"{row['useful_tflops']:.0f} TFLOP/s ratio {row['ratio']:.3f} outside main {row['outside_main']:.1%} | "
        f"delta {row['copy_share']['delta']:.0%} clear+post {row['copy_share']['clear+postprocess']:.0%} of copy | "
        f"host {row['host_us']:.0f} us peak {row['peak_bytes'] / 2**20:.0f} MiB"
    )
    for name, ms in row.get("peers_ms", {}).items():
        print(f"{'':16} {name} {ms:.3f} ms")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", help="comma-separated names; default: all benchmark cases and ranks")
    parser.add_argument("--backend", help="default: the device's")
    parser.add_argument("--dq-accum", help="comma-separated; default: the backend's")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--peers", default="", help=f"comma-separated peers to time too: {', '.join(PEERS)}")
    parser.add_argument("--task-build", type=int, nargs="*", help="token counts to time the task build alone for")
    parser.add_argument("--json", help="write everything to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "error: the benchmark needs a CUDA device\n")
    names = arguments.cases.split(",") if arguments.cases else [c.name for c in cases.benchmark_cases()]
    unknown = [name for name in names if name not in cases.CASES]
    if unknown:
        parser.exit(2, f"error: --cases: expected names of tests/cases.py, got {', '.join(unknown)}\n")
    peers = arguments.peers.split(",") if arguments.peers else []
    if not PEERS.keys() >= set(peers):
        parser.exit(2, f"error: --peers: expected some of {', '.join(PEERS)}, got {arguments.peers}\n")
    backend = arguments.backend or support.default_backend(torch.cuda.get_device_capability())
    if backend not in support.cuda_backends():
        parser.exit(2, f"error: --backend: expected one of {', '.join(support.cuda_backends())}, got {backend}\n")
    accums = (arguments.dq_accum or support.cuda_backends()[backend].default_dq_accum).split(",")

    timer = Timer(arguments.repeats)
    before, copy = matmul_tflops(), copy_gbytes_per_s(timer)
    rows = []
    for name in names:
        for accum in accums:
            rows.append(bench_case(cases.CASES[name], timer, backend, accum, before, copy))
            if peers and accum == accums[0] and "rank" not in cases.CASES[name].tags:
                rows[-1]["peers_ms"] = {k: ms for p in peers for k, ms in PEERS[p](cases.CASES[name], timer).items()}
    builds = [bench_task_build(n, timer, backend) for n in arguments.task_build or []]
    matmul = max(before, matmul_tflops())
    device = torch.cuda.get_device_name()
    void = "H200" in device and matmul < H200_MATMUL_FLOOR
    rates = f"matmul {matmul:.0f} TFLOP/s, copy {copy / 1000:.2f} TB/s{' VOID' if void else ''}"
    print(f"{device}, torch {torch.__version__}: {rates}")
    for row in rows:
        row["ratio"] = row["useful_tflops"] / matmul
        print_row(row)
    for build in builds:
        print(
            f"task build: {build['num_tokens']} tokens, {build['tasks']} tasks: "
            f"{build['ms']:.3f} +- {build['spread_ms']:.3f} ms"
        )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"device": device, "torch": torch.__version__, "matmul_tflops": matmul, "copy_gbytes_per_s": copy,
                       "void": void, "cases": rows, "task_builds": builds}, file, indent=1)  # fmt: skip
    return 1 if void else 0


if __name__ == "__main__":
    sys.exit(main())
