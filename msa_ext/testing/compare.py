"""Gradients against a float64 reference: relative L2, max abs, exact zeros, and the tolerances they are held to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_ABS_TOLERANCE = 0.02  # of max|ref|
_RELATIVE_L2 = {  # dq_accum -> (dq, dk, dv), inputs N(0, 1)
    "bf16": (7e-3, 4e-3, 4e-3),
    "fp16": (7e-3, 4e-3, 4e-3),
    "fp32": (4e-3, 4e-3, 4e-3),
}
_NEGLIGIBLE_RMS = 1e-6  # a reference below it (inputs are of order 1) is rounding: errors are then absolute
_ABSOLUTE_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Error:
    """How far one gradient is from its reference."""

    name: str
    relative_l2: float  # ||x - ref|| / ||ref||
    max_abs: float  # max|x - ref| / max|ref|
    nonzero_at_zero: int  # elements that must be exactly zero and are not
    non_finite: int
    tolerance: float
    negligible: bool  # the reference vanishes: both errors are absolute, per element

    @property
    def l2_limit(self) -> float:
        return min(self.tolerance, _ABSOLUTE_TOLERANCE) if self.negligible else self.tolerance

    @property
    def max_limit(self) -> float:
        return self.l2_limit if self.negligible else MAX_ABS_TOLERANCE

    @property
    def passed(self) -> bool:
        """False for NaN anywhere: no comparison with it holds."""
        return (
            self.non_finite == 0
            and self.nonzero_at_zero == 0
            and self.relative_l2 <= self.l2_limit
            and self.max_abs <= self.max_limit
        )

    def __str__(self) -> str:
        kind = "absolute" if self.negligible else "relative"
        text = f"{self.name}: {kind} L2 {self.relative_l2:.2e} (<= {self.l2_limit:.0e})"
        text += f", max {self.max_abs:.2e} (<= {self.max_limit:.0e})"
        if self.nonzero_at_zero:
            text += f", {self.nonzero_at_zero} elements not exactly zero"
        if self.non_finite:
            text += f", {self.non_finite} not finite"
        return text + (" ok" if self.passed else " FAIL")


def compare(name: str, got: Tensor, reference: Tensor, tolerance: float, must_be_zero: Tensor) -> Error:
    """Measures `got` against `reference`, both `[rows, heads, D]`, on the CPU.

    Args:
        tolerance: limit of the relative L2 error.
        must_be_zero: bool `[rows, heads]`, where `got` must be exactly zero.

    Raises:
        ValueError: shapes that differ.
    """
    if got.shape != reference.shape:
        raise ValueError(f"{name}: expected shape {list(reference.shape)}, got {list(got.shape)}")
    if must_be_zero.shape != reference.shape[:-1]:
        expected = list(reference.shape[:-1])
        raise ValueError(f"{name}: must_be_zero: expected shape {expected}, got {list(must_be_zero.shape)}")
    got = got.detach().to("cpu", torch.float64)
    reference = reference.to("cpu", torch.float64)
    difference = got - reference
    root_count = max(1, reference.numel()) ** 0.5
    norm = float(reference.norm())
    peak = float(reference.abs().amax()) if reference.numel() else 0.0
    max_difference = float(difference.abs().amax()) if reference.numel() else 0.0
    negligible = norm <= _NEGLIGIBLE_RMS * root_count
    return Error(
        name,
        relative_l2=float(difference.norm()) / (root_count if negligible else norm),
        max_abs=max_difference / (1.0 if negligible else peak),
        nonzero_at_zero=int(((got != 0) & must_be_zero.cpu()[..., None]).sum()),
        non_finite=int((~torch.isfinite(got)).sum()),
        tolerance=tolerance,
        negligible=negligible,
    )


def compare_all(
    got: tuple[Tensor, Tensor, Tensor],
    reference: tuple[Tensor, Tensor, Tensor],
    dead_rows: Tensor,
    *,
    dq_accum: str = "fp32",
    tolerance: float | None = None,
) -> list[Error]:
    """The `Error` of dq, dk and dv.

    Args:
        got, reference: (dq `[T, Hq, D]`, dk, dv `[W, Hkv, D]`).
        dead_rows: bool `[T, Hq]`, tokens without a visible key: their dq must be exactly zero, as must dk and dv
            of keys nobody sees (whose reference dv is zero).
        dq_accum: whose tolerances hold; `tolerance` overrides all three.
    """
    limits = _RELATIVE_L2[dq_accum] if tolerance is None else (tolerance,) * 3
    dead_keys = (reference[2] == 0).all(dim=-1)
    return [
        compare(*arguments)
        for arguments in zip(("dq", "dk", "dv"), got, reference, limits, (dead_rows, dead_keys, dead_keys))
    ]


def check_all(got, reference, dead_rows, **limits) -> None:
    """Raises AssertionError with all three errors if a gradient is out of tolerance; see `compare_all`."""
    errors = compare_all(got, reference, dead_rows, **limits)
    if not all(error.passed for error in errors):
        raise AssertionError("\n".join(map(str, errors)))
