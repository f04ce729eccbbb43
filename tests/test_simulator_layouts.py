"""Layouts against CuTe's layout algebra: kernels in which CuTe makes every address, checked against matmul."""

import concurrent.futures
import shutil
from pathlib import Path

import numpy as np
import pytest
from simulator import Simulator, cute_products, pipeline
from simulator.__main__ import texts
from simulator.formats import f32_to_bf16

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(
    shutil.which("nvcc") is None or not (ROOT / "third_party/cutlass/include").exists(),
    reason="needs nvcc and the CUTLASS headers",
)
DEVICES = {"sm_90a": "h200", "sm_100a": "b200"}
LAYOUTS = [f"{major}_{swizzle}" for major in ("k", "mn") for swizzle in ("none", "32", "64", "128")]


@pytest.fixture(scope="module", autouse=True)
def ptx() -> dict[str, str]:
    """By architecture; compiled side by side, as each takes a minute or two the first time."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        found = [texts(path) for path in pool.map(cute_products.library, DEVICES)]
    return {arch: text for arch, ((_, text),) in zip(DEVICES, found)}


def run(ptx: dict[str, str], arch: str, name: str, rows: int) -> None:
    """A kernel fed by ordinary stores."""
    a, b = cute_products.operands(rows)
    simulator = Simulator(DEVICES[arch], num_sms=1, mode="late")
    out = simulator.array(shape=(rows, 128), dtype=np.float32)
    inputs = (simulator.array(f32_to_bf16(x)) for x in (a, b))
    simulator.launch(ptx[arch], name, 1, 128, *inputs, out, shared_bytes=(rows + 128) * 128)
    assert np.array_equal(out, a @ b.T)
    assert not simulator.reports


@pytest.mark.parametrize("name", LAYOUTS)
def test_wgmma(ptx, name):
    run(ptx, "sm_90a", f"stored_{name}", 64)


@pytest.mark.parametrize("name", LAYOUTS)
def test_tcgen05(ptx, name):
    run(ptx, "sm_100a", f"stored_{name}", 128)


def test_tcgen05_of_64_rows_and_16_lane_loads(ptx):
    run(ptx, "sm_100a", "stored_half_k_128", 64)


def test_tcgen05_with_a_in_tensor_memory(ptx):
    run(ptx, "sm_100a", "in_tensor_memory", 128)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc for the runtime shim")
@pytest.mark.parametrize("arch", DEVICES)
def test_tma_through_cutes_own_tensor_maps(arch):
    worker = pipeline.Worker()
    results = worker.call(cute_products.simulate, DEVICES[arch], arch, "random", 0)
    worker.close()
    a, b = cute_products.operands(cute_products.TILE_ROWS[arch])
    assert results.keys() == set(cute_products.LOADED[arch])
    for name, product in results.items():
        assert np.array_equal(product, a @ b.T), name
