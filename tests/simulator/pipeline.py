"""Runs msa_ext's CUDA pipeline in the simulator, in a process of its own: another libcudart must not be loaded.

`PYTHONPATH=.:tests python -m simulator.pipeline [FIRST_LINE]` scores generated mutations of the Hopper backward.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing


class Worker:
    """A fresh process for one simulated device; `call(function, ...)` runs a function of this module in it."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self._pool = concurrent.futures.ProcessPoolExecutor(1, context)

    def call(self, function, *arguments, **options):
        return self._pool.submit(function, *arguments, **options).result()

    def close(self) -> None:
        self._pool.shutdown()


def gradients(device: str, case_name: str, backend: str, accum: str, mode: str, seed: int, **options) -> list[str]:
    """Runs a case of tests/cases.py and compares it with the float64 reference; returns the names of the kernels run.

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

    data = cases.make(cases.CASES[case_name], seed=3)
    expected = reference.backward(*data.arguments(), compute_dtype=torch.float64)
    with Simulator(device, num_sms=4, mode=mode, seed=seed, **options) as simulator:
        got = run_backward(*data.arguments(), backend=backend, dq_accum=accum)
        reports = [str(r) for r in simulator.reports]
        kernels = [name for name, _, _ in simulator.launches]
    compare.check_all(got, expected, data.dead_rows, dq_accum=accum)
    assert not reports, reports
    return kernels


def failure(mode: str, *, consumer_registers: int = 240, events: bool = True) -> str | None:
    """How the Hopper backward of a token fails with other registers or without waits for events; None: it does not."""
    import torch

    torch.set_num_threads(1)
    import cases
    from msa_ext.backward import run_backward
    from simulator import Simulator

    data = cases.make(cases.CASES["length_1"], seed=3)
    simulator = Simulator("h200", num_sms=1, mode=mode)
    asked = f"setmaxnreg.inc.sync.aligned.u32 {consumer_registers};"
    simulator.rewrite = lambda text: text.replace("setmaxnreg.inc.sync.aligned.u32 240;", asked)
    if not events:
        simulator.streams.wait = lambda stream, event: None
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


HOPPER_KERNEL = "backward_kernelILi16ELNS_7DqAccumE2"  # group 16, FP32 dQ


def mutate_hopper(first_line: int = 0) -> None:
    """Prints what catches each deletion of a wait, arrive, fence or commit of the Hopper backward; about ten minutes.

    The case has two documents, 20 and 3 tokens: four tasks in two segments.
    """
    import torch

    torch.set_num_threads(1)
    import cases
    from msa_ext import reference
    from msa_ext.backward import run_backward
    from msa_ext.testing import compare
    from simulator import SimulationError, Simulator, mutation

    data = cases.make(cases.Case("two_documents", (20, 3)), seed=3)
    expected = reference.backward(*data.arguments(), compute_dtype=torch.float64)
    original = {}

    def first_kernel(text: str) -> str:
        """The module cut after its first kernel, the one that runs."""
        begin = text.index(".visible .entry")
        cut = text[: text.index(".visible .entry", begin + 1)]
        assert HOPPER_KERNEL in cut
        return cut

    def run(text: str, mode: str, seed: int) -> bool:
        def rewrite(module: str) -> str:
            if HOPPER_KERNEL not in module:
                return module
            original["text"] = first_kernel(module)
            return text or original["text"]

        simulator = Simulator("h200", num_sms=2, mode=mode, seed=seed)
        simulator.rewrite = rewrite
        with simulator:
            try:
                got = run_backward(*data.arguments(), backend="sm90", dq_accum="fp32")
            except RuntimeError as error:
                raise SimulationError(str(simulator.error or error)) from error
        try:
            compare.check_all(got, expected, data.dead_rows, dq_accum="fp32")
        except AssertionError:
            return False
        return True

    assert run("", "late", 0)
    mutants = mutation.mutations(original["text"])
    # So small a case leaves most keys without weight, so that wrong descriptors can be right.
    found = [m for m in mutants if int(m.name.split()[1].rstrip(":")) >= first_line and " of B:" not in m.name]
    for mutant in found:
        mutation.score([mutant], run, seeds=1)
        print(mutation.table([mutant]).split("\n")[1], flush=True)
    print(mutation.table(found).split("\n")[-1])


if __name__ == "__main__":
    import sys

    mutate_hopper(*map(int, sys.argv[1:]))
