"""The Blackwell backward through run_backward on a simulated B200: all corner cases, every mode, many seeds; faults."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass

import pytest
from simulator import mutation, pipeline

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


@dataclass(frozen=True)
class Run:
    """A simulated call; `case` may name one of cases.CASES."""

    case: str | Case
    accum: str = "bf16"
    mode: str = "late"
    num_sms: int = 4
    seed: int = 0
    mma_order: str = "issue"

    def __str__(self) -> str:
        name = self.case if isinstance(self.case, str) else self.case.name
        return f"{name}-{self.accum}-{self.mode}-{self.num_sms}sm-{self.seed}-{self.mma_order}"


CORNER_CASES = [  # on few SMs: a resident CTA takes tens of megabytes
    *[Run(f"length_{n}") for n in (1, 2, 3, 5, 127, 128, 129)],
    Run("length_257", "fp32", "random", 3),
    Run("group_8"),
    Run("one_query_4096_keys", mode="random"),
    Run("all_choose_block_0", num_sms=1),
    Run("own_block_only", "fp16", "random"),
    Run("dirty_selection"),
    Run("empty_documents", mode="random"),
    Run("gaps", num_sms=3),
    Run("extra_tokens", "fp32"),
    Run("permuted_items", mode="random"),
    Run("overcount"),
    Run("large_logits", num_sms=1),
    Run("hidden_tokens", mode="random"),
    Run("rows_8_9", mode="random"),
    Run("row_empty_between", "fp16"),
    Run("everything", mode="random"),
    Run(Case("four_heads", (20, 1, 130), num_kv_heads=4, topk=1), mode="random"),
]
IN_ORDER = [Run(*w, mode, num_sms) for w in WALKS for mode in ("eager", "late") for num_sms in (1, 3, 148)]
IN_ISA_ORDER = [Run(*w, "late", mma_order="isa") for w in WALKS]
AT_RANDOM = [Run(*w, "random", (1, 3, 148)[seed % 3], seed) for w in WALKS for seed in range(20)]
LONG = [
    Run(name, mode="random")
    for name in ("lengths_mixed", "mixed_heads_4", "mixed_heads_2", "shared_fragments", "level_major")
] + [Run(f"rows_{n}") for n in (4095, 4096, 4097)]


@pytest.fixture(scope="module")
def outcomes(request):
    """Of every selected run, a future of the kernels that ran; two runs at a time."""
    selected = [
        i.callspec.params["run"]
        for i in request.session.items
        if i.module is request.module and "run" in i.fixturenames
    ]
    skipped = set() if request.config.getoption("long") else set(LONG)
    worker = pipeline.Worker(2)
    yield {
        run: worker.submit(
            pipeline.gradients, "b200", run.case, "sm100", run.accum, run.mode, run.seed, run.num_sms, run.mma_order
        )
        for run in selected
        if run not in skipped
    }
    worker.close()


@pytest.mark.parametrize(
    "run",
    [*CORNER_CASES, *IN_ORDER, *IN_ISA_ORDER, *AT_RANDOM, *[pytest.param(run, marks=pytest.mark.long) for run in LONG]],
    ids=str,
)
def test_gradients(outcomes, run):
    assert any("sm100" in kernel for kernel in outcomes[run].result())


@pytest.mark.parametrize("name", ["all_empty", "no_tokens"])
def test_nothing_to_do(name):
    worker = pipeline.Worker()
    worker.call(pipeline.gradients, "b200", name, "sm100", "bf16", "late", 0)
    worker.close()


@pytest.mark.parametrize(
    "part, parts", [(3, 12), *[pytest.param(p, 12, marks=pytest.mark.long) for p in range(12) if p != 3]]
)
def test_mutations(part, parts):
    workers = pipeline.Worker(2)
    halves = [workers.submit(pipeline.mutate, "sm100", part + parts * i, 2 * parts) for i in range(2)]
    scored = [m for half in halves for m in half.result()]
    workers.close()
    print(mutation.table(scored))
    assert scored and all(m.caught for m in scored if "tried once" not in m.name)
    # An earlier wait may have seen the end of the phase: then one try is enough.
    assert sum(not m.caught for m in scored) <= 2
