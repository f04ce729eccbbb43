"""The walk rule: every task exactly once, and Python held to C++."""

import random

import pytest

from msa_ext import _runtime
from msa_ext.walk import cta_interval, plan_walk

SM_COUNTS = (1, 8, 78, 132, 148, 160)
RULES = ((4, 64, 2400), (32, 32, 0), (8, 8, 0))


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


def test_python_is_held_to_cpp():
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
