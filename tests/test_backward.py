"""run_backward: every rejected input, and the CPU path."""

import dataclasses

import pytest
import torch

import cases
from msa_ext import _runtime, debug, support
from msa_ext.backward import run_backward
from msa_ext.testing import compare, oracle


def _arguments(**changes) -> dict:
    """Named arguments of a small valid call, some replaced; a function gets the original."""
    data = cases.make(cases.CASES["mixed_heads_2"])
    named = {
        "q": data.q,
        "k_aligned": data.k_aligned,
        "v_aligned": data.v_aligned,
        "grad_out": data.grad_out,
        "lse": data.lse,
        "out": data.out,
        "schedule": data.schedule,
    }
    for name, change in changes.items():
        named[name] = change(named[name]) if callable(change) and name in named else change
    return named


def _wide(shape, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


Q_SHAPE, KV_SHAPE = (260, 32, 128), (512, 2, 128)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"q": [1]}, TypeError, r"q: expected a torch.Tensor, got list"),
        ({"q": lambda x: x.float()}, TypeError, r"q: expected dtype torch.bfloat16, got torch.float32"),
        ({"k_aligned": lambda x: x.half()}, TypeError, r"k_aligned: expected dtype torch.bfloat16, got torch.float16"),
        ({"v_aligned": None}, TypeError, r"v_aligned: expected a torch.Tensor, got NoneType"),
        ({"grad_out": lambda x: x.double()}, TypeError, r"grad_out: expected dtype torch.bfloat16, got torch.float64"),
        ({"out": lambda x: x.float()}, TypeError, r"out: expected dtype torch.bfloat16, got torch.float32"),
        ({"lse": lambda x: x.bfloat16()}, TypeError, r"lse: expected dtype torch.float32, got torch.bfloat16"),
        ({"schedule": 3}, TypeError, r"schedule: expected an MSABackwardSchedule, got int"),
        ({"q": lambda x: x[0]}, ValueError, r"q: expected shape \[T, Hq, 128\], got \[32, 128\]"),
        ({"q": lambda x: x[..., :64]}, ValueError, r"q: expected shape \[T, Hq, 128\], got \[260, 32, 64\]"),
        ({"q": lambda x: x[:, :31]}, ValueError, r"q: expected Hq to be a multiple of Hkv = 2, got 31"),
        ({"k_aligned": lambda x: x[:500]}, ValueError, r"k_aligned: expected a multiple of 128 rows, got 500"),
        ({"k_aligned": lambda x: x[..., 0]}, ValueError, r"k_aligned: expected shape \[W, Hkv, 128\], got \[512, 2\]"),
        ({"v_aligned": lambda x: x[:384]}, ValueError, r"v_aligned: expected shape \[512, 2, 128\], got \[384, 2, 128\]"),
        ({"grad_out": lambda x: x[:259]}, ValueError, r"grad_out: expected shape \[260, 32, 128\], got \[259, 32, 128\]"),
        ({"out": lambda x: x[:, :16]}, ValueError, r"out: expected shape \[260, 32, 128\], got \[260, 16, 128\]"),
        ({"lse": lambda x: x.T}, ValueError, r"lse: expected shape \[T, Hq\] = \[260, 32\], got its transpose .*pass lse.T"),
        ({"lse": lambda x: x[:5]}, ValueError, r"lse: expected shape \[260, 32\], got \[5, 32\]"),
        ({"k_aligned": _wide((512, 1, 128)), "v_aligned": _wide((512, 1, 128))}, ValueError, r"schedule: expected Hkv = 1 index heads as in k_aligned, got 2"),
        ({"grad_out": _wide(Q_SHAPE).to("meta")}, ValueError, r"grad_out: expected q's device cpu, got meta"),
        ({"softmax_scale": "1"}, TypeError, r"softmax_scale: expected a float, got str"),
        ({"softmax_scale": float("nan")}, ValueError, r"softmax_scale: expected a finite value, got nan"),
        ({"softmax_scale": 10**400}, ValueError, r"softmax_scale: expected a finite value, got inf"),
        ({"dq_accum": "bf8"}, ValueError, r"dq_accum: expected one of bf16, fp16, fp32 or None, got 'bf8'"),
        ({"deterministic": 1}, TypeError, r"deterministic: expected a bool, got int"),
        ({"backend": 5}, TypeError, r"backend: expected a str or None, got int"),
        ({"backend": "sm90"}, NotImplementedError, r"backend: expected reference or None for tensors on the CPU, got 'sm90'"),
        ({"kv_grad_dtype": torch.float16}, ValueError, r"kv_grad_dtype: expected torch.bfloat16 or torch.float32, got torch.float16"),
        ({"dq": 1}, TypeError, r"dq: expected a torch.Tensor, got int"),
        ({"dq": _wide(Q_SHAPE, torch.float32)}, TypeError, r"dq: expected dtype torch.bfloat16, got torch.float32"),
        ({"dk": _wide((384, 2, 128))}, ValueError, r"dk: expected shape \[512, 2, 128\], got \[384, 2, 128\]"),
        ({"dv": _wide(KV_SHAPE), "kv_grad_dtype": torch.float32}, TypeError, r"dv: expected dtype torch.float32, got torch.bfloat16"),
        ({"dq": _wide((260, 64, 128))[:, ::2]}, ValueError, r"dq: expected a contiguous tensor, got strides"),
        ({"dk": _wide((512 * 2 * 128 + 1,))[1:].view(KV_SHAPE)}, ValueError, r"dk: expected an address aligned to 16 bytes"),
    ],
)  # fmt: skip
def test_rejects(changes, error, message):
    with pytest.raises(error, match=message):
        run_backward(**_arguments(**changes))


