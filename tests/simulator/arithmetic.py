"""Arithmetic that is not a plain expression, and conversions (PTX ISA 9.1)."""

from __future__ import annotations

import functools

import numpy as np

from . import formats
from .cta import LANES
from .formats import F32, U16, U32, U64
from .operands import SIGNED, UNSIGNED, element_bytes, items_of, put, reader, widen
from .ptx import Instruction, PtxError

# ---- integer leftovers ---------------------------------------------------------------------------


def _divide(a: np.ndarray, b: np.ndarray, remainder: bool) -> np.ndarray:
    """Truncating division; by zero gives unspecified values, here all ones (9.7.1.8)."""
    safe = np.where(b == 0, a.dtype.type(1), b)
    if a.dtype.kind == "u":
        out = a % safe if remainder else a // safe
    elif remainder:
        out = np.fmod(a, safe)
    else:
        out = (a - np.fmod(a, safe)) // safe
    return np.where(b == 0, a.dtype.type(-1 if a.dtype.kind == "i" else np.iinfo(a.dtype).max), out)


def build_div(program, x: Instruction):
    kind = x.parts[-1]
    n = element_bytes(kind)
    a, b = reader(program, x.operands[1], n), reader(program, x.operands[2], n)
    raw = UNSIGNED[n]
    if kind in ("f32", "f64"):
        real = F32 if kind == "f32" else np.float64
        flush, approximate = "ftz" in x.parts, "approx" in x.parts

        def divide(w, R, m):
            v, u = a(w, R).view(real), b(w, R).view(real)
            if flush:
                v, u = formats.ftz(v), formats.ftz(u)
            out = v / u
            if approximate:  # 9.7.3.8: the reciprocal of a large divisor is 0
                out = np.where(np.abs(u) > F32(2.0**126), v * np.copysign(F32(0), u), out)
            put(R, x.operands[0], (formats.ftz(out) if flush else out).view(raw), m)

        return divide
    view = SIGNED[n] if kind[0] == "s" else raw
    remainder = x.parts[0] == "rem"
    return lambda w, R, m: put(
        R, x.operands[0], _divide(a(w, R).view(view), b(w, R).view(view), remainder).view(raw), m
    )


def _unary(function, n_in: int):
    def make(program, x: Instruction):
        source = reader(program, x.operands[1], n_in or element_bytes(x.parts[-1]))
        return lambda w, R, m: put(R, x.operands[0], function(source(w, R)), m)

    return make


def _popcount(v):
    return np.unpackbits(v.view(np.uint8).reshape(LANES, -1), axis=1).sum(1).astype(U32)


def _leading_zeros(v):
    bits = np.unpackbits(v.view(np.uint8).reshape(LANES, -1)[:, ::-1], axis=1)
    return np.where(bits.any(1), bits.argmax(1), bits.shape[1]).astype(U32)


def _reverse_bits(v):
    raw = v.view(np.uint8).reshape(LANES, -1)
    bits = np.unpackbits(raw, axis=1, bitorder="little")[:, ::-1]
    return np.packbits(np.ascontiguousarray(bits), axis=1, bitorder="little").view(v.dtype)[:, 0]


build_popc, build_clz, build_brev = (_unary(f, 0) for f in (_popcount, _leading_zeros, _reverse_bits))


