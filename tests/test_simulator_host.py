"""The simulated CUDA runtime, seen from host code."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from simulator.shim import cuda_home
from simulator.simulator import compile_library

TESTS = Path(__file__).parent

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None or shutil.which("gcc") is None, reason="needs nvcc, gcc")

SOURCE = """
#include <cuda_runtime.h>
__global__ void kernel(int* x) { atomicAdd(x, 1); }
extern "C" int run(int* x, unsigned cluster, unsigned shared_bytes) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = cluster;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(4);
  config.blockDim = dim3(32);
  config.dynamicSmemBytes = shared_bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  if (cudaLaunchKernelEx(&config, kernel, x) != cudaSuccess) return cudaGetLastError();
  return cudaDeviceSynchronize();
}
"""

LAUNCH = """
import ctypes, sys
import numpy as np
from simulator import Simulator
with Simulator("h200") as simulator:
    run = ctypes.CDLL(sys.argv[1]).run
    x = simulator.array(np.zeros(1, np.int32))
    print(run(ctypes.c_void_p(x.ctypes.data), int(sys.argv[2]), int(sys.argv[3])), x[0], simulator.error)
"""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(TESTS)!r})\n{code}", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    source = tmp_path_factory.mktemp("host") / "launch.cu"
    source.write_text(SOURCE)
    return str(compile_library(source, "sm_90a"))


def test_a_library_of_its_own_runs_in_a_fresh_process(library):
    assert python(LAUNCH, library, "1", "0").stdout.split()[:2] == ["0", "128"]


def test_what_a_launch_may_not_ask_for(library):
    """Clusters above one CTA are not modelled; shared memory above the device's is an error there too."""
    not_supported, launch_failure = "801", "719"
    assert python(LAUNCH, library, "2", "0").stdout.split()[:2] == [not_supported, "0"]
    too_much = python(LAUNCH, library, "1", "300000").stdout
    assert too_much.split()[:2] == [launch_failure, "0"] and "300000 bytes of shared memory" in too_much


def test_a_real_runtime_in_the_process_is_an_error():
    runtime = sorted((cuda_home() / "lib64").glob("libcudart.so.1*")) or sorted(cuda_home().rglob("libcudart.so.1*"))
    if not runtime:
        pytest.skip("no libcudart beside nvcc")
    done = python(
        f"import ctypes; ctypes.CDLL({str(runtime[0])!r})\nfrom simulator import Simulator\nSimulator().__enter__()"
    )
    assert done.returncode and "is already loaded; use the simulator in a fresh process" in done.stderr
