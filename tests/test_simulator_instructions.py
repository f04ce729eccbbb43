"""Instruction families of the simulator against models written from the PTX ISA's text, on random operands."""

import math
from fractions import Fraction

import numpy as np
import pytest
from simulator import PtxError, SimulationError, Simulator

LANES = 32
U16, U32, U64 = np.uint16, np.uint32, np.uint64
BYTES = {"b16": 2, "b32": 4, "b64": 8}


def execute(body: str, *inputs: np.ndarray, result: str = "b32", threads: int = LANES, **options) -> np.ndarray:
    """Runs `body` in every thread; `%a0, %a1, ...` hold element tid of the inputs, `%d` goes to element tid of the result."""
    kinds = [f"b{8 * x.itemsize}" for x in inputs]
    lines = [".version 9.0", ".target sm_100a", ".address_size 64", ".visible .entry test("]
    lines.append(", ".join(f".param .u64 p{i}" for i in range(len(inputs) + 1)) + ")")
    lines += ["{", ".reg .b64 %at<40>; .reg .b32 %t; .reg .pred %p<8>; .reg .b32 %r<40>; .reg .b64 %rd<40>;"]
    lines += [".reg .b16 %h<8>;", ".shared .align 1024 .b8 scratch[2048];"]
    lines += [f".reg .{k} %a{i};" for i, k in enumerate(kinds)] + [f".reg .{result} %d;", "mov.u32 %t, %tid.x;"]
    for i, kind in enumerate(kinds):
        lines += [f"ld.param.u64 %at{i}, [p{i}];", f"mad.wide.u32 %at{i}, %t, {BYTES[kind]}, %at{i};"]
        lines.append(f"ld.global.{kind} %a{i}, [%at{i}];")
    n = len(inputs)
    lines += [body, f"ld.param.u64 %at{n}, [p{n}];", f"mad.wide.u32 %at{n}, %t, {BYTES[result]}, %at{n};"]
    lines += [f"st.global.{result} [%at{n}], %d;", "ret;", "}"]
    simulator = Simulator("b200", num_sms=1, **options)
    arrays = [simulator.array(x) for x in inputs]
    out = simulator.array(shape=(threads,), dtype={"b16": U16, "b32": U32, "b64": U64}[result])
    simulator.launch("\n".join(lines), "test", 1, threads, *arrays, out)
    return out.copy()


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def integers(rng, bits: int = 32, count: int = LANES) -> np.ndarray:
    """Random, with the corners among them."""
    values = rng.integers(0, 1 << bits, count, dtype=U64)
    corners = [0, 1, (1 << bits) - 1, 1 << (bits - 1), (1 << (bits - 1)) - 1, 31, 32, 63]
    values[: len(corners)] = corners
    rng.shuffle(values)
    return values.astype({16: U16, 32: U32, 64: U64}[bits])


def floats(rng, count: int = LANES) -> np.ndarray:
    """Random over many magnitudes, with zeros, infinities, NaN and subnormals among them."""
    x = (rng.standard_normal(count) * 2.0 ** rng.integers(-20, 20, count)).astype(np.float32)
    x[:7] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -3e-39]
    rng.shuffle(x)
    return x


def signed(value: int, bits: int) -> int:
    value %= 1 << bits
    return value - (1 << bits) if value >> (bits - 1) else value


# ---- integers (9.7.1, 9.7.6, 9.7.8) --------------------------------------------------------------

INTEGER = {
    "add.s32 %d, %a0, %a1;": lambda a, b: a + b,
    "sub.u32 %d, %a0, %a1;": lambda a, b: a - b,
    "mul.lo.s32 %d, %a0, %a1;": lambda a, b: a * b,
    "mul.hi.u32 %d, %a0, %a1;": lambda a, b: a * b >> 32,
    "mul.hi.s32 %d, %a0, %a1;": lambda a, b: signed(a, 32) * signed(b, 32) >> 32,
    "mad.lo.u32 %d, %a0, %a1, 77;": lambda a, b: a * b + 77,
    "min.s32 %d, %a0, %a1;": lambda a, b: min(signed(a, 32), signed(b, 32)),
    "max.u32 %d, %a0, %a1;": max,
    "and.b32 %d, %a0, %a1;": lambda a, b: a & b,
    "or.b32 %d, %a0, %a1;": lambda a, b: a | b,
    "xor.b32 %d, %a0, %a1;": lambda a, b: a ^ b,
    "not.b32 %d, %a0;": lambda a, b: ~a,
    "neg.s32 %d, %a0;": lambda a, b: -a,
    "abs.s32 %d, %a0;": lambda a, b: abs(signed(a, 32)),
    "shl.b32 %d, %a0, %a1;": lambda a, b: a << b if b < 32 else 0,
    "shr.u32 %d, %a0, %a1;": lambda a, b: a >> b if b < 32 else 0,
    "shr.s32 %d, %a0, %a1;": lambda a, b: signed(a, 32) >> min(b, 31),
    "shl.b32 %d, %a0, -1;": lambda a, b: 0,
    "shr.u32 %d, %a0, -1;": lambda a, b: 0,
    "shr.s32 %d, %a0, 40;": lambda a, b: signed(a, 32) >> 31,
    "shf.l.wrap.b32 %d, %a0, %a1, 9;": lambda a, b: (b << 32 | a) << 9 >> 32,
    "shf.r.clamp.b32 %d, %a0, %a1, 40;": lambda a, b: b,
    "popc.b32 %d, %a0;": lambda a, b: a.bit_count(),
    "clz.b32 %d, %a0;": lambda a, b: 32 - a.bit_length(),
    "brev.b32 %d, %a0;": lambda a, b: int(f"{a:032b}"[::-1], 2),
    "bfind.u32 %d, %a0;": lambda a, b: a.bit_length() - 1,
    "bfe.u32 %d, %a0, 5, 9;": lambda a, b: a >> 5 & 0x1FF,
    "bfe.s32 %d, %a0, 5, 9;": lambda a, b: signed((a >> 5 & 0x1FF) << 23, 32) >> 23,
    "bfi.b32 %d, %a0, %a1, 4, 12;": lambda a, b: (b & ~0xFFF0) | (a << 4 & 0xFFF0),
    "lop3.b32 %d, %a0, %a1, 0x0F0F0F0F, 0xE8;": lambda a, b: (a & b) | (a & 0x0F0F0F0F) | (b & 0x0F0F0F0F),
    "prmt.b32 %d, %a0, %a1, 0x6240;": lambda a, b: (
        (a & 0xFF) | (b & 0xFF) << 8 | (a >> 16 & 0xFF) << 16 | (b >> 16 & 0xFF) << 24
    ),
    "cvt.s32.s8 %d, %a0;": lambda a, b: signed(a, 8),
    "cvt.u32.u16 %d, %a0;": lambda a, b: a & 0xFFFF,
    "setp.lt.s32 %p1, %a0, %a1; selp.b32 %d, 7, 9, %p1;": lambda a, b: 7 if signed(a, 32) < signed(b, 32) else 9,
    "setp.ge.u32 %p1, %a0, %a1; selp.b32 %d, 7, 9, %p1;": lambda a, b: 7 if a >= b else 9,
    "setp.eq.s32 %p0, %a1, 0; setp.ne.and.s32 %p1|%p2, %a0, 0, %p0; selp.b32 %r1, 1, 0, %p1;"
    "selp.b32 %r2, 2, 0, %p2; or.b32 %d, %r1, %r2;": lambda a, b: (
        (1 if a and not b else 0) | (2 if not a and not b else 0)
    ),
}


