"""msa_ext's kernels in the simulator against what an H200 computed (tests/simulator/record_vectors.py)."""

import importlib.util
import shutil

import numpy as np
import pytest
from simulator import pipeline, record_vectors
from simulator.formats import bf16_to_f32

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("msa_ext._C") is None, reason="needs the built extension"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc for the runtime shim"),
    pytest.mark.skipif(
        not record_vectors.VECTORS.exists(),
        reason=f"no {record_vectors.VECTORS.name} yet: simulator.record_vectors makes it on an H200",
    ),
]
# The chip's ex2 and the order of its sums differ from ours in the last bits, which now and then round the other way.
RELATIVE_L2 = 1e-3
MAX_ABS = 2.0**-7  # of the largest value


def difference(got: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """(relative L2, largest difference over the largest value); values that are not finite must be the same."""
    got, expected = ((bf16_to_f32(x.ravel()) if x.dtype == np.uint16 else x).ravel() for x in (got, expected))
    finite = np.isfinite(expected)
    assert np.array_equal(got[~finite], expected[~finite])
    got, expected = got[finite].astype(float), expected[finite].astype(float)
    gap = got - expected
    return np.linalg.norm(gap) / np.linalg.norm(expected), np.abs(gap).max() / np.abs(expected).max()


@pytest.fixture(scope="module")
def worker():
    worker = pipeline.Worker()
    yield worker
    worker.close()


@pytest.mark.parametrize("mode, seed", [("random", 1)])
def test_kernels_agree_with_the_h200(worker, mode, seed):
    got = worker.call(record_vectors.simulate, mode, seed)
    with np.load(record_vectors.VECTORS) as stored:
        expected = {name: stored[name] for name in stored.files if name != "device"}
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        assert got[name].dtype == array.dtype and got[name].shape == array.shape, name
        if record_vectors.is_exact(name):
            assert np.array_equal(got[name], array), name
        else:
            relative, largest = difference(got[name], array)
            assert relative <= RELATIVE_L2 and largest <= MAX_ABS, f"{name}: {relative:.1e}, {largest:.1e}"
