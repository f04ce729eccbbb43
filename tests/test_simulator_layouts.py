"""Matrix layouts against CuTe's layout algebra: kernels in which CuTe makes every address, checked against matmul."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from simulator import Simulator, compile_ptx
from simulator.formats import bf16_to_f32, f32_to_bf16

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(
    shutil.which("nvcc") is None or not (ROOT / "third_party/cutlass/include").exists(),
    reason="needs nvcc and the CUTLASS headers",
)
LAYOUTS = [f"{major}_{swizzle}" for major in ("k", "mn") for swizzle in ("none", "32", "64", "128")]


def run(arch: str, device: str, name: str, rows: int, mode: str) -> None:
    text = compile_ptx(ROOT / f"tests/simulator/kernels/layouts_sm{arch}.cu", f"sm_{arch}a")
    rng = np.random.default_rng(0)
    a = f32_to_bf16(rng.standard_normal((rows, 64)).astype(np.float32))
    b = f32_to_bf16(rng.standard_normal((128, 64)).astype(np.float32))
    simulator = Simulator(device, num_sms=1, mode=mode)
    out = simulator.array(shape=(rows, 128), dtype=np.float32)
    simulator.launch(text, name, 1, 128, simulator.array(a), simulator.array(b), out, shared_bytes=(rows + 128) * 128)
    expected = bf16_to_f32(a).astype(np.float64) @ bf16_to_f32(b).astype(np.float64).T
    np.testing.assert_allclose(out, expected, atol=1e-4)
    assert not simulator.reports


@pytest.mark.parametrize("name", LAYOUTS)
def test_wgmma(name):
    run("90", "h200", name, 64, "late")


@pytest.mark.parametrize("name", LAYOUTS)
def test_tcgen05(name):
    run("100", "b200", name, 128, "late")
