"""The table and the chart that benchmarks/report.py makes of a benchmark's JSON."""

import json
import subprocess
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "report.py"


def _case(num_tokens: int, ms: float, ratio: float, peers: dict) -> dict:
    return {
        "case": f"T{num_tokens}", "backend": "sm90", "dq_accum": "bf16", "shape": [num_tokens, 64, 4, num_tokens],
        "edges": 12345, "tasks": 1600, "stage_ms": {"delta": 0.1, "main": 2.0}, "total_ms": ms, "spread_ms": 0.01, "host_us": 55.4, "add_us": 7.1,
        "useful_tflops": 512.3, "ratio": ratio, "outside_main": 0.115, "copy_share": {"delta": 0.86, "clear+postprocess": 0.9},
        "peak_bytes": 169 * 2**20, "peers_ms": peers, "sustained_ms": 1.1 * ms, "sustained_ratio": 1.05 * ratio,
    }  # fmt: skip


@pytest.fixture
def run() -> dict:
    cases = [
        _case(4096, 1.0, 0.64, {"sdpa_cudnn": 1.45}),
        _case(8192, 2.25, 0.66, {"sdpa_cudnn": 5.62, "flex_attention": 11.9}),
    ]
    return {
        "device": "NVIDIA H200", "torch": "2.11", "matmul_tflops": 788.0, "copy_gbytes_per_s": 4270.0, "void": False, "sustained_s": 2.0, "sustained_matmul_tflops": 651.2,
        "cases": cases, "task_builds": [{"num_tokens": 16384, "tasks": 111872, "ms": 0.052, "spread_ms": 0.001}],
    }  # fmt: skip


def _report(run: dict, folder: Path, *options: str) -> subprocess.CompletedProcess:
    (folder / "bench.json").write_text(json.dumps(run))
    command = [sys.executable, SCRIPT, folder / "bench.json", *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)


def test_table(run, tmp_path):
    result = _report(run, tmp_path, "--arguments=--peers")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert "`PYTHONPATH=.:tests python benchmarks/bench_backward.py --peers`" in result.stdout
    assert (
        "| T8192 | sm90 / bf16 | 8192, 64, 4, 8192 | 12345 | 1600 | 2.250 ± 0.010 | 512 | 0.660 | 55 (7) | 169 |"
        in lines
    )
    assert "| T8192 | bf16 | 0.100 | 2.000 | 11.5% | 86% | 90% |" in lines
    assert "After 2 s of" in result.stdout and "where a matmul runs at 651 TFLOP/s" in result.stdout
    assert "| T8192 | bf16 | 2.475 | 0.693 |" in lines
    assert "| 16384 | 111872 | 0.052 ± 0.001 |" in lines
    assert "| T4096 | 1.000 | 1.450 | failed |" in lines
    assert "Void" not in result.stdout


def test_a_void_run_says_so(run, tmp_path):
    assert "Void" in _report({**run, "void": True}, tmp_path).stdout


def test_chart(run, tmp_path):
    result = _report(run, tmp_path, "--chart", "docs/x.svg", "--table", "docs/x.md")
    assert result.returncode == 0, result.stderr
    assert "![chart](x.svg)" in (tmp_path / "docs/x.md").read_text()
    root = xml.parse(tmp_path / "docs/x.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    curves = [line.get("points").split() for line in root.iter(f"{space}polyline")]
    assert [len(points) for points in curves] == [2, 2, 1, 2]  # ours, cuDNN, FlexAttention, our share of matmul
    (_, fast), (_, slow) = (tuple(map(float, point.split(","))) for point in (curves[0][0], curves[1][0]))
    assert fast > slow  # 1.0 ms lies below 1.45 ms
    assert {"0.64", "0.66", "5.62", "11.90"} <= {text.text for text in root.iter(f"{space}text")}


def test_chart_without_single_documents(run, tmp_path):
    run["cases"] = [{**run["cases"][0], "case": "pack16384"}]
    result = _report(run, tmp_path, "--chart", "x.svg")
    assert result.returncode != 0 and "cases: expected some of T4096, T8192, T16384, got ['pack16384']" in result.stderr
