"""The CTA walk rule: the rule in Python gives every task exactly once, and csrc/topology.h is held to it."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest

from msa_ext import _runtime

SM_COUNTS = (1, 8, 78, 132, 148, 160)
RULES = ((4, 64, 2400), (32, 32, 0), (8, 8, 0))


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


def _check_cover(num_tasks: int, num_sms: int, rule: tuple[int, int, int]) -> None:
    walk = plan_walk(num_tasks, num_sms, *rule)
    expected = 0
    for cta in range(walk.grid):
        begin, end = cta_interval(walk, num_tasks, cta)
        assert begin == expected and end > begin, (num_tasks, num_sms, rule, cta)
        expected = end
    assert expected == num_tasks
    begin, end = cta_interval(walk, num_tasks, walk.grid + 5)
    assert begin == end


@pytest.mark.parametrize("num_sms", SM_COUNTS)
def test_every_task_once(num_sms):
    for num_tasks in range(3001):
        _check_cover(num_tasks, num_sms, RULES[num_tasks % len(RULES)])
    for num_tasks in (2399, 2400, 2401):
        _check_cover(num_tasks, num_sms, RULES[0])


@pytest.mark.parametrize("num_sms", SM_COUNTS)
def test_large_counts(num_sms):
    draw = random.Random(num_sms)
    for _ in range(20):
        num_tasks = draw.randint(3001, 10_000_000)
        walk = plan_walk(num_tasks, num_sms)
        # The interval formula is linear between the ends: ends and joint decide.
        assert cta_interval(walk, num_tasks, 0)[0] == 0
        assert cta_interval(walk, num_tasks, walk.grid - 1)[1] == num_tasks
        if 0 < walk.full_ctas < walk.grid:
            assert cta_interval(walk, num_tasks, walk.full_ctas - 1)[1] == walk.full_ctas * walk.tasks_per_cta
            assert cta_interval(walk, num_tasks, walk.full_ctas)[0] == walk.full_ctas * walk.tasks_per_cta
        begin, end = cta_interval(walk, num_tasks, walk.grid)
        assert begin == end


def test_cpp_is_held_to_the_rule():
    try:
        extension = _runtime.extension()
    except RuntimeError as error:
        pytest.skip(f"pure-Python install: {error}")
    draw = random.Random(0)
    counts = [*range(3001), *(draw.randint(3001, 10_000_000) for _ in range(3000))]
    for num_sms in SM_COUNTS:
        for num_tasks in counts:
            assert extension.plan_walk(num_tasks, num_sms) == tuple(plan_walk(num_tasks, num_sms))
        for rule in RULES[1:]:
            for num_tasks in counts[::17]:
                assert extension.plan_walk(num_tasks, num_sms, *rule) == tuple(plan_walk(num_tasks, num_sms, *rule))
