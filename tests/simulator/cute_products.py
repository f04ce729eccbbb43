"""Products by kernels whose every address CuTe makes (kernels/layouts_sm*.cu), on a GPU or in the simulator.

Operands are small integers, so that a product is exact and the same everywhere.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np

from .simulator import compile_library

ROWS_OF_B, DEPTH = 128, 64
# Functions of the library: TMA into a shared layout, by major and swizzle.
LOADED = {"sm_90a": ("k_none", "k_32", "k_64", "k_128", "mn_128"), "sm_100a": ("k_64", "mn_128")}
TILE_ROWS = {"sm_90a": 64, "sm_100a": 128}  # of A


def library(arch: str) -> Path:
    """The compiled kernels of an architecture.

    Raises:
        RuntimeError: nvcc fails.
    """
    return compile_library(Path(__file__).parent / f"kernels/layouts_{arch.rstrip('a').replace('_', '')}.cu", arch)


def operands(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """A `[rows, 64]` and B `[128, 64]`, float32 integers."""
    rng = np.random.default_rng(5)
    return tuple(rng.integers(-16, 17, (n, DEPTH)).astype(np.float32) for n in (rows, ROWS_OF_B))


def loaded(arch: str, device: str) -> dict[str, np.ndarray]:
    """float32 A B^T `[rows, 128]` by every TMA-fed kernel, launched by its own host code on a torch device.

    Raises:
        RuntimeError: a launch fails.
    """
    import torch

    from msa_ext import _runtime

    functions = ctypes.CDLL(str(library(arch)))
    results = {}
    for name in LOADED[arch]:
        pair = [torch.from_numpy(x).to(device, torch.bfloat16) for x in operands(TILE_ROWS[arch])]
        if name.startswith("mn"):
            pair = [x.T.contiguous() for x in pair]
        out = _runtime.empty_like(torch.empty(TILE_ROWS[arch], ROWS_OF_B, device=device), torch.float32)
        status = getattr(functions, f"tma_{name}")(*(ctypes.c_void_p(_runtime.address(x)) for x in (*pair, out)))
        if status:
            raise RuntimeError(f"tma_{name}: CUDA error {status}")
        results[name] = out.cpu().numpy().copy()
    return results


def simulate(device: str, arch: str, mode: str, seed: int) -> dict[str, np.ndarray]:
    """`loaded` in the simulator, without a report."""
    from . import Simulator

    with Simulator(device, num_sms=1, mode=mode, seed=seed) as simulator:
        results = loaded(arch, "cpu")
        assert not simulator.reports, simulator.reports
    return results
