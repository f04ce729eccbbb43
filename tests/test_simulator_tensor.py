"""tcgen05 in the simulator: fragments of ld and st, MMA shapes, and the order of MMAs, against models of their own."""

import numpy as np
import pytest
from simulator import PtxError, SimulationError, Simulator
from simulator.formats import bf16_to_f32, f32_to_bf16
from simulator.layouts import LayoutError, tcgen05_descriptor
from simulator.tensor import decode_instruction

COLUMNS = 256  # of tensor memory that a kernel fills and reads back
HEAD = ".version 9.0\n.target sm_100a\n.address_size 64\n"


def core_matrices(x: np.ndarray) -> np.ndarray:
    """[rows, 16] bf16, K-major without swizzle: 8 x 16-byte core matrices, 128 bytes apart along k, 256 along rows."""
    rows = x.shape[0]
    return np.ascontiguousarray(x.reshape(rows // 8, 8, 2, 8).transpose(0, 2, 1, 3))


def instruction(m: int, n: int) -> int:
    """Descriptor of D f32, A and B bf16."""
    return 1 << 4 | 1 << 7 | 1 << 10 | n >> 3 << 17 | m >> 4 << 24


def mma(d: str, a: str, m: int, n: int, accumulate: bool = False) -> str:
    """By thread 0; `a` is "%da" or an address in tensor memory."""
    return (
        f"@%p0 tcgen05.mma.cta_group::1.kind::f16 [{d}], {a}, %db, {instruction(m, n)}, %p{6 if accumulate else 7};\n"
    )


def commit_and_wait(phase: int) -> str:
    return f"""@%p0 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%bar];
    DONE{phase}: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%bar], {phase % 2};
    @!%p2 bra DONE{phase};
    bar.sync 0;
    tcgen05.fence::after_thread_sync;
    """


def columns(kind: str) -> str:
    """Copies COLUMNS columns between tensor memory and [128, COLUMNS] words at %g, a warp its lanes."""
    lines = []
    for c in range(0, COLUMNS, 8):
        words = [f"%w{i}" for i in range(8)]
        vector = "{" + ", ".join(words) + "}"
        if kind == "st":
            lines += [f"ld.global.b32 {w}, [%g+{4 * (c + i)}];" for i, w in enumerate(words)]
            lines += [f"tcgen05.st.sync.aligned.32x32b.x8.b32 [%mine+{c}], {vector};"]
        else:
            lines += [f"tcgen05.ld.sync.aligned.32x32b.x8.b32 {vector}, [%mine+{c}];", "tcgen05.wait::ld.sync.aligned;"]
            lines += [f"st.global.b32 [%g+{4 * (c + i)}], {w};" for i, w in enumerate(words)]
    return "\n".join(lines)


def kernel(body: str) -> str:
    """4 warps. %ta: 512 columns, of which COLUMNS hold `tmem` and go to `out` at the end; %da, %db: operands."""
    return (
        HEAD
        + f"""
.visible .entry tensor(.param .u64 a, .param .u64 b, .param .u64 tmem, .param .u64 out, .param .u64 extra) {{
.reg .pred %p<8>; .reg .b32 %r<20>; .reg .b32 %w<140>; .reg .b32 %ta, %mine, %bar, %t, %warp; .reg .b64 %rd<20>;
.reg .b64 %da, %db, %g;
.shared .align 1024 .b8 sa[4096]; .shared .align 1024 .b8 sb[8192];
.shared .align 8 .b8 bar[8]; .shared .align 4 .b8 slot[4];
mov.u32 %t, %tid.x; shr.u32 %warp, %t, 5; setp.eq.u32 %p0, %t, 0; setp.eq.u32 %p1, %warp, 0;
setp.eq.u32 %p6, %t, %t; setp.ne.u32 %p7, %t, %t;
mov.u32 %bar, bar; mov.u32 %r1, slot; mov.u32 %r2, sa; mov.u32 %r3, sb;
@%p0 mbarrier.init.shared::cta.b64 [%bar], 1;
@%p0 fence.mbarrier_init.release.cluster;
@!%p1 bra ALLOCATED;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 512;
tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
ALLOCATED:
ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b];
mov.u32 %r4, %t;
COPY: mul.wide.u32 %rd4, %r4, 4; add.u64 %rd5, %rd1, %rd4; add.u64 %rd6, %rd2, %rd4; shl.b32 %r5, %r4, 2;
setp.lt.u32 %p3, %r4, 1024;
@%p3 ld.global.b32 %r6, [%rd5]; add.u32 %r7, %r2, %r5;
@%p3 st.shared.b32 [%r7], %r6;
ld.global.b32 %r6, [%rd6]; add.u32 %r7, %r3, %r5; st.shared.b32 [%r7], %r6;
add.u32 %r4, %r4, 128; setp.lt.u32 %p3, %r4, 2048;
@%p3 bra COPY;
fence.proxy.async.shared::cta;
tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
ld.shared.b32 %ta, [%r1]; shl.b32 %mine, %warp, 21; add.u32 %mine, %mine, %ta;
cvt.u64.u32 %da, %r2; shr.u64 %da, %da, 4; or.b64 %da, %da, {8 << 16 | 16 << 32 | 1 << 46};
cvt.u64.u32 %db, %r3; shr.u64 %db, %db, 4; or.b64 %db, %db, {8 << 16 | 16 << 32 | 1 << 46};
ld.param.u64 %g, [tmem]; mad.wide.u32 %g, %t, {4 * COLUMNS}, %g;
{columns("st")}
tcgen05.wait::st.sync.aligned;
tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
{body}
tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
ld.param.u64 %g, [out]; mad.wide.u32 %g, %t, {4 * COLUMNS}, %g;
{columns("ld")}
tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
@%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %ta, 512;
ret; }}"""
    )


class Run:
    """A kernel's inputs and what it leaves."""

    def __init__(self, body: str, mode: str = "late", seed: int = 0, **options):
        rng = np.random.default_rng(5)
        self.a = f32_to_bf16(rng.standard_normal((128, 16)).astype(np.float32))
        self.b = f32_to_bf16(rng.standard_normal((256, 16)).astype(np.float32))
        self.tmem = f32_to_bf16(rng.standard_normal((128, 2 * COLUMNS)).astype(np.float32)).view(np.uint32)
        simulator = Simulator("b200", num_sms=1, mode=mode, seed=seed, **options)
        out = simulator.array(shape=(128, COLUMNS), dtype=np.uint32)
        extra = simulator.array(np.zeros((128, 128), np.uint32))
        inputs = [simulator.array(x) for x in (core_matrices(self.a), core_matrices(self.b), self.tmem)]
        simulator.launch(kernel(body), "tensor", 1, 128, *inputs, out, extra)
        self.out, self.extra, self.reports = out.copy(), extra.copy(), simulator.reports  # the arrays die with it

    def values(self, first: int, count: int) -> np.ndarray:
        return self.out[:, first : first + count].copy().view(np.float32)


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (
        bf16_to_f32(a.ravel()).reshape(a.shape).astype(float) @ bf16_to_f32(b.ravel()).reshape(b.shape).astype(float).T
    )


# ---- fragments -------------------------------------------------------------------------------------

# The strides, in bits of a dense [16 lanes, width] tile, that CuTe gives threads and registers (copy_traits_sm100.hpp,
# DstLayout of SM100_TMEM_LOAD_16dp*1x, and what its 2x variants add for a repetition). "W" is the width of the tile.
# shape: bits of a lane and repetition, [(threads, stride)], [(registers, stride)]
CUTE = {
    "16x64b": (64, [(2, "8W"), (2, 32), (8, "W")], []),
    "16x128b": (128, [(4, 32), (8, "W")], [(2, "8W")]),
    "16x256b": (256, [(4, 64), (8, "W")], [(2, 32), (2, "8W")]),
}


def cute_fragment(shape: str, number: int) -> np.ndarray:
    """(lane, column) of every [register, thread]."""
    bits, threads, registers = CUTE[shape]
    width = bits * number

    def stride(text) -> int:
        return {"W": width, "8W": 8 * width}.get(text, text)

    def offsets(modes) -> list[int]:
        result = [0]
        for count, step in modes:  # the first mode is the fastest
            result = [r + i * stride(step) for i in range(count) for r in result]
        return result

    at = np.add.outer(offsets([*registers, (number, bits)]), offsets(threads))
    return np.stack([at // width, at % width // 32], -1)


FRAGMENTS = [("16x64b", 1), ("16x64b", 16), ("16x128b", 1), ("16x128b", 8), ("16x256b", 1), ("16x256b", 4)]
FRAGMENTS += [("16x32bx2", 2), ("16x32bx2", 8)]
SPLIT = 40


def expected_places(shape: str, number: int) -> np.ndarray:
    if shape != "16x32bx2":
        return cute_fragment(shape, number)
    # Threads 0-15 hold lanes 0-15 of the first columns, threads 16-31 the same lanes SPLIT columns further.
    return np.array([[(t % 16, i + SPLIT * (t >= 16)) for t in range(32)] for i in range(number)])


def transfer(kind: str, shape: str, number: int, half: int) -> str:
    """ld: the registers of thread t go to row t of `extra`; st: register i of thread t is 1000 t + i."""
    count = number * {"16x128b": 2, "16x256b": 4}.get(shape, 1)
    vector = "{" + ", ".join(f"%w{i}" for i in range(count)) + "}"
    split = f", {SPLIT}" if shape == "16x32bx2" else ""
    head = (
        f"add.u32 %r9, %mine, {(16 * half) << 16 | 8}; ld.param.u64 %rd9, [extra]; mad.wide.u32 %rd9, %t, 512, %rd9;\n"
    )
    if kind == "ld":
        stores = "".join(f"st.global.b32 [%rd9+{4 * i}], %w{i};" for i in range(count))
        load = f"tcgen05.ld.sync.aligned.{shape}.x{number}.b32 {vector}, [%r9]{split};"
        return f"{head}{load} tcgen05.wait::ld.sync.aligned; {stores}"
    values = "".join(f"mad.lo.u32 %w{i}, %t, 1000, {i};" for i in range(count))
    store = f"tcgen05.st.sync.aligned.{shape}.x{number}.b32 [%r9]{split}, {vector};"
    return f"{head}{values} {store} tcgen05.wait::st.sync.aligned;"


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("shape, number", FRAGMENTS)
def test_fragments_of_16_lanes(shape, number, half):
    places = expected_places(shape, number)
    loaded, stored = Run(transfer("ld", shape, number, half)), Run(transfer("st", shape, number, half))
    expected = stored.tmem.copy()
    for warp in range(4):
        for i, row in enumerate(places):
            for thread, (lane, column) in enumerate(row):
                at = 32 * warp + 16 * half + lane, 8 + column
                assert loaded.extra[32 * warp + thread, i] == loaded.tmem[at]
                expected[at] = 1000 * (32 * warp + thread) + i
    assert (stored.out == expected).all()


@pytest.mark.parametrize("change, text", [
    (("add.u32 %r9, %mine,", "add.u32 %r9, %ta,"), "illegal: warp [123] accesses tensor memory lane 0"),
    ((f"{8}; ld.param", f"{8 << 16}; ld.param"), "illegal: warp . accesses tensor memory lane"),
    (("mad.wide.u32 %rd9, %t, 512, %rd9;", "add.u32 %r9, %r9, 500;"), "out_of_bounds: tensor memory columns"),
])  # fmt: skip
def test_lanes_and_columns_of_an_access_are_checked(change, text):
    body = transfer("st", "16x64b", 4, 0)
    assert change[0] in body
    with pytest.raises(SimulationError, match=text):
        Run(body.replace(*change))


def test_register_count_is_checked():
    with pytest.raises(PtxError, match="2 registers, 4 for 16x256b.x1"):
        Run("tcgen05.ld.sync.aligned.16x256b.x1.b32 {%w0, %w1}, [%mine];")


# ---- MMA -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", [0, 16])
@pytest.mark.parametrize("mode", ["eager", "late", "random"])
def test_mma_of_64_rows(mode, lane):
    """Layout F: row r is in lane 32 (r / 16) + r % 16, or 16 further; the other lanes keep what they hold."""
    n = 40  # a multiple of 8, legal for M = 64 only
    d, p = f"%ta+{lane << 16}", f"%ta+{lane << 16 | 128}"
    run = Run(mma(d, "%da", 64, n) + mma(d, f"[{p}]", 64, n, True) + commit_and_wait(0), mode)
    lanes = [32 * (r // 16) + r % 16 + lane for r in range(64)]
    a_tensor = run.tmem[lanes, 128:136].copy().view(np.uint16)
    expected = product(run.a[:64], run.b[:n]) + product(a_tensor, run.b[:n])
    np.testing.assert_allclose(run.values(0, n)[lanes], expected, atol=1e-5)
    run.out[lanes, :n] = run.tmem[lanes, :n]
    assert (run.out == run.tmem).all() and not run.reports


def test_shapes_and_lanes_of_an_mma_are_checked():
    for body, text in (
        (mma("%ta", "%da", 128, 40), "descriptor: .*N = 40 is not a multiple of 16"),
        (mma("%ta", "%da", 32, 32), "descriptor: .*M = 32"),
        (mma(f"%ta+{16 << 16}", "%da", 128, 32), "illegal: .*accumulator at lane 16"),
        (mma("%ta", f"[%ta+{16 << 16 | 128}]", 64, 32), "illegal: .*A at lane 16, the accumulator at lane 0"),
    ):
        with pytest.raises(SimulationError, match=text):
            Run(body + commit_and_wait(0))


IN_TENSOR_MEMORY = mma("%ta", "[%ta+128]", 128, 64) + commit_and_wait(0)


@pytest.mark.parametrize("bits, field", [
    (1, "the sparsity selector is 1"), (4, "sparsity is 1"), (8, "saturation is 1"), (1 << 6, "reserved bit 6"),
    (1 << 8, "operand formats 3 and 1"), (1 << 11, "operand formats 1 and 3"), (1 << 23, "reserved bit 23"),
    (1 << 29, "reserved bit 29"), (3 << 30, "the maximum shift of .ws is 3"),
])  # fmt: skip
def test_fields_of_the_instruction_descriptor_that_are_refused(bits, field):
    """9.7.16.4.2."""
    right = instruction(128, 64)
    assert decode_instruction(right, True)[:2] == (128, 64)
    with pytest.raises(LayoutError, match=rf"{field}.*9\.7\.16\.4\.2"):
        decode_instruction(right ^ bits, False)


def test_transposed_a_is_refused_in_tensor_memory_only():
    def transposed(a: str) -> str:
        text = mma("%ta", a, 128, 64)
        return text.replace(str(instruction(128, 64)), str(instruction(128, 64) | 1 << 15)) + commit_and_wait(0)

    assert not Run(transposed("%da")).reports and not Run(IN_TENSOR_MEMORY).reports
    with pytest.raises(SimulationError, match="descriptor: .*transpose A .* A in tensor memory is K-major"):
        Run(transposed("[%ta+128]"))


@pytest.mark.parametrize("flipped, field", [
    (1 << 14, "bits 14-15"), (1 << 31, "bits 30-31"), (1 << 46, "bits 46-48"), (1 << 53, "constant of bits 53-60"),
    (1 << 60, "constant of bits 53-60"), (1 << 61, "32-byte atomic swizzle"), (3 << 61, "swizzle mode 3"),
    (5 << 61, "swizzle mode 5"), (7 << 61, "swizzle mode 7"),
])  # fmt: skip
def test_fields_of_a_shared_memory_descriptor_that_are_refused(flipped, field):
    """9.7.16.4.1."""
    right = 8 << 16 | 16 << 32 | 1 << 46 | 64
    assert tcgen05_descriptor(right) == (1024, 128, 256, 0)
    with pytest.raises(LayoutError, match=f"{field}.*9.7.16.4"):
        tcgen05_descriptor(right ^ flipped)


# ---- operands of a warp ----------------------------------------------------------------------------

VARYING = "and.b32 %r10, %t, 1; setp.eq.u32 %p5, %r10, 0;"


@pytest.mark.parametrize("kind", ["ld", "st"])
def test_addresses_of_a_warp_are_alike(kind):
    """9.7.16.8.3, 9.7.16.8.4."""
    body = transfer(kind, "32x32b", 2, 0)
    assert not Run(body.replace(f"tcgen05.{kind}", f"{VARYING} add.u32 %r9, %r9, 1; tcgen05.{kind}", 1)).reports
    with pytest.raises(SimulationError, match=f"illegal: the address of tcgen05.{kind} .*differs between the lanes"):
        Run(body.replace(f"tcgen05.{kind}", f"{VARYING} @%p5 add.u32 %r9, %r9, 1; tcgen05.{kind}", 1))


def test_exited_lanes_take_part_in_no_tensor_access():
    store = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%mine], {%w0};"
    assert not Run(f"{store} tcgen05.wait::st.sync.aligned;").reports
    with pytest.raises(SimulationError, match="illegal: tcgen05.st in a warp with exited lanes"):
        Run(f"{VARYING} @%p5 exit; {store}")


@pytest.mark.parametrize("change, what", [
    (("[%r1], 512;", "[%r10], 512;"), "address of tcgen05.alloc"),
    (("[%r1], 512;", "[%r1], %r11;"), "number of columns of tcgen05.alloc"),
    (("b32 %ta, 512;", "b32 %r12, 512;"), "address of tcgen05.dealloc"),
    (("b32 %ta, 512;", "b32 %ta, %r11;"), "number of columns of tcgen05.dealloc"),
])  # fmt: skip
def test_operands_of_an_allocation_are_alike(monkeypatch, change, what):
    """9.7.16.7.1."""
    text = kernel("")
    assert change[0] in text
    values = "and.b32 %r12, %t, 1; shl.b32 %r11, %r12, 8; add.u32 %r11, %r11, 256; mad.lo.u32 %r10, %r12, 4, %r1;"
    line = next(x for x in text.split("\n") if change[0] in x)
    changed = text.replace("@!%p1 bra ALLOCATED;", f"{values} @!%p1 bra ALLOCATED;").replace(
        line, line.replace(*change)
    )
    monkeypatch.setitem(globals(), "kernel", lambda body: changed)
    with pytest.raises(SimulationError, match=f"illegal: the {what} .*differs between the lanes"):
        Run("")


@pytest.mark.parametrize("line", [
    "tcgen05.st.sync.aligned.32x32b.x1.b32 [%mine], {%w0}; tcgen05.wait::st.sync.aligned;", "tcgen05.wait::ld.sync.aligned;",
    "bar.sync 1;",
    "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%w0}, [%r2];", "setmaxnreg.dec.sync.aligned.u32 24;",
])  # fmt: skip
def test_aligned_instructions_are_for_whole_warps(line):
    assert not Run(line).reports
    with pytest.raises(SimulationError, match="(?s)deadlock: .*waits for the other lanes"):
        Run(f"{VARYING} @%p5 {line}")


def test_lanes_that_an_mma_leaves_out_have_four_registers():
    """9.7.16.10.9.1."""
    body = mma("%ta", "%da", 128, 64).replace(", %p7", ", {%r10, %r10, %r10, %r10}, %p7") + commit_and_wait(0)
    assert not Run("mov.u32 %r10, 0;" + body).reports
    with pytest.raises(PtxError, match="8 registers of disable-output-lane"):
        Run(body.replace("{%r10,", "{%r10, %r10, %r10, %r10, %r10,"))


# ---- order of MMAs ---------------------------------------------------------------------------------

MODES = [("eager", 0), ("late", 0), *[("random", seed) for seed in range(2)]]
# S = Q K^T at 0, and P^T V at 64, whose A operand P^T is at 128: another MMA then overwrites P^T.
READ_THEN_OVERWRITTEN = (mma("%ta+64", "[%ta+128]", 128, 64), mma("%ta+128", "%da", 128, 16))
# The second MMA reads as A what the first one writes.
WRITTEN_THEN_READ = (mma("%ta+128", "%da", 128, 16), mma("%ta", "[%ta+128]", 128, 64))
# Not the same shape, though the same accumulator address.
OTHER_SHAPE = (mma("%ta", "%da", 128, 64), mma("%ta", "%da", 128, 32, True))


@pytest.mark.parametrize("mode, seed", MODES)
@pytest.mark.parametrize("pair, verb", [
    (READ_THEN_OVERWRITTEN, "overwrites .* that .*mma of warp.* may still read"),
    (WRITTEN_THEN_READ, "reads .* written by .*mma of warp"),
    (OTHER_SHAPE, "(reads|overwrites) .* written by .*mma of warp"),
], ids=["read, overwritten", "written, read", "other shape"])  # fmt: skip
def test_order_of_mmas_the_isa_does_not_promise(pair, verb, mode, seed):
    together = "".join(pair) + commit_and_wait(0)
    apart = pair[0] + commit_and_wait(0) + pair[1] + commit_and_wait(1)
    in_order = Run(together, mode, seed)
    assert not in_order.reports
    assert (Run(apart, mode, seed, mma_order="isa").out == in_order.out).all()
    with pytest.raises(SimulationError, match=f"^mma_order: {verb}"):
        Run(together, mode, seed, mma_order="isa")
    warned = Run(together, mode, seed, mma_order="isa", checks={"mma_order": "warning"}).reports
    assert {r.check for r in warned} == {"mma_order"}


def test_mmas_execute_out_of_order():
    """With the check off, some seed gives the second MMA the old operand."""
    together = "".join(WRITTEN_THEN_READ) + commit_and_wait(0)
    off = {"mma_order": "off"}
    outs = {Run(together, "random", seed, mma_order="isa", checks=off).out.tobytes() for seed in range(8)}
    assert Run(together).out.tobytes() in outs and len(outs) == 2


@pytest.mark.parametrize("mode, seed", MODES)
def test_order_of_mmas_the_isa_promises(mode, seed):
    """Two accumulators, three MMAs each, interleaved; one commit for all."""
    pairs = [mma(d, a, 128, 64, i > 0) for i, a in enumerate(("%da", "[%ta+128]", "%da")) for d in ("%ta", "%ta+64")]
    run = Run("".join(pairs) + commit_and_wait(0), mode, seed, mma_order="isa")
    a_tensor = run.tmem[:, 128:136].copy().view(np.uint16)
    expected = 2 * product(run.a, run.b[:64]) + product(a_tensor, run.b[:64])
    for first in (0, 64):
        np.testing.assert_allclose(run.values(first, 64), expected, atol=1e-5)
    assert not run.reports


def test_mma_order_is_checked():
    with pytest.raises(ValueError, match="mma_order: expected one of issue, isa, got 'any'"):
        Simulator("b200", mma_order="any")
