"""Two facts the kernels rest on, settled on the card: what a TMA box of a query slot looks like in shared memory."""

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    library = tmp_path_factory.mktemp("probe") / "tma_probe.so"
    sources = [ROOT / "tests/kernels/tma_probe.cu", ROOT / "csrc/host/tensor_map.cpp"]
    flags = ["-std=c++17", "-gencode", "arch=compute_90a,code=sm_90a", "-Xcompiler", "-fPIC", "-shared"]
    subprocess.run(["nvcc", *flags, "-cudart", "shared", "-I", ROOT / "csrc", "-o", library, *sources], check=True)
    function = ctypes.CDLL(str(library)).tma_probe
    pointer, wide = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [pointer, wide, ctypes.c_int, ctypes.c_int, wide, ctypes.c_int, ctypes.c_int, pointer]

    def run(q: torch.Tensor, group: int, token: int, index_head: int) -> torch.Tensor:
        image = torch.zeros(2048, dtype=torch.bfloat16, device="cuda")
        status = function(q.data_ptr(), len(q), q.shape[1], group, q.stride(0), token, index_head, image.data_ptr())
        assert status == 0
        return image.cpu()

    return run


def _expected(rows: torch.Tensor) -> torch.Tensor:
    """`[G, 128]` rows as [G/8][half of d][8 heads][64 d], 16-byte chunks swizzled by the row in its atom."""
    image = torch.full((2048,), -1, dtype=torch.int16).view(torch.bfloat16)
    for head in range(len(rows)):
        for chunk in range(16):
            atom = head // 8 * 2048 + chunk // 8 * 1024
            offset = atom + head % 8 * 128 + ((chunk % 8) ^ (head % 8)) * 16
            image[offset // 2 : offset // 2 + 8] = rows[head, 8 * chunk : 8 * chunk + 8]
    return image


@pytest.mark.parametrize("group", [16, 8])
@pytest.mark.parametrize("strided", [False, True])
def test_box_layout(probe, group, strided):
    heads = 4 * group
    whole = torch.randn(9, heads * (2 if strided else 1), 128, device="cuda").bfloat16()
    q = whole[:, -heads:]
    for token, index_head in ((0, 0), (5, 3), (8, 1)):
        rows = q[token, index_head * group : (index_head + 1) * group].cpu()
        image = probe(q, group, token, index_head)
        assert torch.equal(image.view(torch.int16), _expected(rows).view(torch.int16))


@pytest.mark.parametrize("group", [16, 8])
@pytest.mark.parametrize("token", [-1, 9, 10**6])
def test_token_outside_arrives_as_zeros(probe, group, token):
    q = torch.randn(9, 4 * group, 128, device="cuda").bfloat16()
    image = probe(q, group, token, 1)
    filled = image[: group * 128]
    assert not filled.view(torch.int16).any()
