"""Test vectors of the device pipeline: recorded once on a GPU, compared in the simulator by test_simulator_vectors.py.

On a Hopper GPU, from the repository root: `PYTHONPATH=.:tests python -m simulator.record_vectors OUT.npz`.

Inputs are random integers over powers of two, the same on every machine; their digest is recorded too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from pathlib import Path

import numpy as np

from . import cute_products
from .pipeline import STAGE_BITS, Stages, task_arrays

VECTORS = Path(__file__).with_name("vectors_h200.npz")
SEED = 11
# name, documents, group, options of cases.Case, (backend, dq_accum) of the whole pipelines that are run
GRADIENT_CASES = (
    ("two_tokens", (2,), 8, {}, (("simple", "fp32"),)),
    ("one_document", (5,), 8, {}, (("sm90", "fp32"), ("sm90", "bf16"))),
    ("dirty", (3, 0, 2), 16, {"selection": "dirty", "topk": 4, "gap_blocks": 1}, (("sm90", "fp32"),)),
)
TASK_CASES = ("everything", "permuted_items", "level_major", "rows_8_9")  # of tests/cases.py: the task table alone
POSTPROCESS = (("simple", "fp16"), ("sm90", "bf16"), ("sm90", "fp32"))


def is_exact(name: str) -> bool:
    """Whether an array must agree bit for bit: inputs, integer tables, products of integers, and the postprocess, which
    rounds once."""
    return name.startswith(("postprocess/", "cute/")) or "/tasks/" in name or name.endswith("/digest")


def _inputs(documents: tuple[int, ...], group: int, options: dict):
    """CaseData whose values are k / 64 with |k| <= 128, `out` and `lse` from float64."""
    import torch

    import cases
    from msa_ext import reference

    data = cases.make(cases.Case("vectors", documents, group=group, **options), seed=SEED)
    rng = np.random.default_rng(SEED)
    for name in ("q", "grad_out", "k_aligned", "v_aligned"):
        old = getattr(data, name)
        values = torch.from_numpy(rng.integers(-128, 129, tuple(old.shape)) / 64).to(old.dtype)
        setattr(data, name, torch.where(old.isnan() | (old == 0), old, values))  # padding stays
    data.out, data.lse = reference.forward(
        data.q, data.k_aligned, data.v_aligned, data.schedule, softmax_scale=data.softmax_scale,
        compute_dtype=torch.float64,
    )  # fmt: skip
    data.out, data.lse = data.out.to(torch.bfloat16), data.lse.float()
    return data


def _moved(data, device: str):
    names = ("q", "k_aligned", "v_aligned", "grad_out", "lse", "out")
    tensors = {name: getattr(data, name).to(device) for name in names}
    return dataclasses.replace(data, schedule=data.schedule.to(device), **tensors)


def _digest(data) -> np.ndarray:
    """SHA-256 of every input that a kernel may read."""
    import torch

    schedule, hasher = data.schedule, hashlib.sha256()
    edges = schedule.q_indices[:, : int(schedule.row_ptr[:, -1].max())]
    items = schedule.scheduler_metadata[: int(schedule.work_count)]
    for tensor in (*data.arguments()[:6], schedule.row_ptr, edges, items):
        hasher.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return np.frombuffer(hasher.digest(), np.uint8)


def _values(tensor) -> np.ndarray:
    """The values of a float32 tensor, the bits of a 16-bit one."""
    import torch

    tensor = tensor.detach().cpu().contiguous()
    return tensor.view(torch.int16).numpy().view(np.uint16) if tensor.element_size() == 2 else tensor.numpy().copy()


def _postprocess(stages: Stages) -> dict[str, np.ndarray]:
    """From pools of a short period, so that the outputs compress."""
    import torch

    stages.run("clear")
    of_dq = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[stages.dq_accum]
    for number, (name, kind) in enumerate((("dq", of_dq), ("dk", torch.float32), ("dv", torch.float32))):
        pool = stages.section(f"{name}_pool", kind)
        index = torch.arange(pool.numel(), device=pool.device)
        pool.copy_(((index * 37 + number) % 251 - 125) / 96)
    return dict(zip(("dq", "dk", "dv"), map(_values, stages.run("postprocess"))))


def compute(device: str) -> dict[str, np.ndarray]:
    """Every vector, by name, computed by msa_ext's kernels on `device` ("cpu" inside a `Simulator`)."""
    import torch

    import cases

    results: dict[str, np.ndarray] = {}

    def add(prefix: str, arrays: dict[str, np.ndarray]) -> None:
        results.update({f"{prefix}/{name}": array for name, array in arrays.items()})

    for name, documents, group, options, variants in GRADIENT_CASES:
        data = _inputs(documents, group, options)
        add(name, {"digest": _digest(data)})
        data = _moved(data, device)
        stages = Stages(data, "simple", "fp32")
        stages.run("delta")
        add(f"{name}/delta", {s: _values(stages.section(s, torch.float32)) for s in ("neg_lse", "delta")})
        add(f"{name}/tasks", task_arrays(data, group))
        for backend, accum in variants:
            gradients = Stages(data, backend, accum).run(*STAGE_BITS, kv_grad_dtype=torch.float32)
            add(f"{name}/{backend}-{accum}", dict(zip(("dq", "dk", "dv"), map(_values, gradients))))
    for backend, accum in POSTPROCESS:
        data = _moved(_inputs(*GRADIENT_CASES[0][1:4]), device)
        add(f"postprocess/{backend}-{accum}", _postprocess(Stages(data, backend, accum)))
    for name in TASK_CASES:
        data = _moved(cases.make(cases.CASES[name], seed=SEED), device)
        add(f"{name}/tasks", task_arrays(data, cases.CASES[name].group))
    first, *others = cute_products.loaded("sm_90a", device).values()
    add("cute", {"product": first, "same": np.array([np.array_equal(first, other) for other in others])})
    return results


def simulate(mode: str, seed: int) -> dict[str, np.ndarray]:
    """The same from the simulated H200.

    Raises:
        RuntimeError: a check of the simulator fired.
    """
    import torch

    torch.set_num_threads(1)
    from simulator import Simulator

    with Simulator("h200", num_sms=2, mode=mode, seed=seed):
        return compute("cpu")


def main() -> None:
    import torch

    if len(sys.argv) != 2:
        sys.exit("usage: python -m simulator.record_vectors OUT.npz")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        sys.exit("record_vectors: expected a GPU of compute capability 9.x")
    first, second = compute("cuda"), compute("cuda")
    unstable = [name for name in first if is_exact(name) and not np.array_equal(first[name], second[name])]
    if unstable:
        sys.exit(f"record_vectors: two runs differ in {', '.join(unstable)}")
    about = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    np.savez_compressed(sys.argv[1], device=np.array(about), **first)
    print(f"{sys.argv[1]}: {len(first)} arrays, {Path(sys.argv[1]).stat().st_size} bytes, {about}")


if __name__ == "__main__":
    main()
