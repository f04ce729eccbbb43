"""What surrounds a call: default device and dtype, autocast, inference mode, determinism, tracing, lazy views."""

import contextlib
import dataclasses
import warnings

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import cases
from msa_ext import _runtime, align_kv, build_schedule, reference, unalign_kv
from msa_ext.backward import run_backward
from msa_ext.demo import select_blocks
from msa_ext.testing import compare, oracle

NAMES = ("q", "k_aligned", "v_aligned", "grad_out", "lse", "out")


@contextlib.contextmanager
def _default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


STATES = {
    "default_device": lambda: _default_device("meta"),
    "device_context": lambda: torch.device("meta"),
    "float64": lambda: _default_dtype(torch.float64),
    "bfloat16": lambda: _default_dtype(torch.bfloat16),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast_half": lambda: torch.autocast("cpu", dtype=torch.float16),
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "deterministic": lambda: _deterministic(warn_only=False),
}


@contextlib.contextmanager
def _deterministic(warn_only):
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def data():
    return cases.make(cases.CASES["everything"])


def _leaves(value):
    """Tensors and plain values of any result, in order."""
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, (list, tuple)):
        return [leaf for part in value for leaf in _leaves(part)]
    return [value]


def _check_oracle(data):
    problem = data.problem()
    whole = oracle.backward(problem, data.grad_out, data.lse, data.out)
    sampled = oracle.sampled_dq(problem, data.grad_out, data.lse, data.out, [0, 140])
    blocks = oracle.sampled_dkv(problem, data.grad_out, data.lse, data.out, [1, 4])
    errors = compare.compare_all(whole, whole, data.dead_rows)
    return [*oracle.forward(problem), *whole, sampled, *blocks, [dataclasses.astuple(error) for error in errors]]


CU = torch.tensor([0, 1, 130], dtype=torch.int32)
PACKED = torch.randn(130, 2, 8)
CALLS = {
    "run_backward": lambda data: run_backward(*data.arguments()),
    "run_backward_outputs": lambda data: run_backward(
        *data.arguments(), dq=torch.empty_like(data.q), dk=torch.empty_like(data.k_aligned)
    ),
    "reference.forward": lambda data: reference.forward(data.q, data.k_aligned, data.v_aligned, data.schedule),
    "reference.forward64": lambda data: reference.forward(
        data.q, data.k_aligned, data.v_aligned, data.schedule, compute_dtype=torch.float64
    ),
    "reference.backward": lambda data: reference.backward(*data.arguments()),
    "build_schedule": lambda data: build_schedule(
        data.topk,
        data.schedule.cu_seqlens,
        document_workspace_starts=data.schedule.document_workspace_starts,
        max_item_queries=48,
    ),
    "build_schedule_sizes": lambda data: build_schedule(
        data.topk, data.schedule.cu_seqlens, num_rows=9, edge_capacity=9000, work_capacity=300
    ),
    "validate": lambda data: data.schedule.validate(num_tokens=len(data.q), workspace_rows=len(data.k_aligned)),
    "to": lambda data: data.schedule.to("cpu"),
    "align_kv": lambda data: align_kv(PACKED, CU),
    "unalign_kv": lambda data: unalign_kv(torch.ones_like(PACKED).repeat(2, 1, 1), CU, CU[:2] * 0 + CU[:2] * 128),
    "oracle": _check_oracle,
    "select_blocks": lambda data: select_blocks(*PACKED.repeat(1, 1, 16).unflatten(2, (128, -1))[None].expand(2, *[-1] * 4)[..., 0].contiguous(), [1, 129]),
}  # fmt: skip


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("call", CALLS)
def test_the_ambient_state_changes_nothing(data, call, state):
    if (call, state) in (("select_blocks", "autocast"), ("select_blocks", "autocast_half")):
        pytest.skip("the demo's selection is a model's code, which autocast is for")
    expected = _leaves(CALLS[call](data))
    with STATES[state]():
        got = _leaves(CALLS[call](data))
    assert len(got) == len(expected)
    for x, y in zip(got, expected):
        if isinstance(y, torch.Tensor):
            assert x.dtype == y.dtype and x.device == y.device
            # Bitwise: NaN of an unused token stays NaN.
            assert torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
        else:
            assert x == y


def test_inference_tensors_are_outputs_like_others(data):
    with torch.inference_mode():
        outputs = [torch.empty_like(x) for x in (data.q, data.k_aligned, data.v_aligned)]
        schedule = data.schedule.to("cpu")
    expected = run_backward(*data.arguments())
    got = run_backward(*data.arguments()[:6], schedule, dq=outputs[0], dk=outputs[1], dv=outputs[2])
    assert all(torch.equal(x, y) for x, y in zip(got, expected))


# ---- what cannot be read where it stands, and what nothing may trace


def _named(data):
    return dict(zip(NAMES, data.arguments()[:6])), data.schedule


def _lazily_negated(x):
    return torch.imag(torch.complex(torch.zeros_like(x.float()), -x.float()).conj()).to(torch.float32)


