"""build_schedule against a brute-force builder, and MSABackwardSchedule's checks."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import cases
from msa_ext import _runtime
from msa_ext.backward import run_backward
from msa_ext.schedule import MSABackwardSchedule, build_schedule


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@st.composite
def _packs(draw):
    """(topk, cu_seqlens, starts, offsets or None, max_item_queries) with dirty ids."""
    lengths = draw(st.lists(st.integers(0, 300), min_size=0, max_size=4))
    offsets = draw(st.none() | st.lists(st.integers(0, 300), min_size=len(lengths), max_size=len(lengths)))
    heads, slots, extra = draw(st.integers(1, 2)), draw(st.integers(1, 5)), draw(st.integers(0, 3))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths) + extra
    topk = torch.randint(-2, 6, (heads, num_tokens, slots), generator=generator, dtype=torch.int32)
    topk[torch.rand(topk.shape, generator=generator) < 0.05] = 2**31 - 1
    starts, row = [], 0
    for length, offset in zip(lengths, offsets or [0] * len(lengths)):
        starts.append(row)
        row += (offset + length + 127) // 128 * 128
    cu = [0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()]
    return (
        topk,
        int32(cu),
        int32(starts),
        None if offsets is None else int32(offsets),
        draw(st.sampled_from((16, 48, 4096))),
    )


def _brute_force_edges(topk, cu, offsets) -> set[tuple[int, int, int, int]]:
    """(head, entry, block, local query) of every edge that counts."""
    edges = set()
    for head in range(topk.shape[0]):
        for b in range(len(cu) - 1):
            for token in range(int(cu[b]), int(cu[b + 1])):
                query = token - int(cu[b])
                position = query + (0 if offsets is None else int(offsets[b]))
                for block in topk[head, token].tolist():
                    if block >= 0 and 128 * block <= position:
                        edges.add((head, b, block, query))
    return edges


def _edges(schedule: MSABackwardSchedule) -> list[tuple[int, int, int, int]]:
    count = min(int(schedule.work_count), schedule.work_capacity)
    edges = []
    for head, row, begin, size, entry, block in schedule.scheduler_metadata[:count].tolist():
        first = int(schedule.row_ptr[head, row]) + begin
        queries = schedule.q_indices[head, first : first + size].tolist()
        edges += [(head, entry, block, query) for query in queries]
    return edges


@settings(max_examples=60, deadline=None)
@given(_packs())
def test_content_matches_brute_force(pack):
    topk, cu, starts, offsets, max_item_queries = pack
    schedule = build_schedule(
        topk, cu, document_workspace_starts=starts, query_offsets=offsets, max_item_queries=max_item_queries
    )
    schedule.validate(num_tokens=topk.shape[1])
    edges = _edges(schedule)
    assert len(edges) == len(set(edges))
    assert set(edges) == _brute_force_edges(topk, cu, offsets)
    assert int(schedule.scheduler_metadata[:, 3].max()) <= max_item_queries


class _NoHostSync(TorchDispatchMode):
    """Fails on operations whose result shape or value needs the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2"), name
        return func(*args, **(kwargs or {}))


def test_no_host_synchronisation_with_sizes_given(monkeypatch):
    monkeypatch.setattr(_runtime, "is_cuda", lambda device: True)
    topk = torch.randint(-1, 3, (2, 300, 4), dtype=torch.int32)
    sizes = {"num_rows": 5, "edge_capacity": 1200, "work_capacity": 32}
    with _NoHostSync():
        schedule = build_schedule(topk, int32([0, 130, 300]), **sizes)
    schedule.validate()
    assert sorted(_edges(schedule)) == sorted(_edges(build_schedule(topk, int32([0, 130, 300]))))


def test_capacities_that_are_too_small_clamp_on_cuda(monkeypatch):
    monkeypatch.setattr(_runtime, "is_cuda", lambda device: True)
    topk = torch.zeros(1, 100, 1, dtype=torch.int32)
    schedule = build_schedule(topk, int32([0, 100]), num_rows=1, edge_capacity=40, work_capacity=1, max_item_queries=16)
    assert schedule.edge_capacity == 40 and int(schedule.row_ptr[0, 1]) == 40
    assert int(schedule.work_count) == 3 and schedule.work_capacity == 1
    schedule.validate()


