"""Runs the static verifier sentryward (PyPI, 0.1.1) on the Blackwell main kernel, for small task tables.

    nvcc -ptx -arch=sm_100a -std=c++17 --expt-relaxed-constexpr -Icsrc -isystem third_party/cutlass/include \
        -o kernel.ptx csrc/sm100/backward/launch.cu
    python benchmarks/sentryward_proof.py kernel.ptx [--sentryward PATH] [--tables one_task,...] [--timeout SECONDS]

For each table it asks for a proof that every schedule synchronises and is free of races, and for each fault that there
is none: a schedule that blocks is "unsupported" to the tool, an unordered access a "potential_race". What it cannot
take is changed in the PTX text before: `red` (the pools are then unchecked) and `createpolicy` are left out, and the
loop around mbarrier.try_wait branches on its predicate instead of a register made from it. Exit status 1: a table
without its proof, or a fault with one.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

GROUP, SLOTS, NUM_THREADS, SHARED_BYTES = 16, 8, 512, 232448
MAIN_PARAMS = 512  # offset of MainParams behind the four tensor maps of TmaKernelParams
POINTERS = {
    "neg_lse_log2": 96,
    "delta": 104,
    "descriptor": 112,
    "task_headers": 120,
    "task_tokens": 128,
    "dq_pool": 136,
    "dk_pool": 144,
    "dv_pool": 152,
}
SCALARS = {"num_tokens": 164, "num_heads": 168, "num_kv_heads": 172, "group": 176}


@dataclass(frozen=True)
class Table:
    """Tasks as (block, first token), all slots filled; `tasks_per_cta` and `grid` are the walk's."""

    tasks: tuple[tuple[int, int], ...]
    tasks_per_cta: int
    grid: int


TABLES = {
    "one_task": Table(((0, 0),), 4, 1),
    "empty_interval": Table(((0, 0),), 1, 2),
    "two_tasks": Table(((0, 0), (0, 8)), 4, 1),
    "two_segments": Table(((0, 0), (1, 0)), 4, 1),
    "two_ctas_share_rows": Table(((0, 0), (1, 0)), 1, 2),
    "stage_wrap": Table(((0, 0), (0, 8), (0, 16)), 4, 1),
}
WAIT = re.compile(
    r"\{\n\.reg \.pred done;\n(mbarrier\.try_wait\S+) done, (\[[^\]]+\]), (%r\d+);\nselp\.u32 (%r\d+), 1, 0, done;\n\}"
    r"([\s\S]{0,400}?)setp\.eq\.s32\s+(%p\d+), \4, 0;([\s\S]{0,300}?)@\6 bra\s+(\S+);"
)
# Removed from the PTX with one task: (pattern, which match). Must not be proven.
FAULTS = {
    "an arrive of compute": (r"mbarrier\.arrive\.shared::cta\.b64 _, \[%r\d+\];", 0),
    "the commit of S": (r"tcgen05\.commit\S+ \[%r\d+\];", 0),
    "the loaded bytes": (r"mbarrier\.arrive\.expect_tx\S+ _, \[%r\d+\], %r\d+;", 0),
    "compute's wait for dP": (r"mbarrier\.try_wait\S+ (%p\d+), \[%r\d+\], %r\d+;\n[\s\S]{0,700}?@!\1 bra \S+;", 1),
}


def kernel_text(ptx: str) -> tuple[str, str]:
    """(entry, PTX) of the module's first kernel in the form that the verifier takes."""
    begin = ptx.index(".visible .entry")
    text = ptx[: ptx.index(".visible .entry", begin + 1)]
    text = re.sub(r"(?m)^\s*(red\.|createpolicy)[^;]*;", "", text)
    text, waits = WAIT.subn(r"\1 \6, \2, \3;\n\5\7@!\6 bra \8;", text)
    if waits != text.count("mbarrier.try_wait"):
        raise SystemExit(f"error: {waits} of {text.count('mbarrier.try_wait')} waits have the expected form")
    return re.search(r"\.entry (\S+)\(", text)[1], text


