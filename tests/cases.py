"""Named cases, one list for every test and benchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from msa_ext import reference
from msa_ext.packs import load_packs
from msa_ext.schedule import MSABackwardSchedule, build_schedule, ceil_to_block
from msa_ext.testing.oracle import Problem

HEAD_DIM = 128


@dataclass(frozen=True)
class Case:
    """What to compute. `fragments` are `(document, first query, end query)`; default: every whole document.

    `selection`: "uniform" (own block plus uniformly drawn earlier ones), "own" (only the own block), "none" (all -1),
    "first" (every token chooses block 0), "dirty" (uniform with -1, duplicates, out-of-range and future ids), "explicit"
    (`selected` lists (token, block) edges, for exact row sizes).
    """

    name: str
    documents: tuple[int, ...]
    fragments: tuple[tuple[int, int, int], ...] | None = None
    num_kv_heads: int = 1
    group: int = 16
    topk: int = 16
    selection: str = "uniform"
    gap_blocks: int = 0  # unused workspace blocks before every document
    extra_tokens: int = 0  # T past cu_seqlens[-1]
    logit_scale: float = 1.0  # multiplies q
    permute_items: bool = False
    level_major_rows: bool = False
    overcount: int = 0  # work_count past work_capacity
    max_item_queries: int = 4096
    row_queries: tuple[int, ...] = ()  # "explicit": queries of block 0, 1, ...
    hidden_tokens: tuple[int, ...] = ()  # lse -inf and out 0 in spite of their edges
    small: bool = True  # cheap enough for the simulator and the float64 oracle
    tags: frozenset[str] = field(default_factory=frozenset)

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group


@dataclass
class CaseData:
    """Inputs of `run_backward`, and what the oracle needs beside."""

    q: Tensor
    k_aligned: Tensor
    v_aligned: Tensor
    grad_out: Tensor
    lse: Tensor
    out: Tensor
    schedule: MSABackwardSchedule
    topk: Tensor
    cu_seqlens: list[int]
    document_workspace_starts: list[int]
    query_offsets: list[int]
    softmax_scale: float

    def arguments(self) -> tuple:
        """The seven positional arguments of `run_backward`."""
        return self.q, self.k_aligned, self.v_aligned, self.grad_out, self.lse, self.out, self.schedule

    def problem(self) -> Problem:
        return Problem(
            self.q.cpu(),
            self.k_aligned.cpu(),
            self.v_aligned.cpu(),
            self.topk.cpu(),
            self.cu_seqlens,
            self.document_workspace_starts,
            self.query_offsets,
            self.softmax_scale,
        )

    @property
    def dead_rows(self) -> Tensor:
        """bool `[T, Hq]`: tokens without a visible key, those past cu_seqlens[-1] among them."""
        dead = self.lse.cpu() == -torch.inf
        dead[self.cu_seqlens[-1] :] = True
        return dead


def _corner_cases() -> list[Case]:
    cases = [Case(f"length_{n}", (n,)) for n in (1, 2, 3, 5, 127, 128, 129, 257)]
    cases += [
        Case("length_2177", (2177,), small=False),
        Case("lengths_mixed", (1, 2, 3, 5, 127, 128, 129, 257)),
        Case("mixed_heads_4", (129, 1, 257), num_kv_heads=4, topk=2),
        Case("mixed_heads_2", (257, 3), num_kv_heads=2),
        Case("group_8", (129, 257), num_kv_heads=2, group=8),
        Case("one_query_4096_keys", (4096,), fragments=((0, 4095, 4096),)),
        Case(
            "shared_fragments", (700, 300), fragments=((0, 100, 200), (0, 300, 431), (1, 17, 300), (0, 640, 700))
        ),
        Case("all_choose_block_0", (300,), selection="first"),
        Case("all_empty", (130, 20), selection="none"),
        Case("own_block_only", (300, 64), selection="own"),
        Case("dirty_selection", (300, 2, 129), selection="dirty"),
        Case("empty_documents", (0, 5, 0, 0, 130, 0)),
        Case("no_tokens", ()),
        Case("gaps", (129, 3, 257), gap_blocks=2),
        Case("extra_tokens", (129, 40), extra_tokens=37),
        Case("permuted_items", (257, 129), permute_items=True, max_item_queries=32),
        Case("level_major", (300, 129, 257), level_major_rows=True),
        Case("overcount", (257,), overcount=3, max_item_queries=64),
        Case("large_logits", (257,), logit_scale=9.0),
        Case("hidden_tokens", (257,), hidden_tokens=(5, *range(128, 140), 256)),
        Case("rows_8_9", (384,), selection="explicit", row_queries=(8, 9, 1)),
        Case("row_empty_between", (512,), selection="explicit", row_queries=(16, 0, 0, 3)),
        Case("rows_4095", (4500,), selection="explicit", row_queries=(4095, 9), group=8, small=False),
        Case("rows_4096", (4500,), selection="explicit", row_queries=(4096, 8), group=8, small=False),
        Case("rows_4097", (4500,), selection="explicit", row_queries=(4097, 4095), group=8, small=False),
        Case("everything", (129, 0, 257, 1), num_kv_heads=2, gap_blocks=1, extra_tokens=9, selection="dirty",
             permute_items=True, level_major_rows=True, max_item_queries=48),
    ]  # fmt: skip
    return cases


def _benchmark_cases() -> list[Case]:
    """The cases of the published comparison: Hq 64, Hkv 4, 16 blocks."""
    big = {"num_kv_heads": 4, "small": False, "tags": frozenset({"benchmark"})}
    return [Case(f"T{n}", (n,), **big) for n in (4096, 8192, 16384)] + [
        Case("pack16384", (4133, 1500, 3000, 700, 5000, 2051), **big)
    ]


def _rank_cases() -> list[Case]:
    """Context-parallel ranks of real packs, 12,288 query tokens each."""
    cases = []
    for pack in (load_packs()[name] for name in ("pack_12", "pack_18", "pack_37", "pack_48")):
        for rank in pack.ranks:
            ends: dict[int, int] = {}
            for document, _, end in rank.fragments:
                ends[document] = max(ends.get(document, 0), end)
            number = {document: i for i, document in enumerate(ends)}
            cases.append(
                Case(
                    f"{pack.name}_rank{rank.rank}",
                    tuple(ends.values()),  # keys up to the document's last query on this rank
                    fragments=tuple((number[d], begin, end) for d, begin, end in rank.fragments),
                    num_kv_heads=4,
                    small=False,
                    tags=frozenset({"rank"}),
                )
            )
    return cases


CASES: dict[str, Case] = {case.name: case for case in _corner_cases() + _benchmark_cases() + _rank_cases()}


def corner_cases(*, small_only: bool = False) -> list[Case]:
    return [c for c in CASES.values() if not c.tags and (c.small or not small_only)]


def benchmark_cases() -> list[Case]:
    return [c for c in CASES.values() if c.tags]


def _select(case: Case, own_block: Tensor, generator: torch.Generator) -> Tensor:
    """Document-local ids int32 `[Hkv, T, K]` for tokens whose own block is `own_block` `[T]`."""
    heads, device = case.num_kv_heads, own_block.device
    own = own_block[None, :, None].expand(heads, -1, 1)
    empty = torch.full((heads, len(own_block), case.topk), -1, dtype=torch.int64, device=device)
    if case.selection == "none" or len(own_block) == 0:
        return empty.to(torch.int32)
    if case.selection in ("own", "first"):
        empty[:, :, 3:4] = own if case.selection == "own" else 0
        return empty.to(torch.int32)
    if case.selection == "explicit":
        # Block b is chosen by the last row_queries[b] tokens: all of them lie after it.
        token = torch.arange(len(own_block), device=device)
        for block, count in enumerate(case.row_queries):
            empty[:, token >= len(own_block) - count, block] = block
        return empty.to(torch.int32)
    # K distinct uniform draws out of own_block earlier blocks: the K smallest of random keys, a chunk at a time.
    num_blocks = int(own_block.max()) + 1
    chosen = []
    for chunk in own_block.split(max(1, 2**26 // (heads * num_blocks))):
        keys = torch.rand(heads, len(chunk), num_blocks, generator=generator, device=device)
        ids = torch.arange(num_blocks, device=device)
        keys = torch.where(ids < chunk[:, None], keys, 2.0)
        keys = torch.where(ids == chunk[:, None], -1.0, keys)
        values, picked = keys.topk(min(case.topk, num_blocks), dim=2, largest=False)
        chosen.append(torch.where(values < 2.0, picked, -1))
    ids = torch.cat(chosen, 1)
    result = empty
    result[:, :, : ids.shape[2]] = ids
    if case.selection == "dirty":
        noise = torch.randint(0, 5, result.shape, generator=generator, device=device)
        result = torch.where(noise == 0, -1, result)
        result = torch.where(noise == 1, result.roll(1, 2), result)  # duplicates
        result = torch.where(noise == 2, own_block[None, :, None] + 1, result)  # future, or past the document
        result[:, :, 0] = torch.where(noise[:, :, 0] == 3, 2**30, result[:, :, 0])
    return result.to(torch.int32)


def _relabel(case: Case, schedule: MSABackwardSchedule, generator: torch.Generator) -> MSABackwardSchedule:
    """The same schedule with other row numbers, item order, or work_count."""
    items = schedule.scheduler_metadata[: int(schedule.work_count)]
    if case.level_major_rows:
        # Row of (entry, block): all entries' block 0, then all block 1, ...
        rows = torch.stack([items[:, 5], items[:, 4]], 1)
        unique, number = rows.unique(dim=0, return_inverse=True)
        row_ptr = torch.zeros(case.num_kv_heads, len(unique) + 1, dtype=torch.int64, device=items.device)
        q_indices = torch.full_like(schedule.q_indices, 2**31 - 1)
        sizes = torch.zeros(case.num_kv_heads, len(unique), dtype=torch.int64, device=items.device)
        sizes.index_put_((items[:, 0].long(), number), items[:, 3].long(), accumulate=True)
        row_ptr[:, 1:] = sizes.cumsum(1)
        for item, row in zip(items.tolist(), number.tolist()):
            head, old_row, begin, size = item[:4]
            source = int(schedule.row_ptr[head, old_row]) + begin
            target = int(row_ptr[head, row]) + begin
            q_indices[head, target : target + size] = schedule.q_indices[head, source : source + size]
        items = torch.cat([items[:, :1], number[:, None].to(torch.int32), items[:, 2:]], 1)
        schedule = replace(
            schedule,
            row_ptr=row_ptr.to(torch.int32),
            q_indices=q_indices,
            scheduler_metadata=items if len(items) else schedule.scheduler_metadata,
        )
    if case.permute_items and len(items):
        order = torch.randperm(len(items), generator=generator, device=items.device)
        schedule = replace(schedule, scheduler_metadata=items[order])
    if case.overcount:
        schedule = replace(schedule, work_count=schedule.work_count + case.overcount)
    return schedule


def make(
    case: Case,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    forward: Callable | None = None,
) -> CaseData:
    """Fresh N(0, 1) inputs; garbage and NaN stand wherever the contract allows them.

    `forward(q, k_aligned, v_aligned, schedule, softmax_scale) -> out, lse` replaces the reference's, which is slow
    for large cases.
    """
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(seed)
    fragments = case.fragments or tuple((d, 0, n) for d, n in enumerate(case.documents))
    starts_of_document, rows = [], 0
    for length in case.documents:
        rows += 128 * case.gap_blocks
        starts_of_document.append(rows)
        rows += ceil_to_block(length)
    rows += 128 * case.gap_blocks
    lengths = [end - begin for _, begin, end in fragments]
    cu_seqlens = [0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()]
    starts = [starts_of_document[d] for d, _, _ in fragments]
    offsets = [begin for _, begin, _ in fragments]

    def int32(values) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    positions = [torch.arange(begin, end, device=device) for _, begin, end in fragments]
    own_block = (torch.cat(positions) if positions else torch.zeros(0, dtype=torch.int64, device=device)) // 128
    topk = _select(case, own_block, generator)
    topk = torch.nn.functional.pad(topk, (0, 0, 0, case.extra_tokens))
    schedule = build_schedule(
        topk,
        int32(cu_seqlens),
        document_workspace_starts=int32(starts),
        query_offsets=int32(offsets) if case.fragments else None,
        max_item_queries=case.max_item_queries,
    )
    schedule = _relabel(case, schedule, generator)

    num_tokens = cu_seqlens[-1] + case.extra_tokens
    q = normal(num_tokens, case.num_heads, HEAD_DIM) * case.logit_scale
    grad_out = normal(num_tokens, case.num_heads, HEAD_DIM)
    used = torch.zeros(rows, dtype=torch.int8, device=device)  # 0 gap, 1 padding, 2 key
    for start, length in zip(starts_of_document, case.documents):
        used[start : start + ceil_to_block(length)] = 1
        used[start : start + length] = 2
    kv = [normal(rows, case.num_kv_heads, HEAD_DIM) for _ in range(2)]
    for x in kv:
        x[used == 1] = 0.0
        x[used == 0] = torch.nan
    scale = HEAD_DIM**-0.5
    if forward is None:
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        out, lse = reference.forward(q, *kv, schedule, softmax_scale=scale, compute_dtype=compute)
    else:
        out, lse = forward(q, *kv, schedule, scale)
    hidden = list(case.hidden_tokens)
    lse[hidden], out[hidden] = -torch.inf, 0.0
    if case.extra_tokens:
        for x in (q, grad_out, out, lse):
            x[cu_seqlens[-1] :] = torch.nan
    return CaseData(q, *kv, grad_out, lse, out, schedule, topk, cu_seqlens, starts, offsets, scale)