@pytest.mark.parametrize("body", INTEGER, ids=lambda b: b.split()[0])
def test_integer(body, rng):
    if body.startswith("cvt.s32.s8"):
        body_run = "cvt.u16.u32 %h0, %a0; cvt.s32.s8 %d, %h0;"
    elif body.startswith("cvt.u32.u16"):
        body_run = "cvt.u16.u32 %h0, %a0; cvt.u32.u16 %d, %h0;"
    else:
        body_run = body
    for _ in range(3):
        a, b = integers(rng), integers(rng)
        expected = [INTEGER[body](int(x), int(y)) % (1 << 32) for x, y in zip(a, b)]
        assert execute(body_run, a, b).tolist() == expected


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("op", ["div", "rem"])
def test_division_truncates(op, kind, rng):
    bits = int(kind[1:])
    a, b = integers(rng, bits), integers(rng, bits)
    b[b == 0] = 3
    b[::4] = rng.integers(1, 100, 8)
    got = execute(f"{op}.{kind} %d, %a0, %a1;", a, b, result=f"b{bits}")
    for x, y, z in zip(a, b, got):
        x, y = (signed(int(v), bits) if kind[0] == "s" else int(v) for v in (x, y))
        quotient = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
        assert int(z) == (quotient if op == "div" else x - quotient * y) % (1 << bits)


PRMT = {  # 9.7.9.7: source bytes of d.b3 to d.b0 by selector
    "f4e": ("3210", "4321", "5432", "6543"),
    "b4e": ("5670", "6701", "7012", "0123"),
    "rc8": ("0000", "1111", "2222", "3333"),
    "ecl": ("3210", "3211", "3222", "3333"),
    "ecr": ("0000", "1110", "2210", "3210"),
    "rc16": ("1010", "3232", "1010", "3232"),
}


@pytest.mark.parametrize("mode", PRMT)
def test_prmt_modes(mode, rng):
    a, b, c = (integers(rng) for _ in range(3))
    got = execute(f"prmt.b32.{mode} %d, %a0, %a1, %a2;", a, b, c)
    for x, y, selector, z in zip(a, b, c, got):
        source = (int(y) << 32 | int(x)).to_bytes(8, "little")
        assert int(z).to_bytes(4, "big") == bytes(source[int(i)] for i in PRMT[mode][selector & 3])


def test_lop3_with_predicate(rng):
    """9.7.8.6."""
    a, b = integers(rng), integers(rng)
    b[::4] = ~a[::4]
    for op, function in (("or", np.logical_or), ("and", np.logical_and)):
        body = f"setp.lt.u32 %p1, %t, 16; lop3.{op}.b32 %d|%p2, %a0, %a1, 0, 0xC0, %p1; @%p2 xor.b32 %d, %d, -1;"
        p = function(a & b != 0, np.arange(LANES) < 16)
        assert (execute(body, a, b) == np.where(p, ~(a & b), a & b)).all()


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("name", ["add", "sub", "borrow", "carry", "multiply", "guarded"])
def test_carry_chains(name, bits, rng):
    """9.7.2, of two words each."""
    body, model = {
        "add": ("add.cc.{u} {l}, %a0, %a2; addc.{u} {h}, %a1, %a3;", lambda x, y: x + y),
        "sub": ("sub.cc.{u} {l}, %a0, %a2; subc.{u} {h}, %a1, %a3;", lambda x, y: x - y),
        "borrow": (
            "sub.cc.{u} {l}, %a0, %a2; subc.cc.{u} {l}, %a1, %a3; subc.{u} {l}, 0, 0; mov.{u} {h}, {l};",
            lambda x, y: -(x < y),
        ),
        "carry": (
            "add.cc.{u} {l}, %a0, %a2; addc.cc.{u} {l}, %a1, %a3; addc.{u} {l}, 0, 0; mov.{u} {h}, 0;",
            lambda x, y: x + y >> 2 * bits,
        ),
        "multiply": (
            "mul.lo.{u} {l}, %a0, %a2; mul.hi.{u} {h}, %a0, %a2; mad.lo.cc.{u} {h}, %a1, %a2, {h};"
            "madc.hi.{u} {m}, %a1, %a2, 0; mad.lo.cc.{u} {h}, %a0, %a3, {h}; madc.hi.cc.{u} {m}, %a0, %a3, {m};"
            "mov.{u} {l}, {h}; mov.{u} {h}, {m};",
            lambda x, y: x * y - ((x >> bits) * (y >> bits) << 2 * bits) >> bits,
        ),
        "guarded": (
            "add.cc.{u} {l}, %a0, %a2; setp.lt.u32 %p1, %t, 16; @%p1 add.cc.{u} {h}, 0, 0; addc.{u} {h}, %a1, %a3;",
            lambda x, y: x + y if lane >= 16 else x + y - ((x % (1 << bits) + y % (1 << bits) >> bits) << bits),
        ),
    }[name]
    words = [integers(rng, bits) for _ in range(4)]
    low, high, middle = (f"{'%r' if bits == 32 else '%rd'}{i}" for i in (1, 2, 3))
    body = body.format(u=f"u{bits}", l=low, h=high, m=middle)
    got = [execute(f"{body} mov.b{bits} %d, {r};", *words, result=f"b{bits}") for r in (low, high)]
    for lane, (a, b, c, d) in enumerate(zip(*(w.tolist() for w in words))):
        expected = model(b << bits | a, d << bits | c) % (1 << 2 * bits)
        assert int(got[1][lane]) << bits | int(got[0][lane]) == expected


