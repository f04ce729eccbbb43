"""The reference against the independent float64 oracle, on every corner case."""

import dataclasses
import time

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import cases
from msa_ext import reference
from msa_ext.packs import load_packs
from msa_ext.schedule import build_schedule
from msa_ext.testing import compare, oracle


def _float64(case: cases.Case, seed: int = 0) -> cases.CaseData:
    return cases.make(case, seed=seed, dtype=torch.float64)


@pytest.mark.parametrize("case", cases.corner_cases(), ids=lambda c: c.name)
def test_forward_and_backward_match_oracle(case):
    data = _float64(case)
    data.schedule.validate(num_tokens=data.q.shape[0], workspace_rows=data.k_aligned.shape[0], group=case.group)
    problem = data.problem()
    out, lse = oracle.forward(problem)
    tokens = [t for t in range(data.cu_seqlens[-1]) if t not in case.hidden_tokens]
    torch.testing.assert_close(data.lse[tokens], lse[tokens], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(data.out[tokens], out[tokens], rtol=1e-10, atol=1e-10)

    got = reference.backward(*data.arguments(), compute_dtype=torch.float64)
    expected = oracle.backward(problem, data.grad_out, data.lse, data.out)
    compare.check_all(got, expected, data.dead_rows, tolerance=1e-10)
    for x, oracle_x in zip(got, expected):
        torch.testing.assert_close(x, oracle_x, rtol=1e-10, atol=1e-10)


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


def test_garbage_where_the_contract_allows_it_changes_nothing():
    data = _float64(cases.CASES["everything"])
    used, schedule = data.cu_seqlens[-1], data.schedule
    tensors = [data.q, data.k_aligned, data.v_aligned, data.grad_out, data.lse, data.out]
    assert all(x.isnan().any() for x in tensors)  # tokens past cu_seqlens[-1], gap blocks
    clean = [x.nan_to_num(0.0) for x in tensors]

    count = int(schedule.work_count)
    edges = schedule.row_ptr[:, -1].tolist()
    tail = 5
    q_indices = torch.nn.functional.pad(schedule.q_indices, (0, tail), value=0)
    for head, end in enumerate(edges):
        q_indices[head, end:] = torch.tensor([-7, 2**31 - 1])[torch.arange(q_indices.shape[1] - end) % 2]
    garbage = torch.tensor([[0, 2**31 - 1, -5, -1, 10**9, -9]] * tail, dtype=torch.int32)
    dirty = dataclasses.replace(
        schedule,
        q_indices=q_indices,
        scheduler_metadata=torch.cat([schedule.scheduler_metadata[:count], garbage]),
    )
    trimmed = dataclasses.replace(
        schedule,
        q_indices=schedule.q_indices[:, : max(edges)].contiguous(),
        scheduler_metadata=schedule.scheduler_metadata[:count],
    )
    for function, arguments in ((reference.forward, slice(0, 3)), (reference.backward, slice(0, 6))):
        got = function(*tensors[arguments], dirty, compute_dtype=torch.float64)
        expected = function(*clean[arguments], trimmed, compute_dtype=torch.float64)
        for x, y in zip(got, expected):
            assert torch.equal(x, y)
            assert not x.isnan().any()
    assert not got[0][used:].any()


def test_strided_and_misaligned_operands():
    data = cases.make(cases.CASES["mixed_heads_2"])
    q, k, v, grad_out, lse, out, schedule = data.arguments()
    packed = torch.cat([torch.zeros_like(q[:, :1]), q, grad_out], dim=1)  # one head of offset
    heads = q.shape[1]
    padded = torch.nn.functional.pad(v, (3, 2))  # rows of 133 elements
    views = (packed[:, 1 : 1 + heads], k.transpose(0, 1).contiguous().transpose(0, 1), padded[..., 3:-2])
    assert not any(x.is_contiguous() for x in views)
    got = reference.backward(*views, packed[:, 1 + heads :], lse.T.contiguous().T, out, schedule)
    expected = reference.backward(*data.arguments())
    for x, y in zip(got, expected):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


class _LargestTensor(TorchDispatchMode):
    """Remembers the largest element count any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_no_intermediate_is_larger_than_q():
    data = cases.make(cases.CASES["rows_4097"])
    num_tokens = data.q.shape[0]
    assert num_tokens**2 > 4 * data.q.numel()  # a token-by-token mask would show
    with _LargestTensor() as seen:
        reference.forward(*data.arguments()[:3], data.schedule)
        reference.backward(*data.arguments())
    assert 0 < seen.elements <= data.q.numel()


def test_a_4k_token_pack_takes_less_than_a_minute_of_two_cores():
    lengths = load_packs()["pack_12"].document_lengths(4096)
    case = cases.Case("pack_4096", tuple(lengths), num_kv_heads=4, topk=16, small=False)
    began = time.process_time()  # of all threads: what else the machine does is left out
    data = cases.make(case)  # the forward is the reference's
    got = reference.backward(*data.arguments())
    assert time.process_time() - began < 2 * 60
    tokens, blocks = [0, lengths[0] + 700, 4095], [3, 12]
    args = (data.problem(), data.grad_out, data.lse, data.out)
    dk, dv = oracle.sampled_dkv(*args, blocks)
    rows = torch.cat([torch.arange(128 * b, 128 * (b + 1)) for b in blocks])
    compare.check_all(
        (got[0][tokens], got[1][rows], got[2][rows]),
        (oracle.sampled_dq(*args, tokens), dk.flatten(0, 1), dv.flatten(0, 1)),
        data.dead_rows[tokens],
        tolerance=1e-5,
    )


def test_dtypes_and_rejected_options():
    data = cases.make(cases.CASES["length_5"])
    inputs = [x.requires_grad_() for x in (data.q, data.k_aligned, data.v_aligned)]
    out, lse = reference.forward(*inputs, data.schedule)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert not out.requires_grad and not lse.requires_grad
    dq, dk, dv = reference.backward(*data.arguments(), compute_dtype=torch.float64)
    assert dq.dtype == dk.dtype == dv.dtype == torch.float64
    with pytest.raises(ValueError, match="compute_dtype: expected torch.float32 or torch.float64, got torch.bfloat16"):
        reference.forward(*inputs, data.schedule, compute_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="q: expected a multiple of 3 heads .*, got 16"):
        reference.forward(data.q, *(x.expand(-1, 3, -1) for x in inputs[1:]), data.schedule)


def _error(got, reference_value, *, tolerance=4e-3, zero=()):
    must_be_zero = torch.zeros(len(reference_value), 1, dtype=torch.bool)
    must_be_zero[list(zero)] = True
    return compare.compare("dq", got[:, None, None], reference_value[:, None, None], tolerance, must_be_zero)


def test_compare_rules():
    x = torch.linspace(-1.0, 1.0, 1001, dtype=torch.float64)
    x[500] = 0.0
    assert _error(x * 1.003, x, zero=[500]).passed
    assert not _error(x * 1.005, x).passed  # relative L2
    outlier = x.clone()
    outlier[3] += 0.03
    error = _error(outlier, x)
    assert error.relative_l2 < error.tolerance and not error.passed  # max abs
    leak = x.clone()
    leak[500] = 1e-300
    assert _error(leak, x).passed and not _error(leak, x, zero=[500]).passed
    for bad in (torch.nan, torch.inf):
        broken = x.clone()
        broken[0] = bad
        for got, expected in ((broken, x), (x, broken), (broken, broken)):
            assert not _error(got, expected).passed
    tiny = x * 1e-7  # rounding of gradients that vanish: absolute
    assert _error(torch.zeros_like(x), tiny).passed
    assert not _error(tiny + 2e-4, tiny).passed
    assert not _error(tiny * 2, tiny, tolerance=1e-10).passed
    empty = torch.zeros(0, dtype=torch.float64)
    assert _error(empty, empty).passed
    with pytest.raises(ValueError, match=r"dq: expected shape \[1001, 1, 1\], got \[7, 1, 1\]"):
        _error(x[:7], x)


def test_tolerances_are_the_contract():
    one = torch.ones(2, 1, 1, dtype=torch.float64)
    for accum, limits in {"bf16": (7e-3, 4e-3, 4e-3), "fp16": (7e-3, 4e-3, 4e-3), "fp32": (4e-3,) * 3}.items():
        errors = compare.compare_all((one,) * 3, (one,) * 3, torch.zeros(2, 1, dtype=torch.bool), dq_accum=accum)
        assert tuple(e.l2_limit for e in errors) == limits
        assert all(e.max_limit == 0.02 and e.passed for e in errors)


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
