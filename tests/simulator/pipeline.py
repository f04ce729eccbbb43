"""Runs msa_ext's CUDA pipeline in the simulator, in a process of its own: another libcudart must not be loaded.

`PYTHONPATH=.:tests python -m simulator.pipeline sm90|sm100 [PART PARTS]` scores generated mutations of a main kernel,
all of them or every PARTS-th.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
from dataclasses import dataclass

from simulator import mutation


class Worker:
    """Fresh processes for one simulated device; `call(function, *arguments)` runs a function of this module in one."""

    def __init__(self, processes: int = 1):
        context = multiprocessing.get_context("spawn")
        self._pool = concurrent.futures.ProcessPoolExecutor(processes, context)

    def submit(self, function, *arguments) -> concurrent.futures.Future:
        return self._pool.submit(function, *arguments)

    def call(self, function, *arguments, **options):
        return self._pool.submit(function, *arguments, **options).result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def gradients(
    device: str, case, backend: str, accum: str, mode: str, seed: int, num_sms: int = 4, mma_order: str = "issue"
) -> list:
    """Runs a case (or one of tests/cases.py by name) into poisoned outputs and compares with the float64 reference.

    Returns:
        Names of the kernels run.

    Raises:
        AssertionError: gradients out of tolerance.
        RuntimeError: a check of the simulator fired.
    """
    import torch

    torch.set_num_threads(1)
    import cases
    from msa_ext import reference
    from msa_ext.backward import run_backward
    from msa_ext.testing import compare
    from simulator import Simulator

    data = cases.make(cases.CASES[case] if isinstance(case, str) else case, seed=3)
    expected = reference.backward(*data.arguments(), compute_dtype=torch.float64)
    outputs = {
        name: torch.full_like(x, torch.nan)
        for name, x in (("dq", data.q), ("dk", data.k_aligned), ("dv", data.v_aligned))
    }
    with Simulator(device, num_sms=num_sms, mode=mode, seed=seed, mma_order=mma_order) as simulator:
        got = run_backward(*data.arguments(), backend=backend, dq_accum=accum, **outputs)
        reports = [str(r) for r in simulator.reports]
        kernels = [name for name, _, _ in simulator.launches]
    compare.check_all(got, expected, data.dead_rows, dq_accum=accum)
    assert not reports, reports
    return kernels


def attention_forward(
    device: str, documents, fragments, options: dict, mode: str, seed: int
) -> tuple[list, float, float]:
    """Runs the simple forward twice on drawn documents (`test_attention.Inputs`), NaN in all rows past the end.

    Returns:
        Names of the kernels run, relative L2 error of out and largest absolute error of lse against float64.

    Raises:
        AssertionError: the runs differ, or are not 0 and -inf where nothing is visible.
        RuntimeError: a check of the simulator fired.
    """
    import torch

    torch.set_num_threads(1)
    from test_attention import Inputs

    from msa_ext import _cuda_forward, reference_attention
    from simulator import Simulator

    inputs = Inputs(documents, fragments, dtype=torch.bfloat16, **options)
    inputs.q[int(inputs.cu_seqlens[-1]) :] = torch.nan
    for x in (inputs.k, inputs.v):
        x[sum(documents) :] = torch.nan
    arguments = inputs.q, inputs.k, inputs.v, inputs.topk, inputs.layout, 128**-0.5
    with Simulator(device, num_sms=4, mode=mode, seed=seed) as simulator:
        out, lse = _cuda_forward.launch(*arguments, "simple")
        again = _cuda_forward.launch(*arguments, "simple")
        torch.testing.assert_close(again, (out, lse), rtol=0, atol=0)
        assert not simulator.reports, [str(r) for r in simulator.reports]
        kernels = [name for name, _, _ in simulator.launches]
    wide = (x.double() for x in arguments[:3])
    expected_out, expected_lse = reference_attention.forward(*wide, *arguments[3:])
    dead = expected_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, dead) and not out[dead].any()
    error = (out.double() - expected_out).norm() / expected_out.norm().clamp(min=1e-30)
    return kernels, float(error), float((lse - expected_lse)[~dead].abs().max()) if (~dead).any() else 0.0


def failure(mode: str, *, consumer_registers: int = 240, grid_wait: bool = True) -> str | None:
    """How the Hopper backward of a token fails with other registers or without griddepcontrol.wait; None: not at all."""
    import torch

    torch.set_num_threads(1)
    import cases
    from msa_ext.backward import run_backward
    from simulator import Simulator

    data = cases.make(cases.CASES["length_1"], seed=3)
    simulator = Simulator("h200", num_sms=1, mode=mode)
    asked = f"setmaxnreg.inc.sync.aligned.u32 {consumer_registers};"
    wait = "griddepcontrol.wait;"
    simulator.rewrite = lambda text: text.replace("setmaxnreg.inc.sync.aligned.u32 240;", asked).replace(
        wait, wait if grid_wait else ""
    )
    with simulator:
        try:
            run_backward(*data.arguments(), backend="sm90")
        except RuntimeError as error:
            return str(error)
    return None


STAGE_BITS = {"delta": 1, "clear": 2, "task_build": 4, "main": 8, "postprocess": 16}


class Stages:
    """The pipeline on one workspace, a few stages at a time, through `run_backward`."""

    def __init__(self, data, backend: str, dq_accum: str):
        self.data, self.backend, self.dq_accum = data, backend, dq_accum
        self._workspace, self._sections = None, {}

    def run(self, *stages: str, **options) -> tuple:
        """Runs stages of `STAGE_BITS`; returns the gradients, which only "postprocess" writes."""
        from msa_ext import _cuda_backward, _runtime
        from msa_ext.backward import run_backward

        launch, allocate = _cuda_backward.launch, _runtime.workspace
        mask = sum(STAGE_BITS[stage] for stage in stages)

        def workspace(total_bytes, sections, device):
            if self._workspace is None:
                self._sections = {name: (offset, size) for name, offset, size in sections}
                self._workspace = allocate(total_bytes, sections, device)
            return self._workspace

        _runtime.workspace = workspace
        _cuda_backward.launch = lambda arguments, backend, accum: launch(arguments, backend, accum, mask)
        try:
            return run_backward(*self.data.arguments(), backend=self.backend, dq_accum=self.dq_accum, **options)
        finally:
            _cuda_backward.launch, _runtime.workspace = launch, allocate

    def section(self, name: str, dtype):
        """A view of a section of the workspace."""
        offset, size = self._sections[name]
        return self._workspace[offset : offset + size].view(dtype)


def task_arrays(data, group: int) -> dict:
    """{"headers": [tasks, 4], "tokens": [tasks, slots]} that the device's task build writes."""
    import torch

    stages = Stages(data, "simple", "fp32")
    stages.run("task_build")
    count = int(stages.section("descriptor", torch.int32)[0])
    headers = stages.section("task_headers", torch.int32).view(-1, 4)[:count]
    tokens = stages.section("task_tokens", torch.int32).view(-1, 128 // group)[:count]
    return {"headers": headers.cpu().numpy().copy(), "tokens": tokens.cpu().numpy().copy()}


def task_table(device: str, case_name: str, mode: str, seed: int) -> tuple[list, list]:
    """(headers, tokens) that the task build writes in the simulator."""
    import torch

    torch.set_num_threads(1)
    import cases
    from simulator import Simulator

    case = cases.CASES[case_name]
    with Simulator(device, num_sms=4, mode=mode, seed=seed):
        arrays = task_arrays(cases.make(case, seed=3), case.group)
    return arrays["headers"].tolist(), arrays["tokens"].tolist()


@dataclass(frozen=True)
class Mutated:
    """A main kernel, the first of its module, and how it is run."""

    device: str
    backend: str
    kernel: str  # part of its symbol
    accum: str
    modes: tuple[str, ...]  # tried in this order until one sees the fault
    num_sms: int
    fragments: tuple[tuple[int, int, int], ...]  # (document of 128 tokens, first query, end)


MUTATED = {
    "sm90": Mutated(
        "h200", "sm90", "sm9015backward_kernelILi16ELNS_7DqAccumE2", "fp32", ("late", "random", "eager"), 1,
        ((0, 125, 128), (1, 127, 128), (2, 81, 92), (2, 108, 128)),
    ),
    "sm100": Mutated(
        "b200", "sm100", "sm10015backward_kernelILi16ELNS_7DqAccumE0", "bf16", ("late", "random", "isa", "eager"), 2,
        ((0, 108, 128), (1, 125, 128), (2, 127, 128)),
    ),
}  # fmt: skip


def mutate(backend: str, part: int = 0, parts: int = 1, say=None) -> list[mutation.Mutation]:
    """Scores every `parts`-th generated mutation of a backend's main kernel, from the `part`-th on.

    Three segments: tasks of 8, 8, 4 tokens and of 3 and of 1 in two CTAs for Blackwell; of 3 and of 1 and of 8, 3, 8, 8, 4
    in one CTA for Hopper, whose ring has three stages. Mode "isa" is "late" with only the MMA order that the ISA promises.

    Args:
        say: called with the line of the table of each mutation, as it is scored.
    """
    import torch

    torch.set_num_threads(1)
    import cases
    from msa_ext import reference
    from msa_ext.backward import run_backward
    from msa_ext.testing import compare
    from simulator import SimulationError, Simulator

    target = MUTATED[backend]
    data = cases.make(cases.Case("tails", (128, 128, 128), target.fragments), seed=3)
    expected = reference.backward(*data.arguments(), compute_dtype=torch.float64)
    original = {}

    def first_kernel(text: str) -> str:
        """The module cut after its first kernel, the one that runs."""
        begin = text.index(".visible .entry")
        cut = text[: text.index(".visible .entry", begin + 1)]
        assert target.kernel in cut
        return cut

    def run(text: str, mode: str, seed: int) -> bool:
        def rewrite(module: str) -> str:
            if target.kernel not in module:
                return module
            original["text"] = first_kernel(module)
            return text or original["text"]

        order = {"mode": "late", "mma_order": "isa"} if mode == "isa" else {"mode": mode}
        simulator = Simulator(target.device, num_sms=target.num_sms, seed=seed, **order)
        simulator.rewrite = rewrite
        with simulator:
            try:
                got = run_backward(*data.arguments(), backend=backend, dq_accum=target.accum)
            except RuntimeError as error:
                raise SimulationError(str(simulator.error or error)) from error
        try:
            compare.check_all(got, expected, data.dead_rows, dq_accum=target.accum)
        except AssertionError:
            return False
        return True

    assert run("", "late", 0)
    chosen = mutation.mutations(original["text"])[part::parts]
    for m in chosen:
        mutation.score([m], run, seeds=8, modes=target.modes, first_catch=True)
        m.text = ""
        if say:
            say(mutation.table([m]).split("\n")[1])
    return chosen


if __name__ == "__main__":
    import sys

    backend, *numbers = sys.argv[1:]
    scored = mutate(backend, *map(int, numbers), say=lambda line: print(line, flush=True))
    print(mutation.table(scored).split("\n")[-1])
