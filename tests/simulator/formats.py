"""Number formats and the arithmetic PTX defines on them, over NumPy arrays of raw bits."""

from __future__ import annotations

import numpy as np

U16, U32, U64 = np.uint16, np.uint32, np.uint64
F32, F64 = np.float32, np.float64
CANONICAL_NAN_BF16 = U16(0x7FFF)
CANONICAL_NAN_F32 = U32(0x7FFFFFFF).view(F32)
_REAL = {"f16": np.float16, "f32": F32, "f64": F64}


def bf16_to_f32(x: np.ndarray) -> np.ndarray:
    return (x.astype(U32) << U32(16)).view(F32)


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    """Round to nearest even; NaN becomes the canonical 0x7FFF (PTX ISA 9.7.9.21 cvt)."""
    bits = np.ascontiguousarray(x, F32).view(U32)
    rounded = ((bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16)).astype(U16)
    return np.where(np.isnan(x), CANONICAL_NAN_BF16, rounded)


def f16_to_f32(x: np.ndarray) -> np.ndarray:
    return x.view(np.float16).astype(F32)


def f32_to_f16(x: np.ndarray) -> np.ndarray:
    """Round to nearest even; NaN becomes 0x7FFF."""
    return np.where(np.isnan(x), U16(0x7FFF), np.asarray(x, F32).astype(np.float16).view(U16))


def to_f64(bits: np.ndarray, kind: str) -> np.ndarray:
    """Raw bits of any floating-point format to doubles, exactly."""
    return (bf16_to_f32(bits) if kind == "bf16" else bits.view(_REAL[kind])).astype(F64)


def narrow(x: np.ndarray, kind: str, rounding: str = "rn") -> np.ndarray:
    """Doubles to raw bits of f16, bf16 or f32, rounded once (PTX ISA 6.5.2); f64 only keeps them."""
    if kind == "f64":
        return x.view(U64)
    if kind == "bf16":  # through a float rounded to odd
        odd = narrow(x, "f32", "rz")
        bits = f32_to_bf16((odd | (to_f64(odd, "f32") != x)).view(F32))
    elif kind == "f16":
        bits = np.where(np.isnan(x), U16(0x7FFF), x.astype(np.float16).view(U16))
    else:
        bits = x.astype(F32).view(U32)
    if rounding == "rn":
        return bits
    inward = {"rz": x == x, "rm": x > 0, "rp": x < 0}[rounding]
    excess = np.abs(to_f64(bits, kind)) - np.abs(x)
    return bits - (inward & (excess > 0)) + (~inward & (excess < 0))


def add_odd(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Sum of doubles rounded to odd: rounding it again to a narrower format is one rounding."""
    total = x + y
    high = total - x
    error = (x - (total - high)) + (y - high)
    bits = total.view(U64)
    inexact = np.isfinite(total) & (error != 0) & ((bits & U64(1)) == 0)
    return np.where(inexact, np.where((error > 0) == (total > 0), bits + U64(1), bits - U64(1)), bits).view(F64)


def integer_to_f64(x: np.ndarray) -> np.ndarray:
    """Exact to 32 bits, rounded to odd above."""
    if x.dtype.itemsize < 8:
        return x.astype(F64)
    half, low = x.dtype.type(32), x.dtype.type(0xFFFFFFFF)
    return add_odd((x >> half).astype(F64) * 2.0**32, (x & low).astype(F64))


def fma32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a*b + c with one rounding (PTX ISA 9.7.3.6): the product of two floats is exact in double."""
    product = a.astype(F64) * b
    total = product + c
    bits = total.view(U64)
    tie = (bits & U64(0x1FFFFFFF)) == U64(0x10000000)
    small = (np.abs(total) < 1.2e-38) & (total != 0)
    if tie.any() or small.any():
        return add_odd(product, c.astype(F64)).astype(F32)
    return total.astype(F32)


def ftz(x: np.ndarray) -> np.ndarray:
    """Subnormals to zero of the same sign."""
    return np.where(np.abs(x) < F32(1.17549435e-38), np.copysign(F32(0), x), x)


def minimum(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The lesser, a number rather than NaN, -0 rather than +0 (PTX ISA 9.7.3.11)."""
    return np.where((x < y) | (y != y) | ((x == y) & np.signbit(x)), x, y)


def maximum(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The greater, a number rather than NaN, +0 rather than -0 (PTX ISA 9.7.3.12)."""
    return np.where((x > y) | (y != y) | ((x == y) & np.signbit(y)), x, y)


def relu(x: np.ndarray) -> np.ndarray:
    """Negative to 0; NaN stays."""
    return np.where(x <= 0, x.dtype.type(0), x)


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