def kernel_input(entry: str, table: Table) -> dict:
    """The verifier's input: launch, tensor maps, pointers and the contents of the task table."""
    parameter = f"{entry}_param_0"
    num_tokens = SLOTS + max(token for _, token in table.tasks)
    num_keys = 128 * (1 + max(block for block, _ in table.tasks))
    walk = [len(table.tasks), table.tasks_per_cta, 0, table.tasks_per_cta, table.grid, len(table.tasks), 0]
    headers = [x for block, _ in table.tasks for x in (block, 0, 0, SLOTS)]
    tokens = [token + slot for _, token in table.tasks for slot in range(SLOTS)]
    arrays = {"descriptor": walk, "task_headers": headers, "task_tokens": tokens}

    def tensor_map(index: int, name: str, shape: list[int], strides: list[int], box: list[int]) -> dict:
        return {
            "parameter": parameter,
            "offset": 128 * index,
            "object": name,
            "element_type": "bf16",
            "rank": len(shape),
            "global_shape": shape,
            "global_strides_bytes": strides,
            "box_shape": box,
            "element_strides": [1] * len(shape),
            "swizzle": "128B",
            "interleave": "none",
            "oob_fill": "zero",
        }

    rows = ([64, 8, 2, GROUP // 8, num_tokens], [256, 128, 2048, 4096], [64, 8, 2, GROUP // 8, 1])
    keys = ([64, num_keys, 2, 1], [256, 128, 256], [64, 128, 2, 1])
    values = {"num_tokens": num_tokens, "num_heads": GROUP, "num_kv_heads": 1, "group": GROUP}
    return {
        "schema": "spverify.kernel-input/v1",
        "entry": entry,
        "launch": {
            "grid_dim": [table.grid, 1, 1],
            "block_dim": [NUM_THREADS, 1, 1],
            "cluster_dim": [1, 1, 1],
            "dynamic_shared_bytes": SHARED_BYTES,
        },
        "shape_arrays": [
            {"parameter": parameter, "offset": MAIN_PARAMS + POINTERS[name], "shapes": [[x] for x in array]}
            for name, array in arrays.items()
        ],
        "arguments": [
            {"parameter": parameter, "offset": MAIN_PARAMS + offset, "type": "s32", "value": values[name]}
            for name, offset in SCALARS.items()
        ],
        "declarations": [
            {
                "parameter": parameter,
                "offset": MAIN_PARAMS + offset,
                "type": "pointer",
                "space": "global",
                "object": name,
            }
            for name, offset in POINTERS.items()
        ],
        "tma_descriptors": [
            tensor_map(0, "q", *rows),
            tensor_map(1, "grad_out", *rows),
            tensor_map(2, "k", *keys),
            tensor_map(3, "v", *keys),
        ],
    }


def verify(tool: str, text: str, data: dict, timeout: int) -> tuple[str, float]:
    """(result, seconds) of one run."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "kernel.ptx").write_text(text)
        (Path(folder) / "input.json").write_text(json.dumps(data))
        command = [tool, "kernel.ptx", "--input", "input.json", "--timeout", str(timeout)]
        begin = time.perf_counter()
        answer = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return json.loads(answer.stdout)["result"], time.perf_counter() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ptx", type=Path, help="PTX of csrc/sm100/backward/launch.cu")
    parser.add_argument("--sentryward", default="sentryward", help="the tool; default: on PATH")
    parser.add_argument("--tables", default=",".join(TABLES), help="comma-separated; default: all")
    parser.add_argument("--timeout", type=int, default=600, help="seconds a run")
    arguments = parser.parse_args()
    entry, text = kernel_text(arguments.ptx.read_text())
    failed = False
    for name in arguments.tables.split(","):
        table = TABLES[name]
        result, seconds = verify(arguments.sentryward, text, kernel_input(entry, table), arguments.timeout)
        failed |= result != "race_free"
        print(f"{name:24} {table.grid} CTAs, {len(table.tasks)} tasks: {result}, {seconds:.0f} s", flush=True)
    for what, (pattern, number) in FAULTS.items():
        match = list(re.finditer(pattern, text))[number]
        broken = text[: match.start()] + text[match.end() :]
        data = kernel_input(entry, TABLES["one_task"])
        result, seconds = verify(arguments.sentryward, broken, data, arguments.timeout)
        failed |= result == "race_free"
        print(f"without {what:24} {result}, {seconds:.0f} s", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