def test_rejects_outputs_that_overlap():
    named = _arguments()
    with pytest.raises(ValueError, match="dq: expected memory that overlaps no other argument"):
        run_backward(**named, dq=named["q"])
    shared = torch.zeros(KV_SHAPE, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="dv: expected memory that overlaps no other argument"):
        run_backward(**named, dk=shared, dv=shared)


def test_rejects_an_output_over_the_schedule():
    named = _arguments()
    schedule = named["schedule"]
    dq = torch.zeros(Q_SHAPE, dtype=torch.bfloat16)
    inside = dq.view(torch.int32).view(-1)[: schedule.q_indices.numel()].view_as(schedule.q_indices)
    inside.copy_(schedule.q_indices)
    named["schedule"] = dataclasses.replace(schedule, q_indices=inside)
    with pytest.raises(ValueError, match="dq: expected memory that overlaps no other argument"):
        run_backward(**named, dq=dq)
    assert torch.equal(inside, schedule.q_indices)


def test_rejects_bad_schedule_content_before_writing():
    named = _arguments()
    bad = named["schedule"].scheduler_metadata.clone()
    bad[0, 4] = 77
    named["schedule"] = dataclasses.replace(named["schedule"], scheduler_metadata=bad)
    dq = torch.full(Q_SHAPE, 7.0, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"schedule: scheduler_metadata\[0\].entry"):
        run_backward(**named, dq=dq)
    assert (dq == 7.0).all()


def test_rejects_devices_without_a_backend(monkeypatch):
    meta = {name: x.to("meta") if isinstance(x, torch.Tensor) else x.to("meta") for name, x in _arguments().items()}
    with pytest.raises(NotImplementedError, match="q: expected a CPU or CUDA device, got meta"):
        run_backward(**meta)


@pytest.fixture
def pretend_cuda(monkeypatch):
    """CPU tensors that pass for those of a GPU of some compute capability; nothing is launched."""

    class Extension:
        calls: list = []

        @staticmethod
        def main_kernels():
            return [
                {"name": "simple", "major": 0, "default_dq_accum": "fp32", "dq_accums": ["fp32", "bf16"]},
                {"name": "sm90", "major": 9, "default_dq_accum": "bf16", "dq_accums": ["fp32", "bf16"]},
            ]

        @staticmethod
        def built_archs():
            return ["90a", "100a"]

        @staticmethod
        def plan_workspace(sizes, dq_accum, guard_bytes):
            return 256, [("descriptor", 0, 28)]

        @classmethod
        def backward(cls, *arguments):
            cls.calls.append(arguments)

    def pretend(capability):
        monkeypatch.setattr(_runtime, "is_cuda", lambda device: True)
        monkeypatch.setattr(_runtime, "capability", lambda device: capability)
        monkeypatch.setattr(_runtime, "extension", lambda: Extension)
        monkeypatch.setattr(_runtime, "stream", lambda device: 0)
        monkeypatch.setattr(_runtime, "guard", lambda device: torch.no_grad())
        return Extension.calls

    Extension.calls.clear()
    caches = (support.cuda_backends, support.usable_backends)
    for cached in caches:
        cached.cache_clear()
    yield pretend
    for cached in caches:
        cached.cache_clear()
    debug._last.clear()


@pytest.mark.parametrize(
    "capability, options, expected",
    [
        ((9, 0), {}, ("sm90", "bf16")),
        ((9, 0), {"dq_accum": "fp32"}, ("sm90", "fp32")),
        ((9, 0), {"backend": "simple"}, ("simple", "fp32")),
        ((10, 0), {}, ("simple", "fp32")),
    ],
)
def test_cuda_dispatch(pretend_cuda, capability, options, expected):
    calls = pretend_cuda(capability)
    run_backward(**_arguments(), **options)
    assert len(calls) == 1 and (calls[0][0], calls[0][11]) == expected


