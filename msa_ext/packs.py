"""Real training packs: document boundaries and context-parallel ranks, shipped as packs.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True)
class Rank:
    """A context-parallel rank: fragments `(document, first query, end query)` inside their documents."""

    rank: int
    fragments: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Pack:
    name: str
    cu_seqlens: tuple[int, ...]
    ranks: tuple[Rank, ...]

    def document_lengths(self, max_tokens: int | None = None) -> list[int]:
        """Lengths in order, the last one cut where `max_tokens` are reached."""
        lengths = []
        budget = self.cu_seqlens[-1] if max_tokens is None else max_tokens
        for begin, end in zip(self.cu_seqlens, self.cu_seqlens[1:]):
            if budget <= 0:
                break
            lengths.append(min(end - begin, budget))
            budget -= lengths[-1]
        return lengths


@cache
def load_packs() -> dict[str, Pack]:
    """All packs by name."""
    text = resources.files(__package__).joinpath("packs.json").read_text()
    packs = {}
    for raw in json.loads(text)["packs"]:
        ranks = tuple(Rank(r["rank"], tuple(tuple(f) for f in r["fragments"])) for r in raw["ranks"])
        packs[raw["name"]] = Pack(raw["name"], tuple(raw["cu_seqlens"]), ranks)
    return packs
