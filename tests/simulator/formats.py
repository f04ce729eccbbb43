"""Number formats and the arithmetic PTX defines on them, over NumPy arrays of raw bits."""

from __future__ import annotations

import numpy as np

U16, U32, U64 = np.uint16, np.uint32, np.uint64
F32, F64 = np.float32, np.float64
CANONICAL_NAN_BF16 = U16(0x7FFF)


def bf16_to_f32(x: np.ndarray) -> np.ndarray:
    return (x.astype(U32) << U32(16)).view(F32)


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    """Round to nearest even; NaN becomes the canonical 0x7FFF (PTX ISA 9.7.9.21 cvt)."""
    bits = np.ascontiguousarray(x, F32).view(U32)
    rounded = ((bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16)).astype(U16)
    return np.where(np.isnan(x), CANONICAL_NAN_BF16, rounded)


def f32_to_bf16_rz(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, F32).view(U32)
    return np.where(np.isnan(x), CANONICAL_NAN_BF16, (bits >> U32(16)).astype(U16))


def f16_to_f32(x: np.ndarray) -> np.ndarray:
    return x.view(np.float16).astype(F32)


def f32_to_f16(x: np.ndarray) -> np.ndarray:
    """Round to nearest even; NaN becomes 0x7FFF."""
    return np.where(np.isnan(x), U16(0x7FFF), np.asarray(x, F32).astype(np.float16).view(U16))


def fma32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a*b + c with one rounding (PTX ISA 9.7.3.6): the product of two floats is exact in double."""
    product = a.astype(F64) * b
    total = product + c
    bits = total.view(U64)
    tie = (bits & U64(0x1FFFFFFF)) == U64(0x10000000)
    small = (np.abs(total) < 1.2e-38) & (total != 0)
    result = total.astype(F32)
    if tie.any() or small.any():
        # Round to odd: the double's last bit records what its own rounding lost.
        c64 = c.astype(F64)
        high = total - product
        error = (product - (total - high)) + (c64 - high)
        inexact = np.isfinite(total) & (error != 0) & ((bits & U64(1)) == 0)
        toward = np.where((error > 0) == (total > 0), U64(1), U64(0xFFFFFFFFFFFFFFFF))
        odd = np.where(inexact, np.where(toward == 1, bits + U64(1), bits - U64(1)), bits)
        result = odd.view(F64).astype(F32)
    return result


def ftz(x: np.ndarray) -> np.ndarray:
    """Subnormals to zero of the same sign."""
    return np.where(np.abs(x) < F32(1.17549435e-38), np.copysign(F32(0), x), x)


def ex2(x: np.ndarray) -> np.ndarray:
    """2^x rounded to nearest; the chip's result is within 2 ulp (PTX ISA 9.7.3.21)."""
    return np.exp2(x.astype(F64)).astype(F32)


def lg2(x: np.ndarray) -> np.ndarray:
    return np.log2(x.astype(F64)).astype(F32)


def rcp(x: np.ndarray) -> np.ndarray:
    return (1.0 / x.astype(F64)).astype(F32)


def rsqrt(x: np.ndarray) -> np.ndarray:
    return (1.0 / np.sqrt(x.astype(F64))).astype(F32)


def add16(a: np.ndarray, b: np.ndarray, kind: str) -> np.ndarray:
    """Sum of raw bf16 or f16 values; a float32 sum rounded again is exact rounding (24 >= 2*11 + 2 bits)."""
    if kind.startswith("bf16"):
        return f32_to_bf16(bf16_to_f32(a) + bf16_to_f32(b))
    return f32_to_f16(f16_to_f32(a) + f16_to_f32(b))


def pair_map(function, *operands: np.ndarray) -> np.ndarray:
    """Applies a function of 16-bit halves to packed 32-bit registers."""
    halves = [np.ascontiguousarray(x).view(U16) for x in operands]
    return np.ascontiguousarray(function(*halves)).view(U32)