@pytest.mark.parametrize("name", NAMES)
def test_fake_tensors_are_refused_by_name(data, name):
    tensors, schedule = _named(data)
    with FakeTensorMode() as mode:
        tensors[name] = mode.from_tensor(tensors[name])
    with pytest.raises(TypeError, match=f"{name}: expected a torch.Tensor with memory of its own, got FakeTensor"):
        run_backward(**tensors, schedule=schedule)
    with pytest.raises(TypeError, match=f"{name}: expected a torch.Tensor with memory of its own, got FakeTensor"):
        reference.backward(**tensors, schedule=schedule)


def test_fake_tensors_are_refused_by_the_helpers(data):
    with FakeTensorMode() as mode:
        topk, packed, cu = (mode.from_tensor(x) for x in (data.topk, PACKED, CU))
    for call, name in (
        (lambda: build_schedule(topk, data.schedule.cu_seqlens), "topk"),
        (lambda: build_schedule(data.topk, cu), "cu_seqlens"),
        (lambda: align_kv(packed, CU), "x"),
        (lambda: align_kv(PACKED, cu), "cu_seqlens_k"),
        (lambda: unalign_kv(packed, CU, CU[:2]), "x_aligned"),
    ):
        with pytest.raises(TypeError, match=f"{name}: expected a torch.Tensor with memory of its own, got FakeTensor"):
            call()


@pytest.mark.parametrize(
    "call",
    [
        lambda data, q: run_backward(q, *data.arguments()[1:]),
        lambda data, q: reference.forward(q, data.k_aligned, data.v_aligned, data.schedule),
        lambda data, q: reference.backward(q, *data.arguments()[1:]),
        lambda data, q: align_kv(PACKED, CU),
        lambda data, q: build_schedule(data.topk, data.schedule.cu_seqlens),
    ],
)
def test_traced_calls_are_refused(data, call):
    with pytest.raises(NotImplementedError, match="expected a call that nothing traces, got one under"):
        make_fx(lambda q: call(data, q))(data.q)
    with FakeTensorMode(allow_non_fake_inputs=True):
        with pytest.raises(NotImplementedError, match="expected a call that nothing traces, got one under FakeTensor"):
            call(data, data.q)


def test_transforms_are_refused(data):
    _, *rest = data.arguments()
    many = torch.stack([data.q, data.q])
    with pytest.raises(NotImplementedError, match="q: expected a tensor outside torch.func transforms"):
        torch.func.vmap(lambda q: run_backward(q, *rest)[0])(many)
    with pytest.raises(NotImplementedError, match="q: expected a tensor outside torch.func transforms"):
        torch.func.grad(lambda q: run_backward(q, *rest)[0].float().sum())(data.q)
    with pytest.raises(NotImplementedError, match="x: expected a tensor outside torch.func transforms"):
        torch.func.vmap(lambda x: align_kv(x, CU)[0])(torch.stack([PACKED, PACKED]))


def test_lazy_views_are_refused(data):
    lse = _lazily_negated(data.lse)
    assert lse.is_neg() and torch.equal(lse.resolve_neg().nan_to_num(), data.lse.nan_to_num())
    tensors, schedule = _named(data)
    with pytest.raises(ValueError, match=r"lse: expected values as they stand in memory, got a lazily negated view"):
        run_backward(**{**tensors, "lse": lse}, schedule=schedule)
    with pytest.raises(ValueError, match=r"x: .* a lazily negated view; pass resolve_neg\(\)"):
        align_kv(_lazily_negated(PACKED), CU)
    with pytest.raises(ValueError, match=r"x: .* a lazily conjugated view; pass resolve_conj\(\)"):
        align_kv(torch.view_as_complex(PACKED.unflatten(2, (4, 2))).conj(), CU)


# ---- torch.use_deterministic_algorithms


@pytest.fixture
def atomic_backend(monkeypatch):
    """CPU tensors go to a backend that is not deterministic; what is launched is kept instead."""
    from msa_ext import _cuda_backward, backward, support

    launched = []
    backend = support.Backend("sm90", "a GPU", "bf16", ("bf16",), False, 9, ("90a",))
    monkeypatch.setattr(_runtime, "is_cuda", lambda device: True)
    monkeypatch.setattr(backward, "_cuda_backend", lambda device, name: backend)
    monkeypatch.setattr(_cuda_backward, "launch", lambda *arguments: launched.append(arguments))
    return launched


def test_atomic_backends_raise_under_deterministic_algorithms(data, atomic_backend):
    with _deterministic(warn_only=False), pytest.raises(RuntimeError, match="backend sm90 adds gradients atomically"):
        run_backward(*data.arguments())
    assert not atomic_backend
    with _deterministic(warn_only=True), pytest.warns(UserWarning, match="backend sm90 adds gradients atomically"):
        run_backward(*data.arguments())
    assert len(atomic_backend) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_backward(*data.arguments())
    assert len(atomic_backend) == 2
