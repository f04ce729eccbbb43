"""The CUDA pipeline and main kernels on a GPU: `pytest -m gpu`."""

import dataclasses
import random

import pytest
import torch

import cases
from msa_ext import _cuda, _runtime, debug, reference, support
from msa_ext.backward import run_backward
from msa_ext.testing import compare
from task_oracle import build_tasks

pytestmark = pytest.mark.gpu

LAYOUT_POISON = 0xA5


def _backends() -> list[str]:
    if not torch.cuda.is_available():
        return ["any"]
    capability = torch.cuda.get_device_capability()
    return [b.name for b in support.cuda_backends().values() if b.major in (0, capability[0])]


def _variants() -> list[tuple[str, str]]:
    """(backend, dq_accum) of everything built."""
    if not torch.cuda.is_available():
        return [("any", "fp32")]
    built = support.cuda_backends()
    return [(name, accum) for name in _backends() for accum in built[name].dq_accums]


def _expected(data: cases.CaseData):
    return reference.backward(*data.arguments(), compute_dtype=torch.float64)


def _poisoned(data: cases.CaseData, kv_grad_dtype=torch.bfloat16) -> dict[str, torch.Tensor]:
    nan = torch.nan
    return {
        "dq": torch.full(data.q.shape, nan, dtype=torch.bfloat16, device=data.q.device),
        "dk": torch.full(data.k_aligned.shape, nan, dtype=kv_grad_dtype, device=data.q.device),
        "dv": torch.full(data.k_aligned.shape, nan, dtype=kv_grad_dtype, device=data.q.device),
    }


def _check(data: cases.CaseData, backend: str, accum: str, **options) -> None:
    outputs = _poisoned(data, options.get("kv_grad_dtype", torch.bfloat16))
    got = run_backward(*data.arguments(), backend=backend, dq_accum=accum, **outputs, **options)
    compare.check_all(got, _expected(data), data.dead_rows, dq_accum=accum)


@pytest.mark.parametrize("variant", _variants(), ids="-".join)
@pytest.mark.parametrize("case", cases.corner_cases(), ids=lambda c: c.name)
def test_corner_case(case, variant):
    _check(cases.make(case, seed=3, device="cuda"), *variant)
    expected = {"work_count_clamped"} if case.overcount else set()
    assert debug.last_flags() == expected


@pytest.mark.parametrize("variant", _variants(), ids="-".join)
@pytest.mark.parametrize(
    "name",
    ["length_129", "mixed_heads_2", "group_8", "shared_fragments", "all_choose_block_0", "extra_tokens", "everything"],
)
def test_data_from_the_host(name, variant):
    """No torch kernel writes what ours read, so that initcheck can follow every byte while it watches ours alone."""
    data = cases.make(cases.CASES[name], seed=4)
    tensors = {n: getattr(data, n).cuda() for n in ("q", "k_aligned", "v_aligned", "grad_out", "lse", "out")}
    moved = dataclasses.replace(data, schedule=data.schedule.to("cuda"), **tensors)
    backend, accum = variant
    got = run_backward(*moved.arguments(), backend=backend, dq_accum=accum)
    compare.check_all(tuple(x.cpu() for x in got), _expected(data), data.dead_rows, dq_accum=accum)


@pytest.mark.parametrize("backend", _backends())
def test_float32_kv_gradients(backend):
    _check(cases.make(cases.CASES["gaps"], device="cuda"), backend, "fp32", kv_grad_dtype=torch.float32)


