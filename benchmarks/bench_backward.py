"""Times the backward and its stages on a GPU, against the matmul and copy rates of the same run.

    PYTHONPATH=.:tests python benchmarks/bench_backward.py [--cases T8192,pack16384] [--json FILE] [--peers sdpa,flex]
    ... bench_backward.py --stage main --cases T8192,T16384   # one stage alone, warm and with a cold L2

Every time is the median of CUDA-event timings, before each of which other data has been read into the L2. Useful FLOP
= 1280 * Hq * E, with E the visible (query, key) pairs of one query head. `ratio` is useful FLOP/s over the best bf16
8192^3 matmul measured before and after; on an H200 a run whose matmul is below 740 TFLOP/s is void. `--sustained S`
times both once more after S seconds of themselves back to back, when the card is at its power limit. Stages are timed
alone; in the total delta and clear are one launch and the task build runs beside it. `outside main` is
1 - main / total.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch

import cases
from msa_ext import _cuda_backward, _runtime, reference, support
from msa_ext.backward import Arguments, run_backward
from msa_ext.schedule import build_schedule

PEERS = ("sdpa", "flex")
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


def warm_ms(work: Callable[[], object], repeats: int) -> float:
    """Mean milliseconds of `repeats` runs back to back."""
    for _ in range(3):
        work()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


def sustained_ms(work: Callable[[], object], seconds: float) -> float:
    """Milliseconds of `work` after `seconds` of it back to back."""
    end = time.monotonic() + seconds
    while True:
        ms = warm_ms(work, 20)
        if time.monotonic() >= end:
            return ms


def matmul_operands() -> list[torch.Tensor]:
    return [torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2)]


def sustained_matmul_tflops(seconds: float) -> float:
    """bf16 8192^3 matmul rate after `seconds` of it."""
    a, b = matmul_operands()
    out = torch.empty_like(a)
    return 2 * 8192**3 / sustained_ms(lambda: torch.mm(a, b, out=out), seconds) * 1e-9


def matmul_tflops() -> float:
    """Best bf16 8192^3 matmul rate of ten timed products on random data."""
    a, b = matmul_operands()
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
    """Lowest of twenty medians of ten: the time until an asynchronous call returns, on a CPU that others share."""
    medians = []
    for _ in range(20):
        torch.cuda.synchronize()
        times = []
        for _ in range(10):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        medians.append(statistics.median(times))
    torch.cuda.synchronize()
    return min(medians) * 1e6


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


def make_data(case: cases.Case) -> cases.CaseData:
    return cases.make(
        case,
        device="cuda",
        forward=lambda q, k, v, s, scale: reference.forward(q, k, v, s, softmax_scale=scale),
    )


def make_outputs(data: cases.CaseData) -> list[torch.Tensor]:
    """Of dq, dk and dv."""
    return [torch.empty_like(x) for x in (data.q, data.k_aligned, data.v_aligned)]


def backward_into(outputs: list[torch.Tensor], data: cases.CaseData, backend: str, accum: str) -> None:
    """The whole backward, without allocating its outputs."""
    dq, dk, dv = outputs
    run_backward(*data.arguments(), backend=backend, dq_accum=accum, dq=dq, dk=dk, dv=dv)


@contextlib.contextmanager
def prepared_stages(arguments: Arguments, backend: str, accum: str) -> Iterator[Callable[[str], None]]:
    """A function that runs one stage on the one workspace, which a whole call has filled."""
    kept, original = [], _runtime.workspace

    def keep(total_bytes, sections, device):
        if not kept:
            kept.append(original(total_bytes, sections, device))
        return kept[0]

    _runtime.workspace = keep
    try:
        _cuda_backward.launch(arguments, backend, accum)
        yield lambda stage: _cuda_backward.launch(arguments, backend, accum, stages=1 << STAGES.index(stage))
    finally:
        _runtime.workspace = original


def bench_stage(case: cases.Case, stage: str, timer: Timer, backend: str, accum: str) -> dict:
    """One stage alone: back to back, and with a cold L2 before each run."""
    data = make_data(case)
    outputs = make_outputs(data)
    with prepared_stages(Arguments(*data.arguments(), data.softmax_scale, *outputs), backend, accum) as run_stage:
        warm = warm_ms(lambda: run_stage(stage), timer.repeats)
        cold, spread = timer(lambda: run_stage(stage))
    return {
        "case": case.name,
        "backend": backend,
        "dq_accum": accum,
        "stage": stage,
        "warm_ms": warm,
        "cold_ms": cold,
        "spread_ms": spread,
        "useful_tflop": FLOP_PER_PAIR * case.group * visible_pairs(data) * 1e-12,
    }


def bench_sustained(row: dict, matmul: float, seconds: float) -> None:
    """Adds to a row of `bench_case` the time after `seconds` of the same, and its ratio to `matmul`, TFLOP/s."""
    data = make_data(cases.CASES[row["case"]])
    outputs = make_outputs(data)
    row["sustained_ms"] = sustained_ms(lambda: backward_into(outputs, data, row["backend"], row["dq_accum"]), seconds)
    row["sustained_ratio"] = row["useful_tflop"] / row["sustained_ms"] * 1e3 / matmul


def bench_case(case: cases.Case, timer: Timer, backend: str, accum: str, matmul: float, copy: float) -> dict:
    data = make_data(case)
    schedule = data.schedule
    pairs = visible_pairs(data)
    outputs = make_outputs(data)
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    total, spread = timer(lambda: backward_into(outputs, data, backend, accum))
    peak = torch.cuda.max_memory_allocated() - base
    host_us = host_microseconds(lambda: run_backward(*data.arguments(), backend=backend, dq_accum=accum))
    one = torch.zeros(1, device="cuda")
    add_us = host_microseconds(lambda: one.add_(1))

    with prepared_stages(Arguments(*data.arguments(), data.softmax_scale, *outputs), backend, accum) as run_stage:
        stages = {name: timer(lambda name=name: run_stage(name))[0] for name in STAGES}
    items = schedule.scheduler_metadata[: int(schedule.work_count), 3].long()
    flop = FLOP_PER_PAIR * case.group * pairs
    tflops = flop / total * 1e-9
    moved = stage_bytes(data, accum)
    rates = {name: size / stages[name] * 1e-6 for name, size in moved.items()}
    rates["clear+postprocess"] = (
        (moved["clear"] + moved["postprocess"]) / (stages["clear"] + stages["postprocess"]) * 1e-6
    )
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
        "add_us": add_us,  # torch's add_ of one element, for scale
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


def random_qkv(num_heads: int, num_queries: int, num_kv_heads: int, num_keys: int) -> list[torch.Tensor]:
    shapes = [(num_heads, num_queries), (num_kv_heads, num_keys), (num_kv_heads, num_keys)]
    options = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    return [torch.randn(1, heads, length, 128, **options) for heads, length in shapes]


def sdpa_ms(case: cases.Case, timer: Timer) -> dict[str, float]:
    """Dense causal attention, document by document."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def document_ms(length: int, kind: SDPBackend) -> float:
        qkv = random_qkv(case.num_heads, length, case.num_heads, length)
        with sdpa_kernel(kind):
            out = torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
        return backward_ms(timer, out, qkv)

    results = {}
    for name, kind in (("sdpa_cudnn", SDPBackend.CUDNN_ATTENTION), ("sdpa_flash", SDPBackend.FLASH_ATTENTION)):
        try:
            results[name] = sum(document_ms(length, kind) for length in case.documents)
        except RuntimeError as error:
            print(f"{case.name}: {name}: {error}", file=sys.stderr, flush=True)
    return results