def test_level_major_and_permuted_schedules_hold_the_same_edges():
    base = dataclasses.replace(cases.CASES["level_major"], level_major_rows=False)
    plain, relabelled = cases.make(base), cases.make(cases.CASES["level_major"])
    assert sorted(_edges(plain.schedule)) == sorted(_edges(relabelled.schedule))


def _schedule(**changes) -> MSABackwardSchedule:
    """A valid schedule of one 200-token document with two items, fields replaced."""
    fields = {
        "row_ptr": int32([[0, 9, 12]]),
        "q_indices": int32([[0, 1, 2, 3, 4, 5, 6, 7, 150, 130, 140, 199, 77]]),
        "scheduler_metadata": int32([[0, 0, 0, 8, 0, 0], [0, 0, 8, 1, 0, 0], [0, 1, 0, 3, 0, 1]]),
        "work_count": int32([3]),
        "cu_seqlens": int32([0, 200]),
        "document_workspace_starts": int32([128]),
        "query_offsets": int32([0]),
    }
    return MSABackwardSchedule(**{**fields, **changes})


def test_valid_schedule_passes_and_moves():
    _schedule().validate(num_tokens=200, workspace_rows=384)
    assert _schedule().to("cpu").num_rows == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        _schedule().row_ptr = None


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"row_ptr": [0]}, TypeError, r"row_ptr: expected a torch.Tensor, got list"),
        (
            {"q_indices": torch.zeros(1, 13)},
            TypeError,
            r"q_indices: expected dtype torch.int32, got torch.float32",
        ),
        ({"row_ptr": int32([0, 1])}, ValueError, r"row_ptr: expected shape \[Hkv, rows \+ 1\], got \[2\]"),
        ({"q_indices": int32([[0], [0]])}, ValueError, r"q_indices: expected shape \[1, edge_capacity\], got \[2, 1\]"),
        (
            {"scheduler_metadata": int32([[0] * 5])},
            ValueError,
            r"scheduler_metadata: expected shape \[work_capacity, 6\], got \[1, 5\]",
        ),
        (
            {"scheduler_metadata": torch.zeros(0, 6, dtype=torch.int32)},
            ValueError,
            r"scheduler_metadata: expected at least 1 row, got 0",
        ),
        ({"work_count": int32([1, 2])}, ValueError, r"work_count: expected shape \[1\], got \[2\]"),
        ({"document_workspace_starts": int32([0, 0])}, ValueError, r"document_workspace_starts: expected shape \[1\]"),
        ({"query_offsets": int32([])}, ValueError, r"query_offsets: expected shape \[1\], got \[0\]"),
        ({"cu_seqlens": int32([])}, ValueError, r"cu_seqlens: expected shape"),
        ({"work_count": torch.zeros(1, dtype=torch.int32, device="meta")}, ValueError, r"work_count: expected row_ptr's device cpu, got meta"),
    ],
)  # fmt: skip
def test_construction_rejects(changes, error, message):
    with pytest.raises(error, match=message):
        _schedule(**changes)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"cu_seqlens": int32([1, 200])}, r"cu_seqlens\[0\]: expected 0, got 1"),
        ({"cu_seqlens": int32([0, -1])}, r"cu_seqlens\[1\]: expected at least cu_seqlens\[0\] = 0, got -1"),
        ({"cu_seqlens": int32([0, 201])}, r"cu_seqlens\[-1\]: expected at most T = 200, got 201"),
        ({"document_workspace_starts": int32([64])}, r"document_workspace_starts\[0\]: expected a multiple of 128"),
        ({"document_workspace_starts": int32([256])}, r"expected the document to end within W = 384, got an end at 512"),
        ({"query_offsets": int32([-1])}, r"query_offsets\[0\]: expected a value at or above 0, got -1"),
        ({"row_ptr": int32([[1, 9, 12]])}, r"row_ptr\[0, 0\]: expected 0, got 1"),
        ({"row_ptr": int32([[0, 9, 8]])}, r"row_ptr\[0, 2\]: expected at least row_ptr\[0, 1\] = 9, got 8"),
        ({"row_ptr": int32([[0, 9, 14]])}, r"row_ptr\[0, -1\]: expected at most edge_capacity = 13, got 14"),
        ({"work_count": int32([-1])}, r"work_count\[0\]: expected a value at or above 0, got -1"),
        ({"scheduler_metadata": int32([[1, 0, 0, 8, 0, 0]])}, r"scheduler_metadata\[0\].index_head: expected a value in \[0, Hkv = 1\), got 1"),
        ({"scheduler_metadata": int32([[0, 2, 0, 8, 0, 0]])}, r"scheduler_metadata\[0\].row: .* got 2"),
        ({"scheduler_metadata": int32([[0, 0, 4, 1, 0, 0]])}, r"scheduler_metadata\[0\].q_begin: expected a multiple of 8 at or above 0, got 4"),
        ({"scheduler_metadata": int32([[0, 0, 0, 0, 0, 0]])}, r"scheduler_metadata\[0\].q_count: expected a value in \[1, 4096\], got 0"),
        ({"scheduler_metadata": int32([[0, 0, 8, 2, 0, 0]])}, r"q_count: expected q_begin \+ q_count within the row's 9, got 2"),
        ({"scheduler_metadata": int32([[0, 0, 0, 8, 1, 0]])}, r"scheduler_metadata\[0\].entry: .* got 1"),
        ({"scheduler_metadata": int32([[0, 0, 0, 8, 0, 2]])}, r"document_local_block: expected a block of entry 0 in \[0, 2\), got 2"),
        ({"scheduler_metadata": int32([[0, 0, 0, 9, 0, 0], [0, 0, 8, 1, 0, 0]])}, r"expected an item disjoint from item 0"),
        ({"scheduler_metadata": int32([[0, 0, 0, 8, 0, 0], [0, 0, 8, 1, 0, 1]])}, r"expected the entry and block of item 0"),
        ({"scheduler_metadata": int32([[0, 0, 0, 8, 0, 0], [0, 1, 0, 3, 0, 0]])}, r"scheduler_metadata\[1\].row: expected 0"),
        ({"q_indices": int32([[0, 1, 2, 3, 4, 5, 6, 7, 200, 130, 140, 199, 77]])}, r"q_indices\[0, 8\]: expected a query of entry 0 in \[0, 200\), got 200"),
        ({"q_indices": int32([[0, 1, 2, 3, 4, 5, 6, 7, 7, 130, 140, 199, 77]])}, r"q_indices\[0, 8\]: expected more than its predecessor 7, got 7"),
        (
            {"cu_seqlens": int32([0, 100, 200]), "document_workspace_starts": int32([0, 0]), "query_offsets": int32([0, 300])},
            r"expected the document to end within W = 384",
        ),
        (
            {"cu_seqlens": int32([0, 190, 200]), "document_workspace_starts": int32([0, 128]), "query_offsets": int32([0, 0])},
            r"document_workspace_starts\[1\]: expected a start at or above 256",
        ),
    ],
)  # fmt: skip
def test_validate_rejects(changes, message):
    changes.setdefault("work_count", int32([min(3, len(changes.get("scheduler_metadata", [0] * 3)))]))
    schedule = _schedule(**changes)
    with pytest.raises(ValueError, match=message):
        schedule.validate(num_tokens=200, workspace_rows=384)


