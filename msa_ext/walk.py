"""The CTA walk rule of csrc/topology.h in Python, for installs without CUDA."""

from __future__ import annotations

from typing import NamedTuple


class Walk(NamedTuple):
    """CTA i < full_ctas owns `tasks_per_cta` tasks from i * tasks_per_cta on; later CTAs `tail_tasks_per_cta` each."""

    tasks_per_cta: int
    full_ctas: int
    tail_tasks_per_cta: int
    grid: int


def plan_walk(
    num_tasks: int,
    num_sms: int,
    short_walk: int = 4,
    long_walk: int = 64,
    short_walk_max_tasks: int = 2400,
) -> Walk:
    """How a grid of CTAs walks `num_tasks` ordered tasks on `num_sms` multiprocessors."""
    length = short_walk if num_tasks <= short_walk_max_tasks else long_walk
    chunks = -(-num_tasks // length)
    full = min(chunks // num_sms * num_sms, num_tasks // length)
    left = num_tasks - full * length
    if left <= 0:
        return Walk(length, full, 1, full)
    tail = -(-left // num_sms)
    if tail < 3:
        return Walk(length, 0, length, chunks)
    return Walk(length, full, tail, full + -(-left // tail))


def cta_interval(walk: Walk, num_tasks: int, cta_idx: int) -> tuple[int, int]:
    """First and end task of a CTA; empty past the walk's grid."""
    if cta_idx < walk.full_ctas:
        return cta_idx * walk.tasks_per_cta, (cta_idx + 1) * walk.tasks_per_cta
    begin = walk.full_ctas * walk.tasks_per_cta + (cta_idx - walk.full_ctas) * walk.tail_tasks_per_cta
    return min(begin, num_tasks), min(begin + walk.tail_tasks_per_cta, num_tasks)
