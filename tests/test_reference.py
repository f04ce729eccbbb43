"""The reference against the independent float64 oracle, on every corner case."""

import dataclasses

import pytest
import torch

import cases
from msa_ext import reference
from msa_ext.schedule import build_schedule
from msa_ext.testing import compare, oracle


def _float64(case: cases.Case, seed: int = 0) -> cases.CaseData:
    return cases.make(case, seed=seed, dtype=torch.float64)


@pytest.mark.parametrize("case", cases.corner_cases(), ids=lambda c: c.name)
def test_forward_and_backward_match_oracle(case):
    data = _float64(case)
    data.schedule.validate(num_tokens=data.q.shape[0], workspace_rows=data.k_aligned.shape[0], group=case.group)
    problem, used = data.problem(), data.cu_seqlens[-1]
    out, lse = oracle.forward(problem)
    torch.testing.assert_close(data.lse[:used], lse[:used], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(data.out[:used], out[:used], rtol=1e-10, atol=1e-10)

    got = reference.backward(*data.arguments(), compute_dtype=torch.float64)
    expected = oracle.backward(problem, data.grad_out, data.lse, data.out)
    compare.check_all(got, expected, data.dead_rows, tolerance=1e-10)


def test_tokens_without_keys_contribute_nothing_even_with_edges():
    data = _float64(cases.CASES["length_257"])
    data.lse[5] = -torch.inf
    data.out[5] = 0.0
    got = reference.backward(*data.arguments(), compute_dtype=torch.float64)
    expected = oracle.backward(data.problem(), data.grad_out, data.lse, data.out)
    compare.check_all(got, expected, data.dead_rows, tolerance=1e-10)
    assert not got[0][5].any()


def test_gradients_match_autograd_of_a_dense_attention():
    data = _float64(cases.CASES["length_129"])  # two blocks, both chosen: dense causal attention
    leaves = [x.clone().requires_grad_() for x in (data.q, data.k_aligned, data.v_aligned)]
    q, k, v = leaves
    scores = data.softmax_scale * torch.einsum("thd,sd->hts", q, k[:129, 0])
    causal = torch.ones(129, 129, dtype=torch.bool).tril()
    p = torch.softmax(scores.masked_fill(~causal, -torch.inf), dim=-1)
    out = torch.einsum("hts,sd->thd", p, v[:129, 0])
    torch.testing.assert_close(data.out, out.detach(), rtol=1e-10, atol=1e-10)
    out.backward(data.grad_out)
    got = reference.backward(*data.arguments(), compute_dtype=torch.float64)
    for x, leaf in zip(got, leaves):
        torch.testing.assert_close(x, leaf.grad, rtol=1e-10, atol=1e-12)


def test_float32_from_bfloat16_inputs_is_well_inside_the_tolerances():
    data = cases.make(cases.CASES["lengths_mixed"])
    got = reference.backward(*data.arguments())
    expected = oracle.backward(data.problem(), data.grad_out, data.lse, data.out)
    compare.check_all(got, expected, data.dead_rows, tolerance=1e-4)
    assert got[0].dtype == torch.float32


@pytest.mark.parametrize("wrong", ["scale", "delta", "causal", "nan", "dead"])
def test_compare_catches_a_wrong_backward(wrong):
    data = _float64(cases.CASES["extra_tokens"])
    expected = oracle.backward(data.problem(), data.grad_out, data.lse, data.out)
    arguments, options = list(data.arguments()), {}
    if wrong == "scale":
        options["softmax_scale"] = data.softmax_scale * 1.02
    elif wrong == "delta":
        arguments[5] = data.out * 0.9
    elif wrong == "causal":
        arguments[6] = dataclasses.replace(data.schedule, query_offsets=torch.ones(2, dtype=torch.int32))
    got = list(reference.backward(*arguments, compute_dtype=torch.float64, **options))
    if wrong == "nan":
        got[1][0, 0, 0] = torch.nan
    elif wrong == "dead":
        got[0][-1, 0, 0] = 1e-30
    with pytest.raises(AssertionError, match="FAIL"):
        compare.check_all(got, expected, data.dead_rows)


def test_sampled_oracle_agrees_with_the_whole():
    data = _float64(cases.CASES["shared_fragments"])
    problem = data.problem()
    dq, dk, dv = oracle.backward(problem, data.grad_out, data.lse, data.out)
    tokens, blocks = [0, 99, 130, 400], [0, 3, 5, 7]
    got_dq = oracle.sampled_dq(problem, data.grad_out, data.lse, data.out, tokens)
    torch.testing.assert_close(got_dq, dq[tokens], rtol=1e-10, atol=1e-12)
    for got, whole in zip(oracle.sampled_dkv(problem, data.grad_out, data.lse, data.out, blocks), (dk, dv)):
        torch.testing.assert_close(
            got, torch.stack([whole[128 * b : 128 * (b + 1)] for b in blocks]), rtol=1e-10, atol=1e-12
        )


def test_oracle_does_not_import_the_reference_or_the_schedule():
    source = open(oracle.__file__).read()
    assert "import" in source
    imports = [line for line in source.splitlines() if line.startswith(("import", "from"))]
    assert imports and not [line for line in imports if "msa_ext" in line or "from ." in line]


def test_hidden_pairs_need_no_finite_keys():
    """Gap blocks hold NaN in every case with gaps; a schedule that names none of them must not read them."""
    topk = torch.zeros(1, 4, 1, dtype=torch.int32)
    schedule = build_schedule(
        topk,
        torch.tensor([0, 4], dtype=torch.int32),
        document_workspace_starts=torch.tensor([128], dtype=torch.int32),
    )
    q = torch.randn(4, 16, 128)
    k = torch.full((256, 1, 128), torch.nan)
    k[128:132] = torch.randn(4, 1, 128)
    k[132:] = 0.0
    out, lse = reference.forward(q, k, k, schedule)
    grads = reference.backward(q, k, k, q, lse, out, schedule)
    assert all(torch.isfinite(x).all() for x in (out, lse, *grads))
