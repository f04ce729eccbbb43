"""align_kv and unalign_kv."""

import pytest
import torch

from msa_ext import align_kv, unalign_kv


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_tight_layout_and_round_trip():
    cu = int32([0, 1, 1, 130, 258])
    x = torch.randn(260, 2, 8)
    aligned, starts = align_kv(x, cu)
    assert starts.tolist() == [0, 128, 128, 384] and aligned.shape == (512, 2, 8)
    assert torch.equal(aligned[0], x[0]) and not aligned[1:128].any()
    assert torch.equal(aligned[128:257], x[1:130]) and not aligned[257:384].any()
    assert torch.equal(unalign_kv(aligned, cu, starts), x[:258])


def test_given_starts_leave_zero_gaps():
    cu, starts = int32([0, 100, 150]), int32([256, 0])
    x = torch.randn(150, 1, 4)
    aligned, same = align_kv(x, cu, starts)
    assert same is starts and aligned.shape[0] == 384
    assert torch.equal(aligned[:50], x[100:]) and not aligned[50:256].any()
    assert torch.equal(unalign_kv(aligned, cu, starts), x)


def test_gradients_flow_through():
    x = torch.randn(130, 1, 4, requires_grad=True)
    align_kv(x, int32([0, 130]))[0].square().sum().backward()
    assert torch.allclose(x.grad, 2 * x)


def test_nothing_to_align():
    aligned, starts = align_kv(torch.zeros(0, 2, 8), int32([0]))
    assert aligned.shape == (0, 2, 8) and starts.shape == (0,)
    assert unalign_kv(aligned, int32([0]), starts).shape == (0, 2, 8)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (([1.0], int32([0, 1])), TypeError, r"x: expected a torch.Tensor, got list"),
        ((torch.zeros(2, 1, 1, device="meta"), int32([0, 2])), NotImplementedError, r"x: expected a CPU or CUDA device, got meta"),
        ((torch.zeros(2, 1, 1), int32([0, 2]).to("meta")), NotImplementedError, r"cu_seqlens_k: expected a CPU or CUDA device, got meta"),
        ((torch.zeros(2, 1, 1).to_sparse(), int32([0, 2])), ValueError, r"x: expected a dense tensor \(torch.strided\), got torch.sparse_coo"),
        ((torch.zeros(2, 3), int32([0, 2])), ValueError, r"x: expected shape \[Tk, Hkv, D\], got \[2, 3\]"),
        ((torch.zeros(2, 1, 1), torch.tensor([0, 2])), TypeError, r"cu_seqlens_k: expected dtype torch.int32"),
        ((torch.zeros(2, 1, 1), int32([0, 3])), ValueError, r"cu_seqlens_k\[-1\]: expected at most Tk = 2, got 3"),
        ((torch.zeros(2, 1, 1), int32([1, 2])), ValueError, r"cu_seqlens_k: expected non-decreasing offsets from 0"),
        ((torch.zeros(2, 1, 1), int32([0, 2]), int32([64])), ValueError, r"starts: expected multiples of 128"),
        ((torch.zeros(2, 1, 1), int32([0, 1, 2]), int32([0, 0])), ValueError, r"starts: expected documents that do not overlap"),
        ((torch.zeros(2, 1, 1), int32([0, 2]), int32([0, 128])), ValueError, r"starts: expected shape \[1\], got \[2\]"),
    ],
)  # fmt: skip
def test_align_rejects(arguments, error, message):
    with pytest.raises(error, match=message):
        align_kv(*arguments)


def test_unalign_rejects_a_short_workspace():
    with pytest.raises(ValueError, match=r"x_aligned: expected more than 129 rows, got 128"):
        unalign_kv(torch.zeros(128, 1, 1), int32([0, 130]), int32([0]))