@pytest.mark.parametrize(
    "capability, options, message",
    [
        ((8, 0), {}, r"backend: expected one for cpu of compute capability 8.0, got None; built are simple, sm90 \(90a, 100a\)"),
        ((8, 0), {"backend": "simple"}, r"of compute capability 8.0, got 'simple'"),
        ((12, 0), {}, r"of compute capability 12.0, got None; built are simple, sm90"),
        ((10, 0), {"backend": "sm90"}, r"backend: expected one for cpu of compute capability 10.0, got 'sm90'"),
        ((9, 0), {"backend": "sm100"}, r"got 'sm100'; built are simple, sm90"),
        ((9, 0), {"dq_accum": "fp16"}, r"dq_accum: backend sm90 expects one of fp32, bf16, got 'fp16'"),
        ((9, 0), {"deterministic": True}, r"deterministic: backend sm90 expects False, got True"),
    ],
)  # fmt: skip
def test_cuda_dispatch_rejects(pretend_cuda, capability, options, message):
    calls = pretend_cuda(capability)
    with pytest.raises(NotImplementedError, match=message):
        run_backward(**_arguments(), **options)
    assert not calls


def test_cuda_groups(pretend_cuda):
    calls = pretend_cuda((9, 0))
    data = cases.make(dataclasses.replace(cases.CASES["length_3"], group=4))
    with pytest.raises(NotImplementedError, match="q: backend sm90 expects Hq / Hkv of 16 or 8, got 4"):
        run_backward(*data.arguments())
    assert not calls


def test_views_are_passed_without_a_copy(pretend_cuda):
    calls = pretend_cuda((9, 0))
    named = _arguments()
    packed = torch.cat([named["q"], named["grad_out"]], dim=1)
    named["q"], named["grad_out"] = packed[:, :32], packed[:, 32:]
    run_backward(**named)
    operands = calls[0][4]
    assert operands[0] == (packed.data_ptr(), 64 * 128, 128)
    assert operands[1] == (packed[:, 32:].data_ptr(), 64 * 128, 128)
    named["q"] = torch.cat([named["q"], named["q"]], dim=2)[..., 4:132]  # misaligned: copied once
    run_backward(**named)
    address, row_stride, head_stride = calls[1][4][0]
    assert address % 16 == 0 and (row_stride, head_stride) == (32 * 128, 128)


# ---- the CPU path ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases.corner_cases(small_only=True), ids=lambda c: c.name)
def test_cpu_matches_the_oracle(case):
    data = cases.make(case, seed=1)
    poisoned = {
        "dq": torch.full(data.q.shape, torch.nan, dtype=torch.bfloat16),
        "dk": torch.full(data.k_aligned.shape, torch.nan, dtype=torch.bfloat16),
        "dv": torch.full(data.k_aligned.shape, torch.nan, dtype=torch.bfloat16),
    }
    got = run_backward(*data.arguments(), **poisoned)
    assert all(x is y for x, y in zip(got, poisoned.values()))
    expected = oracle.backward(data.problem(), data.grad_out, data.lse, data.out)
    compare.check_all(got, expected, data.dead_rows)


def test_cpu_options():
    named = _arguments()
    dq, dk, dv = run_backward(**named)
    assert dq.dtype == dk.dtype == dv.dtype == torch.bfloat16
    wide = run_backward(**named, kv_grad_dtype=torch.float32, deterministic=True, backend="reference", dq_accum="fp16")
    for accum in ("bf16", "fp16", "fp32"):  # as explain() says: all the same
        assert torch.equal(run_backward(**named, dq_accum=accum)[0], dq)
    assert wide[1].dtype == torch.float32 and torch.equal(wide[1].bfloat16(), dk)
    halved = run_backward(**named, softmax_scale=0.5 * 128**-0.5)
    assert not torch.equal(halved[0], dq)
    assert debug.last_flags() == set()


def test_inputs_that_require_grad():
    named = _arguments(q=lambda x: x.requires_grad_(), k_aligned=lambda x: x.requires_grad_())
    assert not any(gradient.requires_grad for gradient in run_backward(**named))


def test_last_flags_by_device(monkeypatch):
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    raised = {first: torch.tensor([4], dtype=torch.int32), second: torch.tensor([8], dtype=torch.int32)}
    monkeypatch.setattr(debug, "_last", raised)
    monkeypatch.setattr(debug, "_latest", None)
    monkeypatch.setattr(_runtime, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert debug.last_flags() == set()
    for device, expected in ((first, {"bad_item"}), (second, {"bad_query_index"}), (first, {"bad_item"})):
        debug.flags_tensor(device)
        assert debug.last_flags() == expected
    assert debug.last_flags("cuda") == {"bad_item"}
    assert debug.last_flags("cuda:1") == {"bad_query_index"}


def test_decode_flags():
    assert debug.decode(0) == set()
    assert debug.decode(0b10001) == {"work_count_clamped", "bad_row_pointer"}
    assert not debug.FATAL & debug.FLAGS["work_count_clamped"]
