"""The Blackwell backward through run_backward on a simulated B200: all corner cases, every mode, many seeds."""

import importlib.util
import shutil

import pytest
from simulator import pipeline

from cases import Case

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("msa_ext._C") is None, reason="needs the built extension"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc for the runtime shim"),
]

# Nine to twelve tasks of several segments each: three CTAs and more, segments split between them.
WALKS = [
    (Case("walks", (20, 3, 37)), "bf16"),
    (Case("walks_group_8", (40, 9, 70), group=8), "fp16"),
    (Case("walks_two_heads", (20, 3, 11), num_kv_heads=2), "fp32"),
]
FOUR_HEADS = Case("four_heads", (20, 1, 130), num_kv_heads=4, topk=1)


@pytest.fixture(scope="module")
def b200():
    worker = pipeline.Worker()
    yield worker
    worker.close()


def check(b200, case, accum, mode, seed=0, num_sms=4):
    kernels = b200.call(pipeline.gradients, "b200", case, "sm100", accum, mode, seed, num_sms)
    return [k for k in kernels if "sm100" in k]


@pytest.mark.parametrize(
    "name, accum, mode, num_sms",
    [
        *[(f"length_{n}", "bf16", "late", 4) for n in (1, 2, 3, 5, 127, 128, 129)],
        ("length_257", "fp32", "random", 3),
        ("group_8", "bf16", "late", 148),
        ("one_query_4096_keys", "bf16", "random", 148),
        ("all_choose_block_0", "bf16", "late", 1),
        ("own_block_only", "fp16", "random", 4),
        ("dirty_selection", "bf16", "late", 4),
        ("empty_documents", "bf16", "random", 4),
        ("gaps", "bf16", "late", 3),
        ("extra_tokens", "fp32", "late", 4),
        ("permuted_items", "bf16", "random", 148),
        ("overcount", "bf16", "late", 4),
        ("large_logits", "bf16", "late", 1),
        ("rows_8_9", "bf16", "random", 4),
        ("row_empty_between", "fp16", "late", 4),
        ("everything", "bf16", "random", 148),
    ],
)
def test_corner_case(b200, name, accum, mode, num_sms):
    assert check(b200, name, accum, mode, num_sms=num_sms)


def test_four_heads(b200):
    assert check(b200, FOUR_HEADS, "bf16", "random", num_sms=148)


@pytest.mark.parametrize("name", ["all_empty", "no_tokens"])
def test_nothing_to_do(b200, name):
    check(b200, name, "bf16", "late")


@pytest.mark.parametrize("num_sms", [1, 3, 148])
@pytest.mark.parametrize("mode", ["eager", "late"])
@pytest.mark.parametrize("case, accum", WALKS, ids=lambda x: getattr(x, "name", x))
def test_walks(b200, case, accum, mode, num_sms):
    assert check(b200, case, accum, mode, num_sms=num_sms)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("case, accum", WALKS, ids=lambda x: getattr(x, "name", x))
def test_walks_at_random(b200, case, accum, seed):
    assert check(b200, case, accum, "random", seed, num_sms=(1, 3, 148)[seed % 3])


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["lengths_mixed", "mixed_heads_4", "mixed_heads_2", "shared_fragments", "level_major", "rows_4095", "rows_4096", "rows_4097"]
)  # fmt: skip
def test_long_case(b200, name):
    assert check(b200, name, "bf16", "random", num_sms=148)