def test_special_registers_take_the_size_of_the_instruction():
    body = "mov.u16 %h0, %tid.x; not.b16 %h0, %h0; cvt.u32.u16 %d, %h0;"
    assert execute(body).tolist() == [0xFFFF - i for i in range(LANES)]
    assert execute("cvt.u64.u32 %d, %tid.x;", result="b64").tolist() == list(range(LANES))


def test_64_bit_and_wide(rng):
    a, b = integers(rng, 64), integers(rng, 64)
    x, y = integers(rng), integers(rng)
    assert (execute("mul.lo.s64 %d, %a0, %a1;", a, b, result="b64") == a * b).all()
    wide = execute("mul.wide.s32 %d, %a0, %a1;", x, y, result="b64")
    assert wide.tolist() == [signed(int(p), 32) * signed(int(q), 32) % (1 << 64) for p, q in zip(x, y)]
    packed = execute("mov.b64 %d, {%a0, %a1};", x, y, result="b64")
    assert (packed == (y.astype(U64) << U64(32) | x)).all()
    assert (execute("mov.b64 {%r1, %r2}, %a0; mov.b32 %d, %r2;", a) == (a >> U64(32)).astype(U32)).all()
    assert (execute("cvt.s64.s32 %d, %a0;", x, result="b64").view(np.int64) == x.view(np.int32)).all()


# ---- floats (9.7.3, 9.7.4, 9.7.9.21) -------------------------------------------------------------


def nearest(value: Fraction, mantissa: int, smallest: int, rounding=round) -> Fraction:
    """Rounds to `mantissa` bits (ties to even); exponents end at 2^smallest (the unit of subnormals)."""
    if value == 0:
        return value
    exponent = max(abs(value).numerator.bit_length() - abs(value).denominator.bit_length() - mantissa, smallest - 1)
    while abs(value) >= Fraction(2) ** (exponent + mantissa):
        exponent += 1
    while exponent > smallest and abs(value) < Fraction(2) ** (exponent + mantissa - 1):
        exponent -= 1
    exponent = max(exponent, smallest)
    unit = Fraction(2) ** exponent
    return rounding(value / unit) * unit


FORMATS = {  # bits of the mantissa, unit of subnormals, largest
    "f16": (11, -24, 65504.0),
    "bf16": (8, -133, (2 - 2.0**-7) * 2.0**127),
    "f32": (24, -149, (2 - 2.0**-23) * 2.0**127),
    "f64": (53, -1074, float(np.finfo(np.float64).max)),
}
BITS = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}
ROUNDINGS = {"rn": round, "rz": math.trunc, "rm": math.floor, "rp": math.ceil}


def decode(bits: np.ndarray, kind: str) -> list[float]:
    """Raw bits to Python floats; integers are themselves."""
    if kind[0] in "su":
        return [signed(int(v), int(kind[1:])) if kind[0] == "s" else int(v) for v in bits]
    if kind == "bf16":
        return (bits.astype(U32) << U32(16)).view(np.float32).tolist()
    return bits.view({"f16": np.float16, "f32": np.float32, "f64": np.float64}[kind]).tolist()


def rounded(value, kind: str, rounding=round) -> float:
    """Any number in a format, rounded once; past the largest to infinity or, rounded inward, to the largest."""
    if not math.isfinite(value) or value == 0:
        return float(value)
    mantissa, smallest, largest = FORMATS[kind]
    exact = nearest(Fraction(value), mantissa, smallest, rounding)
    if abs(exact) <= largest:
        return math.copysign(float(exact), value)
    inward = rounding in (math.trunc, math.floor if value > 0 else math.ceil)
    return math.copysign(largest if inward else math.inf, value)


def same(x: float, y: float) -> bool:
    return (x != x and y != y) or (x == y and math.copysign(1, x) == math.copysign(1, y))


def patterns(rng, kind: str, count: int = LANES) -> np.ndarray:
    """Random bits of any type with the corners, infinities, and numbers at and beside ties of every narrower format."""
    bits = BITS.get(kind) or int(kind[1:])
    values = integers(rng, bits, count).tolist()
    exponents = [*range(-30, 20), *range(-152, -120), *range(120, 130)]  # about the limits of f16, bf16 and f32
    for i in range(2, count // 2):
        place = int(rng.integers(1, bits - 9))
        values[i] = values[i] >> place << place | max((1 << place >> 1) + int(rng.integers(-1, 2)), 0) % (1 << place)
        if kind in ("f32", "f64"):
            fraction = FORMATS[kind][0] - 1
            exponent = max(int(rng.choice(exponents)) + {"f32": 127, "f64": 1023}[kind], 0)
            values[i] = values[i] & (1 << fraction | 1 << bits - 1) - 1 | exponent << fraction
    if kind in FORMATS:
        values[0] = {"f16": 0x7C00, "bf16": 0x7F80, "f32": 0x7F800000, "f64": 0x7FF << 52}[kind]
        values[1] = values[0] | 1 << bits - 1
    return np.array(values, {16: U16, 32: U32, 64: U64}[bits])


def test_fma_rounds_once(rng):
    a, b, c = (floats(rng, 1024) for _ in range(3))
    # A product whose tail is just past a tie of the sum: a double-rounding implementation gets these wrong.
    a[:64] = np.float32(1 + 2**-12)
    b[:64] = np.float32(1 + 2**-12)
    c[:64] = (rng.integers(1, 1 << 20, 64) * 2.0**-10).astype(np.float32)
    got = execute("fma.rn.f32 %d, %a0, %a1, %a2;", *(v.view(U32) for v in (a, b, c)), threads=1024).view(np.float32)
    for x, y, z, r in zip(a, b, c, got):
        if not np.isfinite([x, y, z]).all():
            continue
        exact = nearest(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)), 24, -149)
        assert Fraction(float(r)) == exact