def test_validate_reports_one_offence_of_each_kind():
    schedule = _schedule(cu_seqlens=int32([1, 200]), query_offsets=int32([-3]))
    with pytest.raises(ValueError, match=r"cu_seqlens\[0\].*; query_offsets\[0\]"):
        schedule.validate()


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"topk": torch.zeros(1, 4, 1)}, TypeError, r"topk: expected dtype torch.int32, got torch.float32"),
        ({"topk": int32([[0]])}, ValueError, r"topk: expected shape \[Hkv, T, K\], got \[1, 1\]"),
        ({"cu_seqlens": [0, 4]}, TypeError, r"cu_seqlens: expected a torch.Tensor, got list"),
        ({"cu_seqlens": int32([])}, ValueError, r"cu_seqlens: expected shape"),
        ({"document_workspace_starts": int32([0, 0])}, ValueError, r"document_workspace_starts: expected shape \[1\]"),
        ({"query_offsets": int32([5])}, ValueError, r"document_workspace_starts: expected a tensor where query_offsets"),
        ({"max_item_queries": 24}, ValueError, r"max_item_queries: expected a multiple of 16, got 24"),
        ({"max_item_queries": 8192}, ValueError, r"max_item_queries: expected a value in \[16, 4096\], got 8192"),
        ({"max_item_queries": 16.0}, TypeError, r"max_item_queries: expected an int, got float"),
        ({"num_rows": -1}, ValueError, r"num_rows: expected a value in"),
        ({"edge_capacity": -1}, ValueError, r"edge_capacity: expected a value in"),
        ({"work_capacity": 0}, ValueError, r"work_capacity: expected a value in"),
        ({"cu_seqlens": int32([0, 5])}, ValueError, r"cu_seqlens\[-1\]: expected at most T = 4, got 5"),
        ({"cu_seqlens": int32([1, 4])}, ValueError, r"cu_seqlens\[0\]: expected 0, got 1"),
        ({"cu_seqlens": int32([0, 3, 2])}, ValueError, r"cu_seqlens\[2\]: expected at least cu_seqlens\[1\] = 3, got 2"),
        ({"document_workspace_starts": int32([64])}, ValueError, r"document_workspace_starts\[0\]: expected a multiple of 128"),
        ({"cu_seqlens": int32([0, 2, 4]), "document_workspace_starts": int32([128, 128])}, ValueError, r"document_workspace_starts: expected distinct starts where query_offsets is None .*, got 128 2 times"),
        ({"num_rows": 0, "edge_capacity": 4, "work_capacity": 1}, ValueError, r"num_rows: expected at least the entries' 1 blocks, got 0"),
        ({"num_rows": 1, "edge_capacity": 3, "work_capacity": 1}, ValueError, r"edge_capacity: expected at least 4 .*, got 3"),
        ({"num_rows": 2, "edge_capacity": 20, "work_capacity": 1, "max_item_queries": 16, "topk": torch.zeros(1, 20, 1, dtype=torch.int32), "cu_seqlens": int32([0, 20])}, ValueError, r"work_capacity: expected at least 2 for the items, got 1"),
        ({"topk": torch.zeros(1, 4, 1, dtype=torch.int32, device="meta")}, NotImplementedError, r"topk: expected a CPU or CUDA device, got meta"),
        ({"topk": torch.zeros(1, 4, 1, dtype=torch.int32).to_sparse()}, ValueError, r"topk: expected a dense tensor \(torch.strided\), got torch.sparse_coo"),
        ({"cu_seqlens": int32([0, 4]).to_sparse()}, ValueError, r"cu_seqlens: expected a dense tensor"),
    ],
)  # fmt: skip
def test_build_rejects(changes, error, message):
    arguments = {"topk": torch.zeros(1, 4, 1, dtype=torch.int32), "cu_seqlens": int32([0, 4])}
    with pytest.raises(error, match=message):
        build_schedule(**{**arguments, **changes})


def test_fragments_share_a_start_and_empty_entries_take_none():
    topk = torch.zeros(1, 4, 1, dtype=torch.int32)
    starts = int32([0, 0, 0])
    build_schedule(topk, int32([0, 2, 2, 4]), document_workspace_starts=starts, query_offsets=int32([0, 2, 2]))
    build_schedule(topk, int32([0, 4, 4, 4]), document_workspace_starts=starts)


def test_schedules_compare_by_identity():
    first, second = _schedule(), _schedule()
    assert first == first and first != second and len({first, second}) == 2


@pytest.mark.parametrize("group", (1, 2, 4, 8, 16))
def test_run_backward_takes_every_item_length(group):
    data = cases.make(dataclasses.replace(cases.CASES["length_129"], group=group, max_item_queries=48))
    assert int(data.schedule.work_count) > 3
    run_backward(*data.arguments())