def selection_mask(case: cases.Case, data: cases.CaseData):
    """FlexAttention's BlockMask of the selection, for compact queries and keys of the aligned workspace."""
    from torch.nn.attention.flex_attention import BlockMask

    device, (num_tokens, num_blocks) = data.q.device, (data.q.shape[0], data.k_aligned.shape[0] // 128)
    lengths = torch.tensor(data.cu_seqlens, device=device).diff()
    start = torch.repeat_interleave(torch.tensor(data.document_workspace_starts, device=device), lengths)
    first = torch.repeat_interleave(torch.tensor(data.cu_seqlens[:-1], device=device), lengths)
    position = start - first + torch.arange(num_tokens, device=device)
    # One column more than there are blocks takes the empty slots.
    blocks = torch.where(data.topk >= 0, data.topk + start[:, None] // 128, num_blocks)
    num_rows = -(-num_tokens // 128) * 128
    selected = torch.zeros(case.num_kv_heads, num_rows, num_blocks + 1, dtype=torch.bool, device=device)
    selected[:, :num_tokens].scatter_(2, blocks, True)
    group = case.group

    def visible(b, h, i, j):
        return (j <= position[i]) & selected[h // group, i, j // 128]

    # Of 128 queries hardly two choose alike: no block is taken as wholly visible.
    needed = selected[None, :, :, :num_blocks].unflatten(2, (-1, 128)).any(3).repeat_interleave(group, 1)
    indices = needed.int().argsort(dim=-1, descending=True, stable=True).int()
    sizes = (num_tokens, num_blocks * 128)
    return BlockMask.from_kv_blocks(needed.sum(-1).int(), indices, BLOCK_SIZE=128, mask_mod=visible, seq_lengths=sizes)


def flex_ms(case: cases.Case, timer: Timer) -> dict[str, float]:
    """FlexAttention with the selection as its mask; says on stderr how long compilation took."""
    from torch.nn.attention.flex_attention import flex_attention

    def no_forward(q, k, v, schedule, scale):
        return torch.zeros_like(q), torch.zeros(q.shape[:2], device=q.device)

    data = cases.make(case, device="cuda", forward=no_forward)
    begin = time.perf_counter()
    try:
        qkv = random_qkv(case.num_heads, data.q.shape[0], case.num_kv_heads, data.k_aligned.shape[0])
        # Specialised to the shapes: shapes left open make slower kernels.
        attention = torch.compile(flex_attention, dynamic=False)
        out = attention(*qkv, block_mask=selection_mask(case, data), enable_gqa=True)
        torch.autograd.grad(out, qkv, torch.ones_like(out), retain_graph=True)
        torch.cuda.synchronize()
        print(
            f"{case.name}: flex_attention compiled in {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True
        )
        return {"flex_attention": backward_ms(timer, out, qkv)}
    except RuntimeError as error:
        print(f"{case.name}: flex_attention: {error}", file=sys.stderr, flush=True)
        return {}


def bench_peers(case: cases.Case, timer: Timer, peers: list[str]) -> dict[str, float]:
    """Milliseconds of the backward alone by others; one that fails is left out and says why on stderr."""
    run = {"sdpa": sdpa_ms, "flex": flex_ms}
    return {name: ms for peer in peers for name, ms in run[peer](case, timer).items()}


def print_row(row: dict) -> None:
    shape = "x".join(map(str, row["shape"]))
    stages = " ".join(f"{name} {ms:.3f}" for name, ms in row["stage_ms"].items())
    print(
        f"{row['case']:16} {row['backend']}/{row['dq_accum']} T,Hq,Hkv,W {shape} "
        f"edges {row['edges']} tasks {row['tasks']} | "
        f"{stages} | total {row['total_ms']:.3f} +- {row['spread_ms']:.3f} ms | "
        f"{row['useful_tflops']:.0f} TFLOP/s ratio {row['ratio']:.3f} outside main {row['outside_main']:.1%} | "
        f"delta {row['copy_share']['delta']:.0%} clear+post {row['copy_share']['clear+postprocess']:.0%} of copy | "
        f"host {row['host_us']:.0f} us (add_ {row['add_us']:.0f}) peak {row['peak_bytes'] / 2**20:.0f} MiB"
    )
    if "sustained_ms" in row:
        print(f"{'':16} sustained {row['sustained_ms']:.3f} ms, ratio {row['sustained_ratio']:.3f}")
    for name, ms in row.get("peers_ms", {}).items():
        print(f"{'':16} {name} {ms:.3f} ms")
    sys.stdout.flush()


def print_stage(row: dict, matmul: float) -> None:
    def timing(ms: float) -> str:
        tflops = row["useful_tflop"] / ms * 1e3
        rate = f", {tflops:.0f} TFLOP/s, ratio {tflops / matmul:.3f}" if row["stage"] == "main" else ""
        return f"{ms:.3f} ms{rate}"

    print(
        f"{row['case']:16} {row['backend']}/{row['dq_accum']} {row['stage']} alone | warm {timing(row['warm_ms'])} | "
        f"cold L2 {timing(row['cold_ms'])}, +- {row['spread_ms']:.3f} ms"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", help="comma-separated names; default: all benchmark cases and ranks")
    parser.add_argument("--backend", help="default: the device's")
    parser.add_argument("--dq-accum", help="comma-separated; default: the backend's")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--stage", choices=STAGES, help="time only this stage of every case, warm and with a cold L2")
    parser.add_argument(
        "--peers", nargs="?", const=",".join(PEERS), default="", metavar="LIST",
        help=f"time others too: comma-separated, of {', '.join(PEERS)}; without a list all",
    )  # fmt: skip
    parser.add_argument("--task-build", type=int, nargs="*", help="token counts to time the task build alone for")
    parser.add_argument("--sustained", type=float, default=0.0, metavar="SECONDS", help="also time at the power limit")
    parser.add_argument("--json", help="write everything to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "error: the benchmark needs a CUDA device\n")
    names = arguments.cases.split(",") if arguments.cases else [c.name for c in cases.benchmark_cases()]
    unknown = [name for name in names if name not in cases.CASES]
    if unknown:
        parser.exit(2, f"error: --cases: expected names of tests/cases.py, got {', '.join(unknown)}\n")
    peers = arguments.peers.split(",") if arguments.peers else []
    unknown = [peer for peer in peers if peer not in PEERS]
    if unknown:
        parser.exit(2, f"error: --peers: expected some of {', '.join(PEERS)}, got {', '.join(unknown)}\n")
    backend = arguments.backend or support.default_backend(torch.cuda.get_device_capability())
    if backend not in support.cuda_backends():
        parser.exit(2, f"error: --backend: expected one of {', '.join(support.cuda_backends())}, got {backend}\n")
    accums = (arguments.dq_accum or support.cuda_backends()[backend].default_dq_accum).split(",")

    timer = Timer(arguments.repeats)
    before, copy = matmul_tflops(), copy_gbytes_per_s(timer)
    rows, stage_rows = [], []
    for name in names:
        case = cases.CASES[name]
        for accum in accums:
            if arguments.stage:
                stage_rows.append(bench_stage(case, arguments.stage, timer, backend, accum))
                continue
            rows.append(bench_case(case, timer, backend, accum, before, copy))
            if peers and accum == accums[0] and "rank" not in case.tags:
                rows[-1]["peers_ms"] = bench_peers(case, timer, peers)
    builds = [bench_task_build(n, timer, backend) for n in arguments.task_build or []]
    matmul = max(before, matmul_tflops())
    sustained = None
    if arguments.sustained:  # last: it heats the card
        sustained = sustained_matmul_tflops(arguments.sustained)
        for row in rows:
            bench_sustained(row, sustained, arguments.sustained)
    device = torch.cuda.get_device_name()
    void = "H200" in device and matmul < H200_MATMUL_FLOOR
    rates = f"matmul {matmul:.0f} TFLOP/s, copy {copy / 1000:.2f} TB/s{' VOID' if void else ''}"
    if sustained:
        rates += f", matmul after {arguments.sustained:g} s {sustained:.0f} TFLOP/s"
    print(f"{device}, torch {torch.__version__}: {rates}")
    for row in rows:
        row["ratio"] = row["useful_tflops"] / matmul
        print_row(row)
    for row in stage_rows:
        print_stage(row, matmul)
    for build in builds:
        print(
            f"task build: {build['num_tokens']} tokens, {build['tasks']} tasks: "
            f"{build['ms']:.3f} +- {build['spread_ms']:.3f} ms"
        )
    if arguments.json:
        with open(arguments.json, "w") as file:
            run = {"device": device, "torch": torch.__version__, "matmul_tflops": matmul, "copy_gbytes_per_s": copy}
            run |= {"void": void, "sustained_s": arguments.sustained, "sustained_matmul_tflops": sustained}
            run |= {"cases": rows, "stages": stage_rows, "task_builds": builds}
            json.dump(run, file, indent=1)
    return 1 if void else 0


if __name__ == "__main__":
    sys.exit(main())