def test_add_mul_and_flush(rng):
    a, b = floats(rng), floats(rng)
    with np.errstate(all="ignore"):
        for op, function in (("add", np.add), ("mul", np.multiply), ("sub", np.subtract)):
            got = execute(f"{op}.f32 %d, %a0, %a1;", a.view(U32), b.view(U32)).view(np.float32)
            np.testing.assert_array_equal(got, function(a, b))
    tiny = np.full(LANES, 1e-40, np.float32)
    kept = execute("add.f32 %d, %a0, 0f00000000;", tiny.view(U32)).view(np.float32)
    flushed = execute("add.ftz.f32 %d, %a0, 0f00000000;", tiny.view(U32)).view(np.float32)
    assert (kept == tiny).all() and (flushed == 0).all()


@pytest.mark.parametrize("op", ["add.rn", "mul.rn", "fma.rn"])
def test_f32x2_is_two_scalar_operations(op, rng):
    pairs = [floats(rng, 2 * LANES) for _ in range(3)]
    packed = [p.view(U64) for p in pairs]
    count = 3 if op.startswith("fma") else 2
    arguments = ", ".join(f"%a{i}" for i in range(count))
    got = execute(f"{op}.f32x2 %d, {arguments};", *packed[:count], result="b64").view(np.float32)
    for half in range(2):
        scalar = execute(f"{op}.f32 %d, {arguments};", *(p[half::2].copy().view(U32) for p in pairs[:count]))
        np.testing.assert_array_equal(got[half::2], scalar.view(np.float32))


def test_exp2_limits_and_accuracy(rng):
    x = np.concatenate([[-np.inf, np.inf, 0.0, -0.0, -200.0, -1e4, 128.0], rng.uniform(-126, 127, 25)]).astype(
        np.float32
    )
    got = execute("ex2.approx.ftz.f32 %d, %a0;", x.view(U32)).view(np.float32)
    assert got[0] == 0 and got[1] == np.inf and got[2] == got[3] == 1 and got[4] == got[5] == 0 and got[6] == np.inf
    exact = np.exp2(x[7:].astype(np.float64))
    assert (np.abs(got[7:] - exact) <= 2 * np.spacing(exact.astype(np.float32))).all()
    nan = execute("ex2.approx.ftz.f32 %d, %a0;", np.full(LANES, 0x7FC00001, U32)).view(np.float32)
    assert np.isnan(nan).all()


@pytest.mark.parametrize("kind, mantissa, smallest", [("bf16x2", 8, -133), ("f16x2", 11, -24)])
def test_cvt_to_pairs_rounds_to_nearest_even(kind, mantissa, smallest, rng):
    a, b = (rng.standard_normal(LANES).astype(np.float32) for _ in range(2))
    a[:4] = [1 + 2.0**-mantissa, 1 + 3 * 2.0**-mantissa, 1 + 2.0**-mantissa + 2.0**-20, -1 - 2.0**-mantissa]
    got = execute(f"cvt.rn.{kind}.f32 %d, %a0, %a1;", a.view(U32), b.view(U32))
    for half, x in ((got >> U32(16), a), (got & U32(0xFFFF), b)):
        bits = half.astype(U16)
        value = (bits.astype(U32) << U32(16)).view(np.float32) if kind[0] == "b" else bits.view(np.float16)
        for v, source in zip(value, x):
            assert Fraction(float(v)) == nearest(Fraction(float(source)), mantissa, smallest)
    nan = execute(f"cvt.rn.{kind}.f32 %d, %a0, %a0;", np.full(LANES, 0x7FC12345, U32))
    assert (nan == 0x7FFF7FFF).all()


def test_cvt_between_floats_and_integers():
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 1e20, -1e20, np.nan] * 4, np.float32)
    assert execute("cvt.rni.s32.f32 %d, %a0;", x.view(U32)).view(np.int32)[:8].tolist() == [
        0, 2, 2, 0, -2, 2**31 - 1, -(2**31), 0,
    ]  # fmt: skip
    assert execute("cvt.rzi.u32.f32 %d, %a0;", x.view(U32))[:8].tolist() == [0, 1, 2, 0, 0, 2**32 - 1, 0, 0]
    n = np.arange(LANES, dtype=U32) * U32(0x01234567)
    np.testing.assert_array_equal(
        execute("cvt.rn.f32.s32 %d, %a0;", n).view(np.float32), n.view(np.int32).astype(np.float32)
    )


CONVERSIONS = [
    ("f16", "f32"), ("bf16", "f32"), ("f16", "f64"), ("bf16", "f64"), ("f32", "f64"), ("bf16", "f16"), ("f16", "bf16"),
    ("f32", "f16"), ("f32", "bf16"), ("f32", "s32"), ("f32", "u32"), ("f32", "s64"), ("f32", "u64"), ("f64", "s64"),
    ("bf16", "s32"), ("f16", "u64"), ("bf16", "u64"), ("f16", "s16"), ("f64", "f32"),
]  # fmt: skip


@pytest.mark.parametrize(
    "to, source, mode", [(*c, mode) for c in CONVERSIONS for mode in ROUNDINGS if c[0] != "f64" or mode == "rn"]
)
def test_cvt_rounds_once(to, source, mode, rng):
    """9.7.9.21."""
    a = patterns(rng, source, 256)
    rounding = "" if BITS.get(source, 64) < BITS[to] else f".{mode}"
    got = execute(f"cvt{rounding}.{to}.{source} %d, %a0;", a, result=f"b{BITS[to]}", threads=256)
    for x, y in zip(decode(a, source), decode(got, to)):
        assert same(y, rounded(x, to, ROUNDINGS[mode])), x