def _packed(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same values as views of one packed allocation, heads concatenated."""
    whole = torch.cat(tensors, dim=1)
    views, first = [], 0
    for tensor in tensors:
        views.append(whole[:, first : first + tensor.shape[1]])
        first += tensor.shape[1]
    return views


@pytest.mark.parametrize("backend", _backends())
def test_strided_and_misaligned_operands(backend):
    data = cases.make(cases.CASES["mixed_heads_2"], device="cuda")
    data.q, data.grad_out = _packed([data.q, data.grad_out])
    data.k_aligned, data.v_aligned = _packed([data.k_aligned, data.v_aligned])
    assert not data.q.is_contiguous()
    _check(data, backend, "fp32")
    shifted = torch.empty(data.out.numel() + 1, dtype=torch.bfloat16, device="cuda")[1:].view(data.out.shape)
    shifted.copy_(data.grad_out)
    data.grad_out = shifted
    data.lse = data.lse.T.contiguous().T
    _check(data, backend, "fp32")
    data.grad_out = torch.ones(1, 1, 1, dtype=torch.bfloat16, device="cuda").expand(data.q.shape)
    _check(data, backend, "fp32")


@pytest.mark.parametrize("backend", _backends())
def test_huge_storage_offset(backend):
    data = cases.make(cases.CASES["length_257"], device="cuda")
    offset = 2**31 + 64
    storage = torch.empty(offset + data.grad_out.numel(), dtype=torch.bfloat16, device="cuda")
    far = storage[offset:].view(data.grad_out.shape)
    far.copy_(data.grad_out)
    data.grad_out = far
    _check(data, backend, "fp32")


def _random_case(seed: int) -> cases.Case:
    draw = random.Random(seed)
    documents = tuple(draw.choice((0, 1, 7, 100, 128, 129, 300, 700)) for _ in range(draw.randint(1, 6)))
    return cases.Case(
        f"fuzz_{seed}",
        documents,
        num_kv_heads=draw.choice((1, 2, 4)),
        group=draw.choice((16, 8)),
        topk=draw.choice((1, 3, 16)),
        selection=draw.choice(("uniform", "dirty", "own", "first")),
        gap_blocks=draw.choice((0, 0, 2)),
        extra_tokens=draw.choice((0, 0, 5)),
        permute_items=draw.random() < 0.5,
        level_major_rows=draw.random() < 0.5,
        max_item_queries=draw.choice((16, 128, 4096)),
    )


@pytest.mark.parametrize("backend", _backends())
def test_fuzz(backend, fuzz_seed):
    data = cases.make(_random_case(fuzz_seed), seed=fuzz_seed, device="cuda")
    accum = random.Random(fuzz_seed).choice(support.cuda_backends()[backend].dq_accums)
    _check(data, backend, accum)


# ---- task build --------------------------------------------------------------------------------


def _build_tasks(data: cases.CaseData, backend: str = "simple"):
    """(headers, tokens, walk) that the device builds."""
    captured = {}
    original = _runtime.workspace

    def capture(total_bytes, sections, device):
        captured["sections"] = {name: (offset, size) for name, offset, size in sections}
        captured["tensor"] = original(total_bytes, sections, device).fill_(LAYOUT_POISON)
        return captured["tensor"]

    _runtime.workspace = capture
    try:
        run_backward(*data.arguments(), backend=backend)
    finally:
        _runtime.workspace = original

    def section(name: str) -> torch.Tensor:
        offset, size = captured["sections"][name]
        return captured["tensor"][offset : offset + size].view(torch.int32).cpu()

    walk = section("descriptor")[:5].tolist()
    slots = 128 // (data.q.shape[1] // data.k_aligned.shape[1])
    headers = section("task_headers").view(-1, 4)[: walk[0]]
    tokens = section("task_tokens").view(-1, slots)[: walk[0]]
    return headers, tokens, walk


@pytest.mark.parametrize(
    "case", [c for c in cases.corner_cases() if c.documents and c.selection != "none"], ids=lambda c: c.name
)
def test_task_table_matches_the_oracle(case):
    data = cases.make(case, device="cuda")
    headers, tokens, walk = _build_tasks(data)
    expected_headers, expected_tokens = build_tasks(data.schedule, case.group, window_log2=9)
    assert walk[0] == len(expected_headers)
    assert headers.tolist() == [list(header) for header in expected_headers]
    assert tokens.tolist() == expected_tokens


def test_task_table_does_not_depend_on_the_order_of_items():
    data = cases.make(cases.CASES["length_2177"], device="cuda")
    first = _build_tasks(data)
    items = data.schedule.scheduler_metadata[: int(data.schedule.work_count)]
    for seed in range(20):
        order = torch.randperm(len(items), generator=torch.Generator().manual_seed(seed)).cuda()
        data.schedule = dataclasses.replace(data.schedule, scheduler_metadata=items[order])
        headers, tokens, walk = _build_tasks(data)
        assert walk == first[2] and torch.equal(headers, first[0]) and torch.equal(tokens, first[1])


CORRUPTIONS = {
    "index_head": ("bad_item", "scheduler_metadata", 0, 7),
    "row": ("bad_item", "scheduler_metadata", 1, -1),
    "row_far": ("bad_item", "scheduler_metadata", 1, 2**31 - 1),
    "q_begin": ("bad_item", "scheduler_metadata", 2, 3),
    "q_begin_far": ("bad_row_pointer", "scheduler_metadata", 2, 2**31 - 128),
    "q_count": ("bad_item", "scheduler_metadata", 3, 5000),
    "q_count_long": ("bad_row_pointer", "scheduler_metadata", 3, 4096),
    "entry": ("bad_item", "scheduler_metadata", 4, 99),
    "block": ("bad_item", "scheduler_metadata", 5, 2**30),
    "query": ("bad_query_index", "q_indices", 3, 2**31 - 1),
    "query_negative": ("bad_query_index", "q_indices", 3, -5),
    "row_ptr": ("bad_row_pointer", "row_ptr", 1, 2**31 - 1),
    "row_ptr_negative": ("bad_row_pointer", "row_ptr", 0, -4),
    "cu_seqlens": ("bad_item", "cu_seqlens", 1, 2**31 - 1),
    "start": ("bad_item", "document_workspace_starts", 0, 2**31 - 128),
    "work_count": ("bad_item", "work_count", 0, -3),
}


@pytest.mark.parametrize("backend", _backends())
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_corrupted_schedule_is_skipped_and_reported(name, backend, monkeypatch):
    flag, field, index, value = CORRUPTIONS[name]
    data = cases.make(cases.CASES["length_257"], device="cuda")
    tensor = getattr(data.schedule, field).clone()
    tensor.view(-1)[index] = value
    data.schedule = dataclasses.replace(data.schedule, **{field: tensor})
    gradients = run_backward(*data.arguments(), backend=backend)
    assert flag in debug.last_flags()
    assert all(torch.isfinite(x).all() for x in gradients)
    monkeypatch.setattr(_cuda, "CHECK", True)
    with pytest.raises(ValueError, match=f"schedule: expected valid contents, got .*{flag}"):
        run_backward(*data.arguments(), backend=backend)


@pytest.mark.parametrize("backend", _backends())
def test_more_tasks_than_the_table_holds_are_dropped_and_reported(backend):
    data = cases.make(cases.CASES["length_2177"], device="cuda")
    items = data.schedule.scheduler_metadata[: int(data.schedule.work_count)]
    longest = items[items[:, 3].argmax()].repeat(len(items), 1)  # overlapping items: more tasks than edges allow
    data.schedule = dataclasses.replace(data.schedule, scheduler_metadata=longest)
    gradients = run_backward(*data.arguments(), backend=backend)
    assert debug.last_flags() == {"task_overflow"}
    assert all(torch.isfinite(x).all() for x in gradients)


@pytest.mark.parametrize("backend", _backends())
def test_check_mode_passes_on_good_input(backend, monkeypatch):
    monkeypatch.setattr(_cuda, "CHECK", True)
    for name in ("everything", "overcount"):
        _check(cases.make(cases.CASES[name], device="cuda"), backend, "fp32")


# ---- streams, graphs, devices ------------------------------------------------------------------


@pytest.mark.parametrize("backend", _backends())
def test_no_host_synchronisation(backend):
    data = cases.make(cases.CASES["length_257"], device="cuda")
    run_backward(*data.arguments(), backend=backend)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_backward(*data.arguments(), backend=backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", _backends())
def test_graph_replay_with_new_data_and_schedule(backend):
    case = cases.CASES["permuted_items"]
    first, second = (cases.make(case, seed=seed, device="cuda") for seed in (1, 2))
    sparse = cases.make(dataclasses.replace(case, selection="own"), seed=3, device="cuda")
    # Equal shapes, other counts.
    capacity = max(d.schedule.work_capacity for d in (first, second, sparse))
    for data in (first, second, sparse):
        items = data.schedule.scheduler_metadata
        padded = torch.nn.functional.pad(items, (0, 0, 0, capacity - len(items)), value=-7)
        data.schedule = dataclasses.replace(data.schedule, scheduler_metadata=padded)
    static = first
    run_backward(*static.arguments(), backend=backend)
    outputs = _poisoned(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_backward(*static.arguments(), backend=backend, dq_accum="fp32", **outputs)
    for data in (second, sparse):
        expected = _expected(data)
        for name in ("q", "k_aligned", "v_aligned", "grad_out", "lse", "out"):
            getattr(static, name).copy_(getattr(data, name))
        for field in dataclasses.fields(static.schedule):
            source = getattr(data.schedule, field.name)
            if source is not None:
                getattr(static.schedule, field.name).copy_(source)
        for output in outputs.values():
            output.fill_(torch.nan)
        graph.replay()
        compare.check_all(tuple(outputs.values()), expected, data.dead_rows)


@pytest.mark.parametrize("backend", _backends())
def test_two_streams_at_once(backend):
    data = [cases.make(cases.CASES["length_2177"], seed=seed, device="cuda") for seed in (1, 2)]
    expected = [_expected(d) for d in data]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in data]
    results = []
    for stream, d in zip(streams, data):
        with torch.cuda.stream(stream):
            results.append(run_backward(*d.arguments(), backend=backend, dq_accum="fp32"))
    torch.cuda.synchronize()
    for result, reference_gradients, d in zip(results, expected, data):
        compare.check_all(result, reference_gradients, d.dead_rows)


@pytest.mark.parametrize("backend", _backends())
def test_second_device_current(backend):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    data = cases.make(cases.CASES["length_257"], device="cuda:0")
    with torch.cuda.device(1):
        _check(data, backend, "fp32")
        assert torch.cuda.current_device() == 1


# ---- sizes -------------------------------------------------------------------------------------


def _gpu_forward(q, k, v, schedule, scale):
    return reference.forward(q, k, v, schedule, softmax_scale=scale)


@pytest.mark.parametrize("name", [c.name for c in cases.benchmark_cases() if "rank" in c.tags])
def test_ranks_of_real_packs_against_the_simple_backend(name):
    backends = [b for b in _backends() if b != "simple"]
    if not backends:
        pytest.skip("no tuned backend is built for this device")
    data = cases.make(cases.CASES[name], device="cuda", forward=_gpu_forward)
    expected = run_backward(*data.arguments(), backend="simple", kv_grad_dtype=torch.float32)
    for backend in backends:
        got = run_backward(*data.arguments(), backend=backend, dq_accum="fp32")
        compare.check_all(got, tuple(x.double() for x in expected), data.dead_rows, tolerance=5e-3)


@pytest.mark.parametrize("backend", [b for b in _backends() if b != "simple"] or ["simple"])
def test_offsets_past_two_to_the_31(backend):
    """T = 300,000 tokens of 64 heads: dq has 2.46e9 elements. Rows at both ends are checked."""
    case = cases.Case("huge", (298_000, 2_000), num_kv_heads=4, topk=2)
    data = cases.make(case, device="cuda", forward=_gpu_forward)
    dq, dk, dv = run_backward(*data.arguments(), backend=backend)
    assert dq.numel() > 2**31
    # The last document alone is a small problem of its own.
    part = slice(298_000, 300_000)
    start = data.document_workspace_starts[1]
    rows = slice(start, start + 2048)
    alone = cases.CaseData(
        data.q[part], data.k_aligned[rows], data.v_aligned[rows], data.grad_out[part], data.lse[part],
        data.out[part], cases.build_schedule(data.topk[:, part].contiguous(), torch.tensor([0, 2000], dtype=torch.int32, device="cuda")),
        data.topk[:, part], [0, 2000], [0], [0], data.softmax_scale,
    )  # fmt: skip
    compare.check_all((dq[part], dk[rows], dv[rows]), _expected(alone), alone.dead_rows, dq_accum="bf16")
    assert torch.isfinite(dq).all() and (dq[:128] != 0).any()


def test_a_million_tokens_in_one_document():
    """Only the task build: one index head's table of 1,000,000 tokens x 16 blocks."""
    case = cases.Case("million", (1_000_000,), num_kv_heads=1, group=8)
    own = torch.arange(1_000_000, device="cuda") // 128
    topk = (own[None, :, None] - 61 * torch.arange(16, device="cuda")).to(torch.int32)
    schedule = cases.build_schedule(topk.contiguous(), torch.tensor([0, 1_000_000], dtype=torch.int32, device="cuda"))
    q = torch.zeros(1_000_000, 8, 128, dtype=torch.bfloat16, device="cuda")
    k = torch.zeros(1_000_064, 1, 128, dtype=torch.bfloat16, device="cuda")
    lse = torch.zeros(1_000_000, 8, device="cuda")
    data = cases.CaseData(q, k, k, q, lse, q, schedule, topk, [0, 1_000_000], [0], [0], 0.1)
    headers, tokens, walk = _build_tasks(data, _backends()[-1])
    assert debug.last_flags() == set()
    valid = tokens[tokens >= 0]
    assert valid.numel() == int(schedule.row_ptr[0, -1]) and walk[0] == len(headers)
    blocks, counts = headers[:, 0], headers[:, 3]
    assert torch.equal((tokens >= 0).sum(1), counts.long())
    per_block = torch.zeros(case.documents[0] // 128 + 1, dtype=torch.int64)
    per_block.index_add_(0, blocks.long(), counts.long())
    assert torch.equal(per_block, schedule.row_ptr[0].cpu().long().diff())
