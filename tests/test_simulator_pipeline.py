"""msa_ext's own kernels, from its own library, in the simulator."""

import importlib.util
import shutil
from pathlib import Path

import pytest
from simulator import fatbin, pipeline
from simulator.machine import Machine
from simulator.streams import Streams

import cases
from task_oracle import build_tasks

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("msa_ext._C") is None, reason="needs the built extension"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc for the runtime shim"),
]


@pytest.fixture(scope="module")
def h200():
    worker = pipeline.Worker()
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def b200():
    worker = pipeline.Worker()
    yield worker
    worker.close()


def test_register_counts_of_the_hopper_backward():
    """1 producer and 2 consumer warpgroups: what they start with is what config.cuh lets them have afterwards."""
    library = Path(importlib.util.find_spec("msa_ext._C").origin)
    counts = [c for data in fatbin.in_file(library) for c in fatbin.register_counts(data).items()]
    hopper = {name: n for (arch, name), n in counts if arch == 90 and "sm9015backward_kernel" in name}
    assert len(hopper) == 4 and set(hopper.values()) == {(24 + 2 * 240) // 3}


def test_a_register_budget_that_is_too_large_dead_locks(h200):
    assert h200.call(pipeline.failure, "late") is None
    assert "waits for 2560 registers" in h200.call(pipeline.failure, "late", consumer_registers=248)


def test_a_missing_wait_for_the_overlapped_grid_shows_to_the_adversary(h200):
    """The main kernel starts when delta is over, which does not wait for the task build beside it."""
    assert h200.call(pipeline.failure, "eager", grid_wait=False) is None
    assert "uninitialised" in h200.call(pipeline.failure, "late", grid_wait=False)


def test_streams_keep_their_order_and_wait_for_events():
    def order(mode: str, seed: int = 0) -> str:
        done = []
        streams = Streams(Machine(num_sms=1, mode=mode, seed=seed))
        for stream, name in ((0, "a"), (7, "x"), (0, "b")):
            streams.push(stream, lambda name=name: done.append(name))
        streams.record(0, 1)
        streams.push(0, lambda: done.append("c"))
        streams.wait(7, 1)
        streams.wait(7, 2)  # never recorded
        streams.push(7, lambda: done.append("y"))
        streams.flush()
        return "".join(done)

    assert order("eager") == "axbcy" and order("late") == "xabyc"
    orders = {order("random", seed) for seed in range(50)}
    assert all(o.index("a") < o.index("b") < min(o.index("c"), o.index("y")) for o in orders)
    assert all(o.index("x") < o.index("y") for o in orders) and len(orders) >= 5


@pytest.mark.parametrize(
    "name, accum, mode, seed",
    [
        ("length_5", "fp32", "eager", 0),
        ("length_5", "bf16", "late", 0),
        *[("length_5", "fp32", "random", seed) for seed in range(4)],
        ("length_129", "bf16", "late", 1),
        ("length_129", "fp32", "random", 2),
        ("empty_documents", "bf16", "random", 3),
        ("all_empty", "fp32", "late", 0),
    ],
)
def test_hopper_backward(h200, name, accum, mode, seed):
    kernels = h200.call(pipeline.gradients, "h200", name, "sm90", accum, mode, seed)
    assert any("backward_kernel" in k for k in kernels)


@pytest.mark.parametrize("device, accum", [("h200", "fp32"), ("b200", "bf16"), ("b200", "fp16")])
def test_simple_backward(request, device, accum):
    worker = request.getfixturevalue(device)
    kernels = worker.call(pipeline.gradients, device, "length_1", "simple", accum, "late", 0)
    assert any("simple_kernel" in k for k in kernels)


@pytest.mark.parametrize("device", ["h200", "b200"])
@pytest.mark.parametrize("name", ["length_257", "everything", "group_8", "rows_8_9", "permuted_items"])
def test_task_table_matches_the_oracle(request, device, name):
    worker = request.getfixturevalue(device)
    headers, tokens = worker.call(pipeline.task_table, device, name, "random", 5)
    case = cases.CASES[name]
    expected_headers, expected_tokens = build_tasks(cases.make(case, seed=3).schedule, case.group, window_log2=9)
    assert headers == [list(h) for h in expected_headers]
    assert tokens == expected_tokens


@pytest.mark.parametrize("device", ["h200", "b200"])
@pytest.mark.parametrize(
    "documents, fragments, options",
    [
        (
            (1, 1, 3, 0, 130),
            [(0, 0, 1), (1, 0, 1), (2, 0, 3), (4, 127, 130)],
            {"heads": 1, "group": 16, "top_k": 4, "extra": 3},
        ),
        ((1,) * 20, None, {"heads": 1, "group": 8, "top_k": 1}),
        ((300, 140), [(0, 290, 300), (0, 127, 130), (1, 139, 140)], {"heads": 1, "group": 16, "top_k": 17}),
        ((129,), [(0, 128, 129)], {"heads": 4, "group": 8, "top_k": 64}),
    ],
)
def test_simple_forward(request, device, documents, fragments, options):
    worker = request.getfixturevalue(device)
    kernels, out_error, lse_error = worker.call(
        pipeline.attention_forward, device, documents, fragments, options, "random", 1
    )
    assert all("forward_kernel" in k for k in kernels)
    assert out_error < 4e-3 and lse_error < 5e-4