@pytest.mark.parametrize("mode", ["rn", "rz"])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_cvt_to_pairs_with_relu(kind, mode, rng):
    a, b = patterns(rng, "f32"), patterns(rng, "f32")
    for relu in ("", ".relu"):
        got = execute(f"cvt.{mode}{relu}.{kind}x2.f32 %d, %a0, %a1;", a, b).view(U16)
        for half, source in ((got[1::2], a), (got[::2], b)):
            for x, y, bits in zip(decode(source, "f32"), decode(half, kind), half):
                assert bits == 0x7FFF if x != x else y == rounded(max(x, 0.0) if relu else x, kind, ROUNDINGS[mode])


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    "mode, rounding", [("rni", round), ("rzi", math.trunc), ("rmi", math.floor), ("rpi", math.ceil)]
)
def test_cvt_to_integral_floats_and_integers(kind, mode, rounding, rng):
    """9.7.9.21; NaN becomes 0, and 1 << (bits - 1) where the source is f64 or the result has 64 bits."""
    a = patterns(rng, kind, 128)
    values = decode(a, kind)
    got = decode(execute(f"cvt.{mode}.{kind}.{kind} %d, %a0;", a, result=f"b{BITS[kind]}", threads=128), kind)
    for x, y in zip(values, got):
        assert same(y, math.copysign(float(rounding(Fraction(x))), x) if math.isfinite(x) else x), x
    for to, register in (("s8", 16), ("u8", 32), ("s16", 32), ("s32", 32), ("u32", 32), ("s64", 64), ("u64", 64)):
        n = int(to[1:])
        low, high = (-1 << n - 1, (1 << n - 1) - 1) if to[0] == "s" else (0, (1 << n) - 1)
        got = execute(f"cvt.{mode}.{to}.{kind} %d, %a0;", a, result=f"b{register}", threads=128)
        for x, y in zip(values, got.tolist()):
            if x != x:
                expected = signed(1 << n - 1, n) if to[0] == "s" else 1 << n - 1
                expected = expected if kind == "f64" or n == 64 else 0
            else:
                expected = max(low, min(high, rounding(Fraction(x)) if math.isfinite(x) else (high if x > 0 else low)))
            assert y == expected % (1 << register), (to, x)


def test_cvt_saturates(rng):
    a = patterns(rng, "f32")
    got = decode(execute("cvt.sat.f32.f32 %d, %a0;", a), "f32")
    assert got == [0.0 if x != x else min(max(x, 0.0), 1.0) for x in decode(a, "f32")]
    for to, source, low, high in (("s8", "s32", -128, 127), ("u8", "s32", 0, 255), ("u16", "u32", 0, 65535)):
        got = execute(f"cvt.sat.{to}.{source} %d, %a0;", a)
        assert got.tolist() == [min(max(x, low), high) % (1 << 32) for x in decode(a, source)]


def test_copysign_takes_the_sign_of_its_first_operand(rng):
    """9.7.3.2."""
    a, b = (floats(rng).view(U32) for _ in range(2))
    got = execute("copysign.f32 %d, %a0, %a1;", a, b)
    assert (got == (a & U32(1 << 31) | b & U32((1 << 31) - 1))).all()


FLUSHED = {
    "neg.ftz.f32 %d, %a0;": 0,
    "abs.ftz.f32 %d, %a0;": 0,
    "div.rn.ftz.f32 %d, %a0, 0f3F800000;": 1 << 31,
    "div.full.ftz.f32 %d, 0f00800000, 0f41000000;": 0,
    "cvt.ftz.f32.f32 %d, %a0;": 1 << 31,
    "cvt.rmi.ftz.f32.f32 %d, %a0;": 1 << 31,
    "cvt.rmi.ftz.s32.f32 %d, %a0;": 0,
    "cvt.rn.ftz.f32.f64 %d, 0dB7F0000000000000;": 1 << 31,
    "min.ftz.f32 %d, %a0, 0f00000000;": 1 << 31,
    "max.ftz.NaN.f32 %d, %a0, 0fBF800000;": 1 << 31,
    "rcp.approx.ftz.f32 %d, %a0;": 0xFF800000,
    "setp.eq.ftz.f32 %p1, %a0, 0f00000000; selp.b32 %d, 1, 0, %p1;": 1,
}


@pytest.mark.parametrize("body", FLUSHED, ids=lambda b: b.split()[0])
def test_subnormals_are_flushed(body):
    tiny = np.full(LANES, 0x80000123, U32)
    assert (execute(body, tiny) == FLUSHED[body]).all()


