"""The backward's schedule (key block -> its queries) and the block-aligned KV workspace.

Words: a *document* owns keys; an *entry* is a document, or a fragment of one, that owns queries; an *edge* is
(token, key block, index head); a *CSR row* is (entry, block); an *item* is a slice of a CSR row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from . import _runtime, _validate

BLOCK_KEYS = 128
MAX_ITEM_QUERIES = 4096
DEFAULT_GROUP = 16
_ITEM_MULTIPLE = 16  # of max_item_queries: items start at whole tasks of every group that kernels have


_Count = TypeVar("_Count", int, Tensor)


def ceil_to_block(n: _Count) -> _Count:
    """The next multiple of 128 at or above `n` (an int or an integer tensor)."""
    return (n + BLOCK_KEYS - 1) // BLOCK_KEYS * BLOCK_KEYS


@dataclass(frozen=True, eq=False)  # compared by identity: tensors have no truth value
class MSABackwardSchedule:
    """Which queries attend to which key block, as int32 tensors on one device.

    Attributes:
        row_ptr: `[Hkv, rows + 1]`, CSR offsets of each index head into `q_indices[h]`.
        q_indices: `[Hkv, edge_capacity]`, entry-local query indices, strictly ascending inside a row.
        scheduler_metadata: `[work_capacity, 6]`, items `(index_head, row, q_begin, q_count, entry,
            document_local_block)`; `q_begin` counts from the row's start.
        work_count: `[1]`, valid items; may exceed `work_capacity`, then the table is full.
        cu_seqlens: `[entries + 1]`, query offsets of the entries in the compact tensors.
        document_workspace_starts: `[entries]`, first workspace row of each entry's document.
        query_offsets: `[entries]` or None (zeros), position of an entry's first query in its document.

    Raises:
        TypeError: a field is not an int32 tensor.
        ValueError: a shape or device disagrees. Contents are checked by `validate` only.
    """

    row_ptr: Tensor
    q_indices: Tensor
    scheduler_metadata: Tensor
    work_count: Tensor
    cu_seqlens: Tensor
    document_workspace_starts: Tensor
    query_offsets: Tensor | None = None

    def __post_init__(self) -> None:
        for name, tensor in self.named_tensors():
            _validate.tensor(name, tensor, dtype=torch.int32)
        _validate.shape("row_ptr", self.row_ptr, ("Hkv", "rows + 1"))
        heads = self.row_ptr.shape[0]
        if heads < 1 or self.row_ptr.shape[1] < 1:
            raise ValueError(f"row_ptr: expected shape [Hkv >= 1, rows + 1 >= 1], got {list(self.row_ptr.shape)}")
        _validate.shape("q_indices", self.q_indices, (heads, "edge_capacity"))
        _validate.shape("scheduler_metadata", self.scheduler_metadata, ("work_capacity", 6))
        if self.work_capacity < 1:
            raise ValueError("scheduler_metadata: expected at least 1 row, got 0")
        _validate.shape("work_count", self.work_count, (1,))
        _validate.shape("cu_seqlens", self.cu_seqlens, ("entries + 1",))
        if self.cu_seqlens.shape[0] < 1:
            raise ValueError("cu_seqlens: expected shape [entries + 1 >= 1], got [0]")
        _validate.shape("document_workspace_starts", self.document_workspace_starts, (self.num_entries,))
        if self.query_offsets is not None:
            _validate.shape("query_offsets", self.query_offsets, (self.num_entries,))
        for name, tensor in self.named_tensors():
            _validate.device(name, tensor, self.row_ptr.device, "row_ptr's")
            if not tensor.is_contiguous():
                object.__setattr__(self, name, tensor.contiguous())

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """Name and tensor of every field that is there."""
        named = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return [(name, tensor) for name, tensor in named if tensor is not None or name != "query_offsets"]

    # Read on every call: worked out once, as the fields do not change.
    @cached_property
    def device(self) -> torch.device:
        return self.row_ptr.device

    @cached_property
    def num_kv_heads(self) -> int:
        return self.row_ptr.shape[0]

    @cached_property
    def num_rows(self) -> int:
        return self.row_ptr.shape[1] - 1

    @cached_property
    def edge_capacity(self) -> int:
        return self.q_indices.shape[1]

    @cached_property
    def work_capacity(self) -> int:
        return self.scheduler_metadata.shape[0]

    @cached_property
    def num_entries(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    def to(self, device: torch.device | str) -> MSABackwardSchedule:
        """The schedule with every tensor on `device`."""
        for name, tensor in self.named_tensors():
            _validate.tensor(name, tensor)
        return MSABackwardSchedule(**{name: tensor.to(device) for name, tensor in self.named_tensors()})

    def validate(
        self,
        *,
        num_tokens: int | None = None,
        workspace_rows: int | None = None,
        group: int = DEFAULT_GROUP,
    ) -> None:
        """Checks the contents, with one host synchronisation.

        Args:
            num_tokens: T of the compact tensors, if known.
            workspace_rows: W of the aligned workspace, if known.
            group: query heads a KV head; items start at multiples of 128/group, at least 8 and at most 16, as no
                kernel has smaller groups than 8.

        Raises:
            ValueError: naming the first offending entry of each kind of error.
        """
        _validate.contents("row_ptr", self.row_ptr)
        problems = _ContentCheck(self.to("cpu"), num_tokens, workspace_rows, group).problems()
        if problems:
            raise ValueError("schedule: " + "; ".join(problems))


def _first(bad: Tensor, describe: Callable[..., str]) -> list[str]:
    """The description of the first offence, if there is one."""
    index = bad.nonzero()
    return [describe(*index[0].tolist())] if index.numel() else []


def _entry_problems(
    cu: Tensor, starts: Tensor, offsets: Tensor, num_tokens: int | None, workspace_rows: int | None
) -> list[str]:
    """What is wrong with the entries, int64 on the CPU: the first offence of each kind."""
    lengths = cu.diff()
    found = [] if cu[0] == 0 else [f"cu_seqlens[0]: expected 0, got {cu[0]}"]
    found += _first(
        lengths < 0,
        lambda b: f"cu_seqlens[{b + 1}]: expected at least cu_seqlens[{b}] = {cu[b]}, got {cu[b + 1]}",
    )
    if num_tokens is not None and cu[-1] > num_tokens:
        found.append(f"cu_seqlens[-1]: expected at most T = {num_tokens}, got {cu[-1]}")
    found += _first(
        (starts < 0) | (starts % BLOCK_KEYS != 0),
        lambda b: f"document_workspace_starts[{b}]: expected a multiple of 128 at or above 0, got {starts[b]}",
    )
    found += _first(offsets < 0, lambda b: f"query_offsets[{b}]: expected a value at or above 0, got {offsets[b]}")
    # Entries with one start are fragments of one document, as long as its last query is far.
    ends = starts + ceil_to_block(torch.where(lengths > 0, offsets + lengths, 0))
    order = torch.argsort(starts, stable=True)
    sorted_starts = starts[order]
    running_end = torch.cummax(ends[order], 0).values
    overlap = (sorted_starts[1:] != sorted_starts[:-1]) & (sorted_starts[1:] < running_end[:-1])
    overlap &= lengths[order][1:] > 0
    found += _first(
        overlap,
        lambda i: (
            f"document_workspace_starts[{order[i + 1]}]: expected a start at or above {running_end[i]}, where "
            f"the document before it ends, got {sorted_starts[i + 1]}"
        ),
    )
    if workspace_rows is not None:
        found += _first(
            ends > workspace_rows,
            lambda b: (
                f"document_workspace_starts[{b}]: expected the document to end within W = "
                f"{workspace_rows}, got an end at {ends[b]}"
            ),
        )
    return found


def _check_entries(cu_seqlens: Tensor, starts: Tensor | None, offsets: Tensor | None, num_tokens: int) -> None:
    """Raises for the entries that `build_schedule` is given; reads them on the host."""
    cu = cu_seqlens.cpu().long()
    used = cu.diff() > 0
    if starts is None:  # tight: only cu_seqlens can be wrong
        padded = ceil_to_block(cu.diff().clamp_min(0))
        given = torch.cumsum(padded, 0) - padded
    else:
        given = starts.cpu().long()
    problems = _entry_problems(
        cu, given, torch.zeros_like(given) if offsets is None else offsets.cpu().long(), num_tokens, None
    )
    if not problems and offsets is None:
        values, counts = given[used].unique(return_counts=True)
        problems = _first(
            counts > 1,
            lambda i: (
                "document_workspace_starts: expected distinct starts where query_offsets is None (fragments of one "
                f"document share one and need their offsets), got {values[i]} {counts[i]} times"
            ),
        )
    if problems:
        raise ValueError("; ".join(problems))


class _ContentCheck:
    """Collects the first offence of each kind of a schedule on the CPU."""

    def __init__(self, schedule: MSABackwardSchedule, num_tokens: int | None, workspace_rows: int | None, group: int):
        self.s = schedule
        self.num_tokens = num_tokens
        self.workspace_rows = workspace_rows
        self.alignment = min(max(8, 128 // group), _ITEM_MULTIPLE)
        self.cu = schedule.cu_seqlens.long()
        self.lengths = self.cu.diff()
        self.starts = schedule.document_workspace_starts.long()
        offsets = schedule.query_offsets
        self.offsets = torch.zeros_like(self.starts) if offsets is None else offsets.long()
        self.found: list[str] = []

    def problems(self) -> list[str]:
        self.found += _entry_problems(self.cu, self.starts, self.offsets, self.num_tokens, self.workspace_rows)
        self._check_row_ptr()
        if not self.found:  # items are located through both
            self._check_items()
        return self.found

    def _first(self, bad: Tensor, describe: Callable[..., str]) -> None:
        self.found += _first(bad, describe)

    def _check_row_ptr(self) -> None:
        row_ptr = self.s.row_ptr.long()
        self._first(row_ptr[:, 0] != 0, lambda h: f"row_ptr[{h}, 0]: expected 0, got {row_ptr[h, 0]}")
        self._first(
            row_ptr.diff(dim=1) < 0,
            lambda h, r: (
                f"row_ptr[{h}, {r + 1}]: expected at least row_ptr[{h}, {r}] = {row_ptr[h, r]}, got {row_ptr[h, r + 1]}"
            ),
        )
        self._first(
            row_ptr[:, -1] > self.s.edge_capacity,
            lambda h: (
                f"row_ptr[{h}, -1]: expected at most edge_capacity = {self.s.edge_capacity}, got {row_ptr[h, -1]}"
            ),
        )

    def _check_items(self) -> None:
        s = self.s
        count = int(s.work_count)
        if count < 0:
            self.found.append(f"work_count[0]: expected a value at or above 0, got {count}")
            return
        items = s.scheduler_metadata[: min(count, s.work_capacity)].long()
        head, row, begin, size, entry, block = items.unbind(1)

        def check(column: str, bad: Tensor, expected: Callable[[int], str]) -> None:
            values = items[:, _ITEM_COLUMNS.index(column)]
            self._first(bad, lambda i: f"scheduler_metadata[{i}].{column}: expected {expected(i)}, got {values[i]}")

        def outside(values: Tensor, limit: int) -> Tensor:
            return (values < 0) | (values >= limit)

        before = len(self.found)
        check("index_head", outside(head, s.num_kv_heads), lambda i: f"a value in [0, Hkv = {s.num_kv_heads})")
        check("row", outside(row, s.num_rows), lambda i: f"a value in [0, rows = {s.num_rows})")
        check("entry", outside(entry, s.num_entries), lambda i: f"a value in [0, entries = {s.num_entries})")
        check(
            "q_begin",
            (begin < 0) | (begin % self.alignment != 0),
            lambda i: f"a multiple of {self.alignment} at or above 0",
        )
        check("q_count", (size < 1) | (size > MAX_ITEM_QUERIES), lambda i: f"a value in [1, {MAX_ITEM_QUERIES}]")
        if len(self.found) > before:
            return
        row_begin = s.row_ptr.long()[head, row]
        row_size = s.row_ptr.long()[head, row + 1] - row_begin
        check("q_count", begin + size > row_size, lambda i: f"q_begin + q_count within the row's {row_size[i]}")
        document_blocks = ceil_to_block(self.offsets + self.lengths)[entry] // BLOCK_KEYS
        check(
            "document_local_block",
            outside(block, 1 << 40) | (block >= document_blocks),
            lambda i: f"a block of entry {entry[i]} in [0, {document_blocks[i]})",
        )
        if len(self.found) > before:
            return
        self._check_disjoint(items)
        self._check_queries(items, row_begin)

    def _check_disjoint(self, items: Tensor) -> None:
        head, row, begin, size, entry, block = items.unbind(1)
        order = _lexicographic_order(head, row, begin)
        first, second = order[:-1], order[1:]
        same_row = (head[first] == head[second]) & (row[first] == row[second])
        self._first(
            same_row & (begin[first] + size[first] > begin[second]),
            lambda i: (
                f"scheduler_metadata[{second[i]}].q_begin: expected an item disjoint from item {first[i]} of "
                f"the same row, which ends at {begin[first[i]] + size[first[i]]}, got {begin[second[i]]}"
            ),
        )
        self._first(
            same_row & ((entry[first] != entry[second]) | (block[first] != block[second])),
            lambda i: (
                f"scheduler_metadata[{second[i]}]: expected the entry and block of item {first[i]}, which has the "
                f"same row, got entry {entry[second[i]]}, block {block[second[i]]}"
            ),
        )
        order = _lexicographic_order(head, entry, block, row)
        first, second = order[:-1], order[1:]
        same_block = (head[first] == head[second]) & (entry[first] == entry[second]) & (block[first] == block[second])
        self._first(
            same_block & (row[first] != row[second]),
            lambda i: (
                f"scheduler_metadata[{second[i]}].row: expected {row[first[i]]}, the row of entry "
                f"{entry[second[i]]}, block {block[second[i]]} in item {first[i]}, got {row[second[i]]}"
            ),
        )

    def _check_queries(self, items: Tensor, row_begin: Tensor) -> None:
        head, _, begin, size, entry, block = items.unbind(1)
        item = torch.repeat_interleave(torch.arange(items.shape[0], device="cpu"), size)
        within = torch.arange(item.shape[0], device="cpu") - (torch.cumsum(size, 0) - size)[item]
        offset = row_begin[item] + begin[item] + within
        query = self.s.q_indices[head[item], offset].long()

        def name(edge: int) -> str:
            return f"q_indices[{head[item[edge]]}, {offset[edge]}]"

        length = self.lengths[entry[item]]
        self._first(
            (query < 0) | (query >= length),
            lambda e: f"{name(e)}: expected a query of entry {entry[item[e]]} in [0, {length[e]}), got {query[e]}",
        )
        # A query's predecessor in its row, which may belong to the item before.
        has_previous = (begin[item] + within) > 0
        previous = self.s.q_indices[head[item], (offset - 1).clamp_min(0)].long()
        self._first(
            has_previous & (query <= previous),
            lambda e: f"{name(e)}: expected more than its predecessor {previous[e]}, got {query[e]}",
        )


_ITEM_COLUMNS = ["index_head", "row", "q_begin", "q_count", "entry", "document_local_block"]


def _lexicographic_order(*keys: Tensor) -> Tensor:
    """Indices that sort by the first key, then the second, and so on."""
    order = torch.arange(keys[0].shape[0], device=keys[0].device)
    for key in reversed(keys):
        order = order[torch.argsort(key[order], stable=True)]
    return order


def build_schedule(
    topk: Tensor,
    cu_seqlens: Tensor,
    *,
    document_workspace_starts: Tensor | None = None,
    query_offsets: Tensor | None = None,
    num_rows: int | None = None,
    edge_capacity: int | None = None,
    work_capacity: int | None = None,
    max_item_queries: int = MAX_ITEM_QUERIES,
) -> MSABackwardSchedule:
    """Builds the schedule from each token's selected blocks, with torch operations on `topk`'s device.

    On CUDA with `num_rows`, `edge_capacity` and `work_capacity` given it does not synchronise with the host and
    checks no contents: edges that do not fit are dropped, and `work_count` may exceed `work_capacity`. Otherwise bad
    contents of the entries and sizes that are too small raise.

    Args:
        topk: int32 `[Hkv, T, K]`, document-local block ids in any slot order; -1 = empty. Ids outside the document
            or wholly in the token's future are ignored, duplicates inside a token count once.
        cu_seqlens: int32 `[entries + 1]`, query offsets of the entries.
        document_workspace_starts: int32 `[entries]`, multiples of 128; default: documents packed tightly, which
            needs entries that are whole documents. Fragments of one document share a start; they need query_offsets.
        query_offsets: int32 `[entries]`, position of an entry's first query in its document; default 0.
        num_rows: CSR rows a head; default: the blocks of all entries.
        edge_capacity: edges a head; default T * K.
        work_capacity: items; default: as many as there are.
        max_item_queries: queries an item holds at most, a multiple of 16 in [16, 4096].

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    _validate.tensor("topk", topk, dtype=torch.int32)
    _validate.contents("topk", topk)
    _validate.shape("topk", topk, ("Hkv", "T", "K"))
    if topk.shape[0] < 1:
        raise ValueError(f"topk: expected shape [Hkv >= 1, T, K], got {list(topk.shape)}")
    device = topk.device
    _validate.tensor("cu_seqlens", cu_seqlens, dtype=torch.int32)
    _validate.shape("cu_seqlens", cu_seqlens, ("entries + 1",))
    _validate.device("cu_seqlens", cu_seqlens, device, "topk's")
    for name, tensor in (("document_workspace_starts", document_workspace_starts), ("query_offsets", query_offsets)):
        if tensor is not None:
            _validate.tensor(name, tensor, dtype=torch.int32)
            _validate.shape(name, tensor, (cu_seqlens.shape[0] - 1,))
            _validate.device(name, tensor, device, "topk's")
    if cu_seqlens.shape[0] < 1:
        raise ValueError("cu_seqlens: expected shape [entries + 1 >= 1], got [0]")
    if query_offsets is not None and document_workspace_starts is None:
        raise ValueError("document_workspace_starts: expected a tensor where query_offsets are given, got None")
    _validate.integer("max_item_queries", max_item_queries, _ITEM_MULTIPLE, MAX_ITEM_QUERIES)
    if max_item_queries % _ITEM_MULTIPLE:
        raise ValueError(f"max_item_queries: expected a multiple of 16, got {max_item_queries}")
    for name, size, low in (
        ("num_rows", num_rows, 0),
        ("edge_capacity", edge_capacity, 0),
        ("work_capacity", work_capacity, 1),
    ):
        if size is not None:
            _validate.integer(name, size, low, 2**31 - 1)

    heads, num_tokens, num_slots = topk.shape
    checked = not _runtime.is_cuda(device) or None in (num_rows, edge_capacity, work_capacity)
    if checked:
        _check_entries(cu_seqlens, document_workspace_starts, query_offsets, num_tokens)
    cu = cu_seqlens.long()
    num_entries = cu.shape[0] - 1
    lengths = cu.diff()
    offsets = torch.zeros_like(lengths) if query_offsets is None else query_offsets.long()
    if document_workspace_starts is None:
        padded = ceil_to_block(lengths)
        document_workspace_starts = (torch.cumsum(padded, 0) - padded).to(torch.int32)

    # Rows document-major: entry b owns rows [row_end[b] - row_count[b], row_end[b]).
    row_count = torch.where(lengths > 0, ceil_to_block(offsets + lengths) // BLOCK_KEYS, 0)
    row_end = torch.cumsum(row_count, 0)
    if num_rows is None:
        num_rows = int(row_end[-1]) if num_entries else 0
    elif checked and num_entries and num_rows < int(row_end[-1]):
        raise ValueError(f"num_rows: expected at least the entries' {int(row_end[-1])} blocks, got {num_rows}")
    if edge_capacity is None:
        edge_capacity = num_tokens * num_slots

    row_ptr, q_indices, num_edges = _build_csr(topk, cu, offsets, row_end - row_count, num_rows, edge_capacity)
    if checked and int(num_edges) > edge_capacity:
        raise ValueError(f"edge_capacity: expected at least {int(num_edges)} for a head's edges, got {edge_capacity}")
    items_of_row = (row_ptr.diff(dim=1) + max_item_queries - 1) // max_item_queries
    item_end = torch.cumsum(items_of_row.flatten(), 0)
    work_count = items_of_row.sum().reshape(1)
    if work_capacity is None:
        work_capacity = max(1, int(work_count))
    elif checked and int(work_count) > work_capacity:
        raise ValueError(f"work_capacity: expected at least {int(work_count)} for the items, got {work_capacity}")
    scheduler_metadata = torch.zeros(work_capacity, 6, dtype=torch.int64, device=device)
    if num_rows and num_entries:
        item = torch.arange(work_capacity, device=device)
        flat_row = torch.searchsorted(item_end, item, right=True).clamp_max(heads * num_rows - 1)
        head, row = flat_row // num_rows, flat_row % num_rows
        begin = (item - (item_end - items_of_row.flatten())[flat_row]) * max_item_queries
        count = (row_ptr.diff(dim=1).flatten()[flat_row] - begin).clamp_max(max_item_queries)
        entry = torch.searchsorted(row_end, row, right=True).clamp_max(num_entries - 1)
        block = row - (row_end - row_count)[entry]
        scheduler_metadata = torch.stack([head, row, begin, count, entry, block], dim=1)
    return MSABackwardSchedule(
        row_ptr=row_ptr.to(torch.int32),
        q_indices=q_indices,
        scheduler_metadata=scheduler_metadata.to(torch.int32),
        work_count=work_count.to(torch.int32),
        cu_seqlens=cu_seqlens,
        document_workspace_starts=document_workspace_starts,
        query_offsets=query_offsets,
    )


def _build_csr(
    topk: Tensor, cu: Tensor, offsets: Tensor, first_row: Tensor, num_rows: int, edge_capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`row_ptr` int64 `[Hkv, num_rows + 1]`, `q_indices` int32 `[Hkv, edge_capacity]`, and the most edges of a head."""
    heads, num_tokens, num_slots = topk.shape
    device = topk.device
    q_indices = torch.zeros(heads, edge_capacity, dtype=torch.int32, device=device)
    row_ptr = torch.zeros(heads, num_rows + 1, dtype=torch.int64, device=device)
    if topk.numel() == 0 or first_row.shape[0] == 0 or num_rows == 0:
        return row_ptr, q_indices, row_ptr.new_zeros(())

    token = torch.arange(num_tokens, device=device)
    entry = torch.searchsorted(cu[1:].contiguous(), token, right=True)
    in_entry = entry < first_row.shape[0]  # T may exceed cu_seqlens[-1]
    entry = entry.clamp_max(first_row.shape[0] - 1)
    own_block = (offsets[entry] + token - cu[entry]) // BLOCK_KEYS

    block = topk.sort(dim=2).values.long()
    used = (block >= 0) & (block <= own_block[:, None]) & in_entry[:, None]
    used[:, :, 1:] &= block[:, :, 1:] != block[:, :, :-1]
    row = first_row[entry][:, None] + block
    used &= row < num_rows
    # One key sorts edges by (row, token); unused edges last.
    key = torch.where(used, row * num_tokens + token[:, None], num_rows * num_tokens)
    key = key.reshape(heads, num_tokens * num_slots).sort(dim=1).values
    row, token = key // num_tokens, key % num_tokens
    counts = torch.zeros(heads, num_rows + 1, dtype=torch.int64, device=device)
    counts.scatter_add_(1, row, torch.ones_like(row))
    ends = torch.cumsum(counts[:, :num_rows], 1)
    row_ptr[:, 1:] = ends.clamp_max(edge_capacity)
    kept = min(edge_capacity, key.shape[1])
    local = token - cu[torch.searchsorted(cu[1:].contiguous(), token, right=True).clamp_max(cu.shape[0] - 2)]
    q_indices[:, :kept] = local[:, :kept].to(torch.int32)
    return row_ptr, q_indices, ends[:, -1].max()


def align_kv(x: Tensor, cu_seqlens_k: Tensor, starts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Copies packed keys or values into the block-aligned workspace; synchronises with the host.

    Args:
        x: `[Tk, Hkv, D]`, any dtype; rows past `cu_seqlens_k[-1]` are ignored.
        cu_seqlens_k: int32 `[documents + 1]`.
        starts: int32 `[documents]`, first workspace rows, multiples of 128, not overlapping; default: tight.

    Returns:
        `x_aligned` `[W, Hkv, D]`, zero in padding and gaps, and `starts` int32 `[documents]`.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    _validate.tensor("x", x)
    _validate.contents("x", x)
    _validate.shape("x", x, ("Tk", "Hkv", "D"))
    lengths = _document_lengths(x, cu_seqlens_k)
    padded = ceil_to_block(lengths)
    if starts is None:
        starts = (torch.cumsum(padded, 0) - padded).to(torch.int32)
    rows = _workspace_rows(cu_seqlens_k, starts, lengths)
    ends = starts.long() + padded
    order = torch.argsort(starts.long() * 2 + (lengths > 0))  # an empty document takes no room
    if bool((ends[order][:-1] > starts.long()[order][1:]).any()):
        raise ValueError(f"starts: expected documents that do not overlap, got {starts.tolist()}")
    num_rows = int(ends.max()) if lengths.numel() else 0
    aligned = torch.zeros(num_rows, *x.shape[1:], dtype=x.dtype, device=x.device)
    return aligned.index_copy(0, rows, x[: rows.shape[0]]), starts


def unalign_kv(x_aligned: Tensor, cu_seqlens_k: Tensor, starts: Tensor) -> Tensor:
    """The inverse of `align_kv`: packed rows `[cu_seqlens_k[-1], Hkv, D]` from the workspace `[W, Hkv, D]`.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    _validate.tensor("x_aligned", x_aligned)
    _validate.contents("x_aligned", x_aligned)
    _validate.shape("x_aligned", x_aligned, ("W", "Hkv", "D"))
    lengths = _document_lengths(None, cu_seqlens_k)
    rows = _workspace_rows(cu_seqlens_k, starts, lengths)
    if rows.numel() and int(rows.max()) >= x_aligned.shape[0]:
        raise ValueError(f"x_aligned: expected more than {int(rows.max())} rows, got {x_aligned.shape[0]}")
    return x_aligned[rows]


def _document_lengths(x: Tensor | None, cu_seqlens_k: Tensor) -> Tensor:
    _validate.tensor("cu_seqlens_k", cu_seqlens_k, dtype=torch.int32)
    _validate.contents("cu_seqlens_k", cu_seqlens_k)
    _validate.shape("cu_seqlens_k", cu_seqlens_k, ("documents + 1",))
    if x is not None:
        _validate.device("cu_seqlens_k", cu_seqlens_k, x.device, "x's")
    values = cu_seqlens_k.tolist()
    if not values or values[0] != 0 or any(a > b for a, b in zip(values, values[1:])):
        raise ValueError(f"cu_seqlens_k: expected non-decreasing offsets from 0, got {values}")
    if x is not None and values[-1] > x.shape[0]:
        raise ValueError(f"cu_seqlens_k[-1]: expected at most Tk = {x.shape[0]}, got {values[-1]}")
    return cu_seqlens_k.long().diff()


def _workspace_rows(cu_seqlens_k: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    """Workspace row of each packed row, int64 `[cu_seqlens_k[-1]]`."""
    _validate.tensor("starts", starts, dtype=torch.int32)
    _validate.shape("starts", starts, (lengths.shape[0],))
    _validate.device("starts", starts, cu_seqlens_k.device, "cu_seqlens_k's")
    if bool(((starts < 0) | (starts % BLOCK_KEYS != 0)).any()):
        raise ValueError(f"starts: expected multiples of 128 at or above 0, got {starts.tolist()}")
    token = torch.arange(int(cu_seqlens_k[-1]), device=starts.device)
    return token + torch.repeat_interleave(starts.long() - cu_seqlens_k.long()[:-1], lengths)
