"""Turns the benchmark's JSON into a Markdown table and a chart.

    python benchmarks/report.py bench.json --table docs/h200.md --chart docs/h200.svg

The chart needs the cases T4096, T8192, T16384 and, for the other curves, a run with `--peers`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from html import escape
from pathlib import Path

COMMAND = "PYTHONPATH=.:tests python benchmarks/bench_backward.py"
BARS = {"delta": 0.80, "clear+postprocess": 0.75}  # of the copy rate
NAMES = {
    "sdpa_cudnn": "dense causal, cuDNN SDPA",
    "sdpa_flash": "dense causal, flash SDPA",
    "flex_attention": "FlexAttention",
}
COLORS = {"msa_ext": "#c0392b", "sdpa_cudnn": "#2c3e50", "sdpa_flash": "#7f8c8d", "flex_attention": "#2980b9"}


def _row(cells: list) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _table(header: list[str], rows: list[list]) -> list[str]:
    return [_row(header), _row(["---"] * len(header)), *map(_row, rows), ""]


def _totals(row: dict) -> list:
    return [
        row["case"],
        f"{row['backend']} / {row['dq_accum']}",
        ", ".join(map(str, row["shape"])),
        row["edges"],
        row["tasks"],
        f"{row['total_ms']:.3f} ± {row['spread_ms']:.3f}",
        f"{row['useful_tflops']:.0f}",
        f"{row['ratio']:.3f}",
        f"{row['host_us']:.0f} ({row['add_us']:.0f})",
        f"{row['peak_bytes'] / 2**20:.0f}",
    ]


def _sustained(row: dict) -> list:
    return [row["case"], row["dq_accum"], f"{row['sustained_ms']:.3f}", f"{row['sustained_ratio']:.3f}"]


def _peers(row: dict, names: list[str]) -> list:
    times = row["peers_ms"]
    return [row["case"], f"{row['total_ms']:.3f}", *(f"{times[n]:.3f}" if n in times else "failed" for n in names)]


def markdown(run: dict, arguments: str) -> str:
    """The tables of one run; `arguments` are what the benchmark was given."""
    command = f"{COMMAND} {arguments}".rstrip()
    void = " **Void: the matmul is too slow for this card.**" if run["void"] else ""
    lines = [
        f"# Backward on one {run['device']}",
        "",
        f"torch {run['torch']}, bf16 8192^3 matmul {run['matmul_tflops']:.0f} TFLOP/s, device copy "
        f"{run['copy_gbytes_per_s'] / 1000:.2f} TB/s, all in one run.{void} Medians of CUDA-event times, L2 cold. "
        "Host us: until a call returns, lowest of twenty medians of ten; beside it torch's add_ of one element. "
        f"Made by `{command}` and `benchmarks/report.py`.",
        "",
    ]
    header = ["case", "backend / dq_accum", "T, Hq, Hkv, W", "edges", "tasks", "ms", "useful TFLOP/s", "of matmul"]
    lines += _table([*header, "host us (add_)", "peak MiB"], [_totals(row) for row in run["cases"]])

    stages = list(run["cases"][0]["stage_ms"]) if run["cases"] else []
    lines += ["Stages alone, ms, and the memory-bound ones as a share of the copy rate:", ""]
    lines += _table(
        ["case", "dq_accum", *stages, "outside main", *(f"{name} (bar {bar:.0%})" for name, bar in BARS.items())],
        [
            [row["case"], row["dq_accum"]]
            + [f"{row['stage_ms'][name]:.3f}" for name in stages]
            + [f"{row['outside_main']:.1%}"]
            + [f"{row['copy_share'][name]:.0%}" for name in BARS]
            for row in run["cases"]
        ],
    )
    if run.get("sustained_s"):
        lines += [
            f"After {run['sustained_s']:g} s of the same back to back, the card at its power limit, where a matmul "
            f"runs at {run['sustained_matmul_tflops']:.0f} TFLOP/s:",
            "",
        ]
        lines += _table(["case", "dq_accum", "ms", "of that matmul"], [_sustained(row) for row in run["cases"]])
    if run.get("task_builds"):
        lines += ["Task build of one document, Hq 64, Hkv 4, 16 blocks a token:", ""]
        builds = [[b["num_tokens"], b["tasks"], f"{b['ms']:.3f} ± {b['spread_ms']:.3f}"] for b in run["task_builds"]]
        lines += _table(["tokens", "tasks", "ms"], builds)
    peers = [row for row in run["cases"] if row.get("peers_ms")]
    if peers:
        names = [name for name in NAMES if any(name in row["peers_ms"] for row in peers)]
        lines += ["The same gradients by others, backward only, ms (dense ones compute all causal pairs):", ""]
        header = ["case", "msa_ext", *(NAMES[name] for name in names)]
        lines += _table(header, [_peers(row, names) for row in peers])
    return "\n".join(lines)


def curves(run: dict) -> tuple[dict[str, dict[int, float]], dict[int, float]]:
    """Milliseconds by T of every contender, and our share of the matmul rate by T; single documents only."""
    times: dict[str, dict[int, float]] = {"msa_ext": {}}
    shares = {}
    for row in run["cases"]:
        num_tokens = row["shape"][0]
        if row["case"] != f"T{num_tokens}" or num_tokens in shares:  # the first dq_accum listed is charted
            continue
        times["msa_ext"][num_tokens] = row["total_ms"]
        shares[num_tokens] = row["ratio"]
        for name, ms in row.get("peers_ms", {}).items():
            times.setdefault(name, {})[num_tokens] = ms
    return times, shares


class Panel:
    """A plot of 360 x 260 points at `left`: x is log2, y linear or log2, both from data limits."""

    width, height, top = 360, 260, 50

    def __init__(self, left: int, title: str, xs: list[int], low: float, high: float, log: bool):
        self.left, self.low, self.high, self.log = left, low, high, log
        self.x_low, self.x_high = math.log2(min(xs)), math.log2(max(xs))
        self.parts = [
            f'<text x="{left}" y="{self.top - 16}" font-weight="bold">{escape(title)}</text>',
            f'<rect x="{left}" y="{self.top}" width="{self.width}" height="{self.height}" fill="none" stroke="#999"/>',
        ]
        for x in sorted(xs):
            self.text(self.x(x), self.top + self.height + 18, "middle", str(x))

    def text(self, x: float, y: float, anchor: str, content: str, color: str = "#000") -> None:
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{content}</text>')

    def x(self, value: float) -> float:
        span = max(self.x_high - self.x_low, 1e-9)
        return self.left + 24 + (math.log2(value) - self.x_low) / span * (self.width - 48)

    def y(self, value: float) -> float:
        scale = math.log2 if self.log else float
        share = (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low))
        return self.top + self.height * (1 - share)

    def tick(self, value: float) -> None:
        y, right = self.y(value), self.left + self.width
        self.parts.append(f'<line x1="{self.left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        self.text(self.left - 6, y + 4, "end", f"{value:g}")

    def curve(self, points: dict[int, float], color: str) -> None:
        path = " ".join(f"{self.x(t):.1f},{self.y(v):.1f}" for t, v in sorted(points.items()))
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        for t, v in points.items():
            self.parts.append(f'<circle cx="{self.x(t):.1f}" cy="{self.y(v):.1f}" r="3" fill="{color}"/>')
            self.text(self.x(t), self.y(v) - 7, "middle", f"{v:.2f}", color)


def svg(run: dict) -> str:
    """Milliseconds against T, and useful TFLOP/s as a share of the matmul rate.

    Raises:
        ValueError: the run has no case of a single document.
    """
    times, shares = curves(run)
    if not shares:
        raise ValueError(f"cases: expected some of T4096, T8192, T16384, got {[r['case'] for r in run['cases']]}")
    values = [v for points in times.values() for v in points.values()]
    low, high = 2 ** math.floor(math.log2(min(values))), 2 ** math.ceil(math.log2(max(values) * 1.2))
    left = Panel(60, "Backward, ms against T", list(shares), low, high, log=True)
    for power in range(int(math.log2(low)), int(math.log2(high)) + 1):
        left.tick(2.0**power)
    for name, points in times.items():
        left.curve(points, COLORS.get(name, "#000"))
    right = Panel(500, "Useful TFLOP/s over the matmul rate", list(shares), 0.0, 1.0, log=False)
    for tenth in range(0, 11, 2):
        right.tick(tenth / 10)
    right.curve(shares, COLORS["msa_ext"])
    legend = []
    for i, name in enumerate(times):
        x = 60 + i * 215
        legend.append(f'<rect x="{x}" y="362" width="12" height="12" fill="{COLORS.get(name, "#000")}"/>')
        legend.append(f'<text x="{x + 18}" y="373">{escape(NAMES.get(name, name))}</text>')
    device = escape(f"{run['device']}, torch {run['torch']}, matmul {run['matmul_tflops']:.0f} TFLOP/s; one run")
    body = "\n".join([*left.parts, *right.parts, *legend, f'<text x="60" y="396" fill="#666">{device}</text>'])
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="900" height="410" font-family="sans-serif" font-size="12">\n'
        f'<rect width="900" height="410" fill="white"/>\n{body}\n</svg>\n'
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path, help="what bench_backward.py --json wrote")
    parser.add_argument("--arguments", default="", help="the benchmark's arguments, quoted in the table's text")
    parser.add_argument("--table", type=Path, help="Markdown to write; default: standard output")
    parser.add_argument("--chart", type=Path, help="SVG to write")
    arguments = parser.parse_args()
    run = json.loads(arguments.json.read_text())
    text = markdown(run, arguments.arguments)
    if arguments.chart:
        arguments.chart.parent.mkdir(parents=True, exist_ok=True)
        arguments.chart.write_text(svg(run))
        if arguments.table:
            text = text.replace("\n\n", f"\n\n![chart]({arguments.chart.name})\n\n", 1)
    if arguments.table:
        arguments.table.parent.mkdir(parents=True, exist_ok=True)
        arguments.table.write_text(text)
    else:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