def test_approximate_division_by_large_numbers_gives_zero():
    """9.7.3.8."""
    a = np.array([1.0, -1.0, np.inf, 3e38] * 8, np.float32)
    got = execute("div.approx.f32 %d, %a0, 0fFF000000;", a.view(U32))
    assert (got[[0, 1, 3]] == [1 << 31, 0, 1 << 31]).all() and np.isnan(got.view(np.float32)[2])


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("op", [min, max])
def test_minimum_and_maximum(op, kind, rng):
    """9.7.3.11, 9.7.3.12, 9.7.4.7: numbers win over NaN unless .NaN, and -0 < +0."""

    def model(*values: float) -> float:
        numbers = [v for v in values if v == v]
        if not numbers or (nan and len(numbers) < len(values)):
            return math.nan
        return op(numbers, key=lambda v: (v, math.copysign(1, v)))

    name, bits = op.__name__, BITS[kind]
    a, b, c = (patterns(rng, kind, 64) for _ in range(3))
    a[:2], b[:2] = [0, 1 << (bits - 1)], [1 << (bits - 1), 0]
    canonical = (1 << (bits - 1)) - 1
    for nan in ("", ".NaN")[: 1 if kind == "f64" else 2]:
        cases = [(f"{name}{nan}.{kind} %d, %a0, %a1;", (a, b))]
        if kind == "f32":
            cases.append((f"{name}{nan}.{kind} %d, %a0, %a1, %a2;", (a, b, c)))
        for body, sources in cases:
            got = execute(body, *sources, result=f"b{bits}", threads=64)
            for y, *x in zip(decode(got, kind), *(decode(v, kind) for v in sources)):
                assert same(y, model(*x)), (body, x)
            assert not nan or (got[np.isnan(decode(got, kind))] == canonical).all()
        if bits == 16:
            pairs = [v.view(U32) for v in (a, b)]
            single = execute(f"{name}{nan}.{kind} %d, %a0, %a1;", a, b, result="b16", threads=64)
            assert (execute(f"{name}{nan}.{kind}x2 %d, %a0, %a1;", *pairs).view(U16) == single).all()


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("op", ["add.rn", "sub", "mul.rn", "fma.rn", "fma.rn.relu"])
def test_halves_round_once(op, kind, rng):
    """9.7.4.1 to 9.7.4.4."""
    mantissa = FORMATS[kind][0]
    a, b, c = (patterns(rng, kind, 512) for _ in range(3))
    # Products whose tail is a tie, which the smallest c decides.
    m, n = rng.integers(1 << mantissa - 1, 1 << mantissa, (2, 1 << 16))
    tail = np.frexp(m * n)[1] - mantissa
    m, n = (v[m * n % (1 << tail) == 1 << tail - 1][:128] for v in (m, n))
    encode = (lambda v: v.astype(np.float16).view(U16)) if kind == "f16" else (
        lambda v: (v.astype(np.float32).view(U32) >> U32(16)).astype(U16))  # fmt: skip
    a[:128], b[:128], c[:128] = encode(m), encode(n / 1024), rng.choice([1, 0x8001], 128)
    operands = [a, b, c][: 3 if op.startswith("fma") else 2]
    arguments = ", ".join(f"%a{i}" for i in range(len(operands)))
    got = execute(f"{op}.{kind} %d, {arguments};", *operands, result="b16", threads=512)
    packed = execute(f"{op}.{kind}x2 %d, {arguments};", *(v.view(U32) for v in operands), threads=256)
    assert (packed.view(U16) == got).all()
    functions = {"add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y}
    function = {**functions, "fma": lambda x, y, z: x * y + z}[op[:3]]
    for y, *v in zip(decode(got, kind), *(decode(v, kind) for v in operands)):
        if not np.isfinite(v).all():
            continue
        exact = function(*map(Fraction, v))
        assert y == rounded(max(exact, 0) if "relu" in op else exact, kind), v


REFUSED = [
    "min.relu.s32 %d, %a0, 3", "add.sat.s32 %d, %a0, 3", "add.rz.f32 %d, %a0, %a0", "add.sat.f32 %d, %a0, %a0",
    "fma.rm.f32 %d, %a0, %a0, %a0", "div.rz.f32 %d, %a0, %a0", "rcp.rp.f32 %d, %a0", "sqrt.rm.f32 %d, %a0",
    "add.rz.f32x2 %rd1, %rd1, %rd1", "fma.rp.f32x2 %rd1, %rd1, %rd1, %rd1", "add.sat.f16x2 %d, %a0, %a0",
    "add.ftz.f16x2 %d, %a0, %a0", "fma.rn.oob.bf16x2 %d, %a0, %a0, %a0", "min.xorsign.abs.bf16x2 %d, %a0, %a0",
    "min.xorsign.abs.f32 %d, %a0, %a0", "ex2.approx.ftz.f16x2 %d, %a0", "cvt.rs.bf16x2.f32 %d, %a0, %a0, %a0",
    "cvt.rna.tf32.f32 %d, %a0", "cvt.rn.satfinite.bf16x2.f32 %d, %a0, %a0", "cvt.rz.f64.s64 %rd1, %rd1",
    "cvt.rn.f16x2.e4m3x2 %d, %h1", "cvt.s32.f32 %d, %a0", "atom.global.min.f32 %d, [%at0], %a0",
    "red.global.exch.f32 [%at0], %a0", "redux.sync.add.f32 %d, %a0, -1", "shl.frob.b32 %d, %a0, 1",
]  # fmt: skip


@pytest.mark.parametrize("body", REFUSED, ids=lambda b: b.split()[0])
def test_refuses_what_it_does_not_model(body):
    with pytest.raises(PtxError, match=rf"test, line \d+: {body.split()[0]} is not modelled"):
        execute(f"{body};", np.zeros(LANES, U32))


def test_comparisons_with_nan():
    a = np.array([1.0, np.nan, 2.0, np.nan] * 8, np.float32)
    b = np.array([2.0, 1.0, np.nan, np.nan] * 8, np.float32)

    def compare(op: str) -> list[int]:
        return execute(f"setp.{op}.f32 %p1, %a0, %a1; selp.b32 %d, 1, 0, %p1;", a.view(U32), b.view(U32))[:4].tolist()

    assert compare("lt") == [1, 0, 0, 0] and compare("ltu") == [1, 1, 1, 1]
    assert compare("ne") == [1, 0, 0, 0] and compare("neu") == [1, 1, 1, 1]
    assert compare("num") == [1, 0, 0, 0] and compare("nan") == [0, 1, 1, 1]
    low = execute("min.f32 %d, %a0, %a1;", a.view(U32), b.view(U32)).view(np.float32)[:4]
    assert low[:3].tolist() == [1.0, 1.0, 2.0] and np.isnan(low[3])


# ---- warp instructions (9.7.9.6, 9.7.13) ---------------------------------------------------------


def _shuffle(mode: str, values, b: int, c: int):
    """9.7.9.6, the pseudo code of the ISA, lane by lane."""
    segment, limit = c >> 8 & 31, c & 31
    out = []
    for lane in range(LANES):
        highest, lowest = (lane & segment) | (limit & ~segment), lane & segment
        if mode == "up":
            j, ok = lane - b, lane - b >= highest
        elif mode == "down":
            j, ok = lane + b, lane + b <= highest
        elif mode == "bfly":
            j, ok = lane ^ b, lane ^ b <= highest
        else:
            j = lowest | (b & ~segment)
            ok = j <= highest
        out.append(int(values[j if ok else lane]) if 0 <= j < LANES or not ok else 0)
    return out


@pytest.mark.parametrize(
    "mode, c", [("up", 0), ("down", 31), ("bfly", 31), ("idx", 31), ("idx", 0x1C1F), ("bfly", 0x181F), ("up", 0x1800)]
)
def test_shfl(mode, c, rng):
    values = integers(rng)
    for b in (0, 1, 3, 16):
        got = execute(f"shfl.sync.{mode}.b32 %d|%p1, %a0, {b}, {c}, -1;", values)
        assert got.tolist() == _shuffle(mode, values, b, c)


def test_vote_match_redux_elect(rng):
    values = rng.integers(0, 5, LANES).astype(U32)
    ballot = execute("setp.gt.u32 %p1, %a0, 2; vote.sync.ballot.b32 %d, %p1, -1;", values)
    assert ballot.tolist() == [sum(1 << i for i in range(LANES) if values[i] > 2)] * LANES
    match = execute("match.any.sync.b32 %d, %a0, -1;", values)
    assert match.tolist() == [sum(1 << i for i in range(LANES) if values[i] == v) for v in values]
    assert (execute("redux.sync.add.u32 %d, %a0, -1;", values) == values.sum()).all()
    assert (execute("redux.sync.add.s32 %d, %a0, -1;", values << U32(29)) == (values << U32(29)).sum(dtype=U32)).all()
    elected = execute("elect.sync %r1|%p1, -1; selp.b32 %d, 1, 0, %p1;", values)
    assert elected.sum() == 1


@pytest.mark.parametrize("op", [min, max])
def test_redux_of_floats(op, rng):
    """9.7.13.12."""
    negative_zero, nan = U32(1 << 31), U32(0xFFC00000)
    sources = [floats(rng).view(U32), np.full(LANES, nan), np.array([nan, 0, negative_zero, 0] * 8, U32)]
    for bits in sources:
        for absolute in ("", ".abs"):
            numbers = [abs(v) if absolute else v for v in decode(bits, "f32") if v == v]
            expected = op(numbers, key=lambda v: (v, math.copysign(1, v))) if numbers else math.nan
            got = execute(f"redux.sync.{op.__name__}{absolute}.f32 %d, %a0, -1;", bits)
            assert all(same(v, expected) for v in decode(got, "f32"))
            got = execute(f"redux.sync.{op.__name__}{absolute}.NaN.f32 %d, %a0, -1;", bits)
            assert (got == 0x7FFFFFFF).all()  # every source has a NaN


def test_divergence_reconverges():
    body = """
    setp.lt.u32 %p1, %t, 9;
    mov.b32 %d, 5;
    @%p1 bra LEFT;
    add.u32 %d, %t, 100;
    bra.uni JOIN;
    LEFT:
    mov.b32 %r1, 0;
    LOOP:
    add.u32 %d, %d, %r1;
    add.u32 %r1, %r1, 1;
    setp.le.u32 %p2, %r1, %t;
    @%p2 bra LOOP;
    JOIN:
    bar.warp.sync -1;
    shfl.sync.bfly.b32 %d, %d, 1, 31, -1;"""
    each = [5 + i * (i + 1) // 2 if i < 9 else i + 100 for i in range(LANES)]
    for mode in ("eager", "late", "random"):
        assert execute(body, mode=mode).tolist() == [each[i ^ 1] for i in range(LANES)]


# ---- memory (9.7.9, 9.7.13.5, 9.7.13.6) ----------------------------------------------------------


def test_atomics_with_conflicts(rng):
    values = rng.integers(0, 1000, LANES).astype(U32)
    body = """
    mov.u32 %r1, scratch; setp.eq.u32 %p1, %t, 0; mov.b32 %r2, 0;
    @%p1 st.shared.b32 [%r1], %r2;
    bar.warp.sync -1;
    atom.shared.add.u32 %d, [%r1], %a0;"""
    got = execute(body, values)
    total = 0
    for old, value in sorted(zip(got.tolist(), values.tolist())):
        assert old <= total
        total = max(total, old + value)
    assert total == values.sum()


@pytest.mark.parametrize("kind", ["bf16x2", "f16x2"])
def test_packed_reduction_rounds_each_half(kind, rng):
    float_of = {"b": lambda v: (v.astype(U32) << U32(16)).view(np.float32), "f": lambda v: v.view(np.float16)}[kind[0]]
    old, add = (rng.integers(0x3000, 0x4200, 2 * LANES).astype(U16) for _ in range(2))
    body = f"""
    mov.u32 %r1, scratch; mad.lo.u32 %r1, %t, 4, %r1; st.shared.b32 [%r1], %a0;
    red.shared.add.noftz.{kind} [%r1], %a1;
    ld.shared.b32 %d, [%r1];"""
    got = execute(body, old.view(U32), add.view(U32)).view(U16)
    mantissa, smallest = (8, -133) if kind[0] == "b" else (11, -24)
    for x, y, z in zip(float_of(old), float_of(add), float_of(got)):
        assert Fraction(float(z)) == nearest(Fraction(float(x)) + Fraction(float(y)), mantissa, smallest)


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize("op", ["min", "max"])
def test_vector_reduction_compares_halves(op, kind, rng):
    old, new = patterns(rng, kind, 2 * LANES), patterns(rng, kind, 2 * LANES)
    body = f"""
    setp.eq.u32 %p1, %t, 0;
    @%p1 ld.global.v4.b32 {{%r0, %r1, %r2, %r3}}, [%at1];
    @%p1 red.global.{op}.noftz.v4.{kind}x2 [%at0], {{%r0, %r1, %r2, %r3}};
    bar.warp.sync -1;
    ld.global.b32 %d, [%at0];"""
    got = execute(body, old.view(U32), new.view(U32)).view(U16)[:8]
    assert (got == execute(f"{op}.{kind} %d, %a0, %a1;", old, new, result="b16", threads=64)[:8]).all()


@pytest.mark.parametrize("shared", [0, 16, 32])
def test_atomics_through_generic_addresses(shared):
    """9.7.13.5: f32 sums in global memory flush subnormals, in shared memory they do not."""
    tiny = np.full(LANES, 0x00000123, U32)
    body = f"""
    mov.u32 %r1, scratch; mad.lo.u32 %r1, %t, 4, %r1; st.shared.b32 [%r1], %a0;
    cvt.u64.u32 %rd1, %r1; cvta.shared.u64 %rd1, %rd1;
    setp.lt.u32 %p1, %t, {shared}; selp.b64 %rd2, %rd1, %at0, %p1;
    atom.add.f32 %r3, [%rd2], %a0; ld.b32 %d, [%rd2];"""
    got = execute(body, tiny)
    assert got.tolist() == [0x246] * shared + [0] * (LANES - shared)


def test_vector_reduction_to_global(rng):
    x = rng.standard_normal(4).astype(np.float32)
    simulator = Simulator("b200", num_sms=1)
    target = simulator.array(np.ones(4, np.float32))
    values = ", ".join(f"0f{v:08X}" for v in x.view(U32))
    simulator.launch(
        f""".version 9.0
        .target sm_100a
        .address_size 64
        .visible .entry test(.param .u64 p)
        {{ .reg .b64 %rd1; .reg .f32 %f<5>; .reg .pred %p1; .reg .b32 %r1;
        ld.param.u64 %rd1, [p];
        mov.f32 %f1, {values.split(", ")[0]}; mov.f32 %f2, {values.split(", ")[1]};
        mov.f32 %f3, {values.split(", ")[2]}; mov.f32 %f4, {values.split(", ")[3]};
        red.global.add.v4.f32 [%rd1], {{%f1, %f2, %f3, %f4}};
        ret; }}""",
        "test", 1, 2, target,
    )  # fmt: skip
    np.testing.assert_array_equal(target, (np.float32(1) + x) + x)


def test_narrow_loads_extend(rng):
    values = rng.integers(0, 1 << 32, LANES, dtype=U64).astype(U32)
    assert (execute("ld.global.s8 %d, [%at0];", values).view(np.int32) == values.view(np.int8)[::4]).all()
    assert (execute("ld.global.u16 %d, [%at0+2];", values) == values >> U32(16)).all()


def test_matrix_store_and_load_agree_with_the_figure(rng):
    a = integers(rng)
    body = """
    mov.u32 %r1, scratch; mad.lo.u32 %r2, %t, 16, %r1; and.b32 %r3, %t, 7; mad.lo.u32 %r2, %r3, 16, %r1;
    stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r2], {%a0};
    bar.warp.sync -1;
    mad.lo.u32 %r4, %t, 4, %r1; ld.shared.b32 %d, [%r4];"""
    assert (execute(body, a) == a).all()  # lane l holds row l/4, columns 2(l%4), 2(l%4)+1: row-major order
    transposed = body.replace("ld.shared.b32 %d, [%r4];", "ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%d}, [%r2];")
    matrix = a.view(U16).reshape(8, 8)
    assert (execute(transposed, a).view(U16).reshape(8, 8) == matrix.T).all()


FAULTS = {
    "past the end": ("out_of_bounds", "ld.global.b32 %d, [%at0+128];"),
    "null": ("out_of_bounds", "mov.b64 %rd1, 0; ld.global.b32 %d, [%rd1];"),
    "misaligned": ("misaligned", "ld.global.b32 %d, [%at0+2];"),
    "shared never written": ("uninitialised", "mov.u32 %r1, scratch; ld.shared.b32 %d, [%r1+64];"),
    "shared past the end": ("out_of_bounds", "mov.u32 %r1, scratch; ld.shared.b32 %d, [%r1+2048];"),
    "trap": ("trap", "trap; mov.b32 %d, 0;"),
    "setmaxnreg": ("illegal", "setmaxnreg.dec.sync.aligned.u32 20; mov.b32 %d, 0;"),
    "barrier count": ("barrier", "bar.sync 1, 33; mov.b32 %d, 0;"),
    "barrier that never fills": ("deadlock", "bar.sync 1, 64; mov.b32 %d, 0;"),
    "mbarrier never initialised": (
        "barrier",
        "mov.u32 %r1, scratch; mbarrier.arrive.shared::cta.b64 _, [%r1]; mov.b32 %d, 0;",
    ),
    "mbarrier underflow": (
        "barrier",
        "mov.u32 %r1, scratch; setp.eq.u32 %p1, %t, 0; @%p1 mbarrier.init.shared::cta.b64 [%r1], 31; bar.warp.sync -1;"
        "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 16;"
        "mbarrier.arrive.shared::cta.b64 _, [%r1]; mov.b32 %d, 0;",
    ),
    "mbarrier that never completes": (
        "deadlock",
        "mov.u32 %r1, scratch; setp.eq.u32 %p1, %t, 0; @%p1 mbarrier.init.shared::cta.b64 [%r1], 1; bar.warp.sync -1;"
        "WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], 0; @!%p2 bra WAIT; mov.b32 %d, 0;",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_reported(name, rng):
    check, body = FAULTS[name]
    with pytest.raises(SimulationError, match=f"(?s)^{check}: .*PTX line"):
        execute(body, integers(rng))


def test_checks_can_be_warnings_or_off(rng):
    body = "mov.u32 %r1, scratch; ld.shared.b32 %d, [%r1+64];"
    with pytest.raises(SimulationError):
        execute(body, integers(rng))
    with pytest.raises(ValueError, match="checks: expected one of"):
        execute(body, integers(rng), checks={"nonsense": "off"})


def test_race_between_warps_is_reported():
    body = """
    mov.u32 %r1, scratch; and.b32 %r2, %t, 31; mad.lo.u32 %r1, %r2, 4, %r1; st.shared.b32 [%r1], %t;
    BARRIER
    ld.shared.b32 %d, [%r1];"""
    with pytest.raises(SimulationError, match="race: overwrites shared bytes"):
        execute(body.replace("BARRIER", "bar.sync 0;"), threads=64)
    apart = body.replace("and.b32 %r2, %t, 31;", "mov.b32 %r2, %t;").replace("ld.shared.b32 %d, [%r1];", (
        "xor.b32 %r2, %t, 32; mov.u32 %r1, scratch; mad.lo.u32 %r1, %r2, 4, %r1; ld.shared.b32 %d, [%r1];"))  # fmt: skip
    with pytest.raises(SimulationError, match="race: reads shared bytes|uninitialised"):
        execute(apart.replace("BARRIER", ""), threads=64)
    assert execute(apart.replace("BARRIER", "bar.sync 0;"), threads=64).tolist() == [i ^ 32 for i in range(64)]


def test_unknown_instruction_names_itself():
    with pytest.raises(PtxError, match=r"line \d+: frobnicate.b32 is not modelled"):
        execute("frobnicate.b32 %d, %t;")