def build_bfind(program, x: Instruction):
    kind = x.parts[-1]
    source = reader(program, x.operands[1], element_bytes(kind))
    bits = 8 * element_bytes(kind)

    def bfind(w, R, m):
        v = source(w, R)
        if kind[0] == "s":
            v = np.where(v.view(SIGNED[bits // 8]) < 0, ~v, v)
        zeros = _leading_zeros(v).astype(np.int64)
        found = zeros if "shiftamt" in x.parts else bits - 1 - zeros
        put(R, x.operands[0], np.where(zeros == bits, 0xFFFFFFFF, found).astype(U32), m)

    return bfind


def build_bfe(program, x: Instruction):
    """9.7.1.19."""
    kind = x.parts[-1]
    n = element_bytes(kind)
    a, b, c = reader(program, x.operands[1], n), reader(program, x.operands[2], 4), reader(program, x.operands[3], 4)

    def bfe(w, R, m):
        out = np.zeros(LANES, UNSIGNED[n])
        for i, (v, p, length) in enumerate(zip(a(w, R), b(w, R) & U32(255), c(w, R) & U32(255))):
            v, p, length, msb = int(v), int(p), int(length), 8 * n - 1
            field = (v >> p) & ((1 << length) - 1)
            if kind[0] == "s" and length:
                sign = v >> min(p + length - 1, msb) & 1
                if sign:
                    have = min(length, max(0, msb + 1 - p))
                    field |= -1 << have
            out[i] = field % (1 << 8 * n)
        put(R, x.operands[0], out, m)

    return bfe


def build_bfi(program, x: Instruction):
    """9.7.1.20: inserts `d` bits of a into b at c."""
    n = element_bytes(x.parts[-1])
    a, b = reader(program, x.operands[1], n), reader(program, x.operands[2], n)
    c, d = reader(program, x.operands[3], 4), reader(program, x.operands[4], 4)
    limit = (1 << 8 * n) - 1

    def bfi(w, R, m):
        positions, lengths = c(w, R) & U32(255), d(w, R) & U32(255)
        if (positions == positions[0]).all() and (lengths == lengths[0]).all():
            p, length = int(positions[0]), int(lengths[0])
            field = ((1 << length) - 1) << p & limit
            shifted = a(w, R) << UNSIGNED[n](p) if p < 8 * n else np.zeros(LANES, UNSIGNED[n])
            out = (shifted & UNSIGNED[n](field)) | (b(w, R) & UNSIGNED[n](limit ^ field))
        else:
            out = np.zeros(LANES, UNSIGNED[n])
            for i in range(LANES):
                p, length = int(positions[i]), int(lengths[i])
                field = ((1 << length) - 1) << p & limit
                out[i] = (int(a(w, R)[i]) << p & field) | (int(b(w, R)[i]) & (limit ^ field))
        put(R, x.operands[0], out, m)

    return bfi


# Source byte of byte i of the result, by the two low bits of the selector.
_PRMT_MODES = {
    "f4e": lambda c, i: c + i, "b4e": lambda c, i: c - i, "rc8": lambda c, i: c, "ecl": np.maximum, "ecr": np.minimum,
    "rc16": lambda c, i: 2 * (c & 1) + (i & 1),
}  # fmt: skip


def build_prmt(program, x: Instruction):
    """9.7.9.7."""
    mode = _PRMT_MODES[x.parts[2]] if len(x.parts) > 2 else None
    a, b, c = (reader(program, v, 4) for v in x.operands[1:4])

    def prmt(w, R, m):
        pool = np.stack([a(w, R), b(w, R)], 1).view(np.uint8).reshape(LANES, 8)
        selector = c(w, R)
        out = np.zeros((LANES, 4), np.uint8)
        for i in range(4):
            s = (selector >> U32(4 * i)) & U32(15) if mode is None else mode((selector & U32(3)).astype(np.int64), i)
            value = pool[np.arange(LANES), (s & 7).astype(np.int64)]
            out[:, i] = np.where(s & 8, np.where(value & 128, 255, 0), value) if mode is None else value
        put(R, x.operands[0], out.view(U32)[:, 0], m)

    return prmt


def build_shf(program, x: Instruction):
    """9.7.8.7 funnel shift."""
    left, clamp = x.parts[1] == "l", "clamp" in x.parts
    a, b, c = (reader(program, v, 4) for v in x.operands[1:4])

    def shf(w, R, m):
        n = c(w, R)
        n = np.minimum(n, U32(32)) if clamp else n & U32(31)
        both = b(w, R).astype(U64) << U64(32) | a(w, R)
        n = n.astype(U64)
        out = ((both << n) >> U64(32)) if left else both >> n
        put(R, x.operands[0], (out & U64(0xFFFFFFFF)).astype(U32), m)

    return shf


def build_lop3(program, x: Instruction):
    """9.7.8.6."""
    targets = items_of(x.operands[0])
    predicate = reader(program, x.operands[5], 0) if len(targets) > 1 else None
    a, b, c = (reader(program, v, 4) for v in x.operands[1:4])
    table = x.operands[4].value

    def lop3(w, R, m):
        va, vb, vc = a(w, R), b(w, R), c(w, R)
        out = np.zeros(LANES, U32)
        for i in range(8):
            if table >> i & 1:
                out |= (va if i & 4 else ~va) & (vb if i & 2 else ~vb) & (vc if i & 1 else ~vc)
        put(R, targets[0], out, m)
        if predicate:
            p = predicate(w, R)
            put(R, targets[1], (out != 0) & p if "and" in x.parts else (out != 0) | p, m)

    return lop3


def _high_product(a: np.ndarray, b: np.ndarray, kind: str) -> np.ndarray:
    n = element_bytes(kind)
    view = SIGNED[n] if kind[0] == "s" else UNSIGNED[n]
    return np.array(
        [(int(p) * int(q) >> 8 * n) % (1 << 8 * n) for p, q in zip(a.view(view), b.view(view))], UNSIGNED[n]
    )


def build_mul_hi(program, x: Instruction):
    kind = x.parts[-1]
    sources = [reader(program, v, element_bytes(kind)) for v in x.operands[1:]]

    def mul_hi(w, R, m):
        v = [s(w, R) for s in sources]
        out = _high_product(v[0], v[1], kind)
        put(R, x.operands[0], out + v[2] if len(v) > 2 else out, m)

    return mul_hi


def build_carry(program, x: Instruction):
    """9.7.2: add.cc, addc, sub.cc, subc, mad.cc, madc; CC.CF is the register after the last."""
    op, kind = x.parts[0], x.parts[-1]
    raw = UNSIGNED[element_bytes(kind)]
    sources = [reader(program, v, element_bytes(kind)) for v in x.operands[1:]]

    def carry(w, R, m):
        a, b, *c = (s(w, R) for s in sources)
        if c:
            a, b = _high_product(a, b, kind) if "hi" in x.parts else a * b, c[0]
        carried = R[-1].astype(raw) if op[-1] == "c" else raw(0)
        if op.startswith("sub"):
            first = a - b
            out, carries = first - carried, (a < b) | (first < carried)
        else:
            first = a + b
            out = first + carried
            carries = (first < a) | (out < first)
        put(R, x.operands[0], out, m)
        if "cc" in x.parts:
            R[-1] = carries if m is None else np.where(m, carries, R[-1])

    return carry


# ---- floating point ------------------------------------------------------------------------------


def build_f32x2(program, x: Instruction):
    """9.7.3: add, mul, fma of packed pairs, each half rounded once."""
    op = x.parts[0]
    sources = [reader(program, v, 8) for v in x.operands[1:]]

    def f32x2(w, R, m):
        v = [np.ascontiguousarray(s(w, R)).view(F32) for s in sources]
        if "ftz" in x.parts:
            v = [formats.ftz(u) for u in v]
        out = {"add": lambda: v[0] + v[1], "sub": lambda: v[0] - v[1], "mul": lambda: v[0] * v[1]}
        result = formats.fma32(v[0], v[1], v[2]) if op == "fma" else out[op]()
        if "ftz" in x.parts:
            result = formats.ftz(result)
        put(R, x.operands[0], np.ascontiguousarray(result).view(U64), m)

    return f32x2


def build_half(program, x: Instruction):
    """9.7.4: add, sub, mul, fma, min, max, neg, abs of f16, bf16 and their pairs."""
    sources = [reader(program, v, element_bytes(x.parts[-1])) for v in x.operands[1:]]
    function = half_function(x.parts[0], x.parts[-1], "NaN" in x.parts, "relu" in x.parts)
    return lambda w, R, m: put(R, x.operands[0], function(*(s(w, R) for s in sources)), m)


def half_function(op: str, kind: str, nan: bool = False, relu: bool = False):
    """Function of raw bits, rounded once; `nan`: min and max propagate NaN."""
    base = kind.removesuffix("x2")

    def half(*bits):
        if op == "neg":
            return bits[0] ^ U16(0x8000)
        if op == "abs":
            return bits[0] & U16(0x7FFF)
        v = [formats.to_f64(b, base) for b in bits]
        if op == "fma":
            out = formats.add_odd(v[0] * v[1], v[2])
        elif op in ("min", "max"):
            out = (formats.minimum if op == "min" else formats.maximum)(*v)
            if nan:
                out = np.where(np.isnan(v[0]) | np.isnan(v[1]), np.nan, out)
        else:
            out = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[op](*v)
        return formats.narrow(formats.relu(out) if relu else out, base)

    return half if base == kind else functools.partial(formats.pair_map, half)


def build_math(program, x: Instruction):
    op = x.parts[0]
    flush = "ftz" in x.parts
    source = reader(program, x.operands[1], 4)
    function = {
        "ex2": formats.ex2, "lg2": formats.lg2, "rcp": formats.rcp, "rsqrt": formats.rsqrt, "sqrt": np.sqrt,
        "tanh": np.tanh, "sin": np.sin, "cos": np.cos,
    }[op]  # fmt: skip

    def math(w, R, m):
        v = source(w, R).view(F32)
        v = function(formats.ftz(v) if flush else v).astype(F32)
        put(R, x.operands[0], (formats.ftz(v) if flush else v).view(U32), m)

    return math


def build_minmax(program, x: Instruction):
    """min/max.f32 with .NaN or three inputs (9.7.3.11, 9.7.3.12)."""
    sources = [reader(program, v, 4) for v in x.operands[1:]]
    function = formats.minimum if x.parts[0] == "min" else formats.maximum

    def minmax(w, R, m):
        v = [s(w, R).view(F32) for s in sources]
        if "ftz" in x.parts:
            v = [formats.ftz(u) for u in v]
        out = functools.reduce(function, v)
        if "NaN" in x.parts:
            out = np.where(np.isnan(v).any(0), formats.CANONICAL_NAN_F32, out)
        put(R, x.operands[0], out.view(U32), m)

    return minmax


_FLOATS = ("f16", "bf16", "f32", "f64")
_INTEGRAL = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def build_cvt(program, x: Instruction):
    """9.7.9.21. Integer to integer without .sat is inlined."""
    *qualifiers, to, source_kind = x.parts[1:]
    base, target = to.removesuffix("x2"), x.operands[0]
    rounding = next((q for q in qualifiers if q in _INTEGRAL or q in ("rz", "rm", "rp")), "rn")
    flush, saturate, relu = "ftz" in qualifiers, "sat" in qualifiers, "relu" in qualifiers
    known = {"rn", "ftz", "sat", rounding}
    if base != to or relu:
        known = {"rn", "rz", "relu"} if source_kind == "f32" else set()
    elif base == "f64":
        known -= {"rz", "rm", "rp"}
    truncates = source_kind in _FLOATS and base not in _FLOATS
    if not known.issuperset(qualifiers) or (truncates and rounding not in _INTEGRAL):
        raise PtxError(f"{x.opcode} is not modelled")
    n, source_bytes = element_bytes(base), element_bytes(source_kind)
    sources = [reader(program, v, source_bytes) for v in x.operands[1:]]
    view = SIGNED[source_bytes] if source_kind[0] == "s" else UNSIGNED[source_bytes]
    limits = np.iinfo(SIGNED[n] if to[0] == "s" else UNSIGNED[n])
    nan = 1 << 8 * n - 1 if source_kind == "f64" or n == 8 else 0
    plain = source_kind == "f32" and {"rn", "relu"}.issuperset(qualifiers)
    nearest = {"f16": formats.f32_to_f16, "bf16": formats.f32_to_bf16}.get(base) if plain else None

    def clamp(v: np.ndarray) -> np.ndarray:
        clamped = [min(max(int(u), int(limits.min)), int(limits.max)) if u == u else nan for u in v]
        return np.array([u % (1 << 8 * n) for u in clamped], UNSIGNED[n])

    def convert(bits: np.ndarray) -> np.ndarray:
        if nearest:
            return nearest(formats.relu(bits.view(F32)) if relu else bits.view(F32))
        if source_kind in _FLOATS:
            v = formats.to_f64(bits, source_kind)
            v = formats.ftz(v) if flush and source_kind == "f32" else v
            v = _INTEGRAL[rounding](v) if rounding in _INTEGRAL else v
        else:
            v = bits.view(view)
        if base not in _FLOATS:
            return clamp(np.clip(v, -1e30, 1e30) if truncates else v)
        if source_kind not in _FLOATS:
            v = v.astype(np.float64) if base == "f64" else formats.integer_to_f64(v)
        v = np.where(v > 0, np.minimum(v, 1), 0.0) if saturate else v
        out = formats.narrow(formats.relu(v) if relu else v, base, "rn" if rounding in _INTEGRAL else rounding)
        return formats.ftz(out.view(F32)).view(U32) if flush and base == "f32" else out

    if base == to:
        return lambda w, R, m: put(R, target, widen(convert(sources[0](w, R)), to, target), m)

    def cvt_pair(w, R, m):
        high, low = (convert(s(w, R)) for s in sources)
        put(R, target, high.astype(U32) << U32(16) | low, m)

    return cvt_pair
