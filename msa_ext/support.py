"""What this installation can run, and why not more."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache

import torch

from . import _runtime


@dataclass(frozen=True)
class Backend:
    """One way to compute the backward."""

    name: str
    runs_on: str
    default_dq_accum: str
    dq_accums: tuple[str, ...]
    deterministic: bool
    major: int  # compute capability, 0 = every built architecture, -1 = CPU
    archs: tuple[str, ...] = ()  # what its machine code is bound to, e.g. ("90a",)

    def runs(self, capability: tuple[int, int]) -> bool:
        """Whether a CUDA device of this compute capability can run it."""
        return f"{capability[0]}{capability[1]}a" in self.archs and self.major in (0, capability[0])


REFERENCE = Backend("reference", "CPU", "fp32", ("bf16", "fp16", "fp32"), True, -1)


@cache
def cuda_backends() -> dict[str, Backend]:
    """The CUDA backends that are built, by name.

    Raises:
        RuntimeError: the extension does not load.
    """
    archs = tuple(_runtime.extension().built_archs())
    backends = {}
    for kernel in _runtime.extension().main_kernels():
        runs_on = f"compute capability {kernel['major']}.x" if kernel["major"] else "every built architecture"
        backends[kernel["name"]] = Backend(
            kernel["name"],
            runs_on,
            kernel["default_dq_accum"],
            tuple(kernel["dq_accums"]),
            False,
            kernel["major"],
            archs,
        )
    return backends


@cache
def usable_backends(capability: tuple[int, int]) -> dict[str, Backend]:
    """The CUDA backends that a device of this compute capability can run, by name: its own, then `simple`."""
    usable = [backend for backend in cuda_backends().values() if backend.runs(capability)]
    usable.sort(key=lambda backend: backend.major, reverse=True)
    return {backend.name: backend for backend in usable}


def default_backend(capability: tuple[int, int]) -> str | None:
    """The backend for a CUDA device when none is named; None if it can run none."""
    return next(iter(usable_backends(capability)), None)


def explain() -> str:
    """The support table as text: backends, what they run on, default dq_accum, and what is missing and why."""
    backends = [REFERENCE]
    problem = ""
    try:
        backends += cuda_backends().values()
        archs = ", ".join(_runtime.extension().built_archs()) or "none"
    except RuntimeError as error:
        problem, archs = str(error), "none"
    lines = [f"{'backend':10} {'runs on':24} {'dq_accum (default first)':26} deterministic"]
    for backend in backends:
        others = [accum for accum in backend.dq_accums if accum != backend.default_dq_accum]
        accums = ", ".join([backend.default_dq_accum, *others])
        lines.append(f"{backend.name:10} {backend.runs_on:24} {accums:26} {'yes' if backend.deterministic else 'no'}")
    lines.append("reference takes every dq_accum and accumulates in float32 whichever is named")
    lines.append(f"built architectures: {archs}")
    lines += [f"  {line}" for line in _devices(problem)]
    if problem:
        lines.append(f"CUDA backends unavailable: {problem}")
    return "\n".join(lines)


def _devices(problem: str) -> list[str]:
    if not torch.cuda.is_available():
        return ["no CUDA device visible to torch: tensors on the CPU use the reference"]
    lines = []
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        backend = None if problem else default_backend(capability)
        name = torch.cuda.get_device_name(index)
        lines.append(f"cuda:{index} {name} ({capability[0]}.{capability[1]}): {backend or 'no backend is built'}")
    return lines


def info_text() -> str:
    """Versions, built architectures, devices and the support table."""
    from . import __version__

    versions = (
        f"msa_ext {__version__}, torch {torch.__version__} (CUDA {torch.version.cuda}), "
        f"Python {platform.python_version()}"
    )
    return f"{versions}\n{explain()}"
