"""Bulk and tensor copies out of shared memory, and wgmma, against models written from the ISA's text."""

import numpy as np
import pytest
from simulator import PtxError, SimulationError, Simulator
from simulator.formats import bf16_to_f32

HEAD = ".version 9.0\n.target {target}\n.address_size 64\n"
MODES = ["eager", "late", "random"]


def rounded(x: np.ndarray, kind: str) -> np.ndarray:
    """float64 to the nearest value of `kind`, ties to even, in its storage type. Of sums of two bf16 values of like size,
    which float32 holds."""
    if kind == "f32":
        return x.astype(np.float32)
    if kind == "f16":
        return x.astype(np.float16)
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def real(x: np.ndarray, kind: str) -> np.ndarray:
    return (bf16_to_f32(x) if kind == "bf16" else x).astype(np.float64)


def values(rng, kind: str, *shape: int) -> np.ndarray:
    return rounded(rng.integers(-64, 64, shape) / 8.0, kind)


def store_kernel(rank: int, at: tuple[int, ...], size: int, instruction: str) -> str:
    """Fills shared memory from `source`, then one thread stores it as a box of the tensor."""
    return (
        HEAD.format(target="sm_90a")
        + f"""
.visible .entry store(.param .align 64 .b8 map[128], .param .u64 source) {{
.reg .pred %p<4>; .reg .b32 %r<9>; .reg .b64 %rd<9>;
.shared .align 1024 .b8 tile[{size}];
mov.b64 %rd1, map; cvta.param.u64 %rd1, %rd1;
ld.param.u64 %rd2, [source];
mov.u32 %r1, tile; mov.u32 %r3, %tid.x; mov.u32 %r4, %r3;
FILL: mad.wide.u32 %rd3, %r4, 4, %rd2; ld.global.b32 %r6, [%rd3];
mad.lo.u32 %r5, %r4, 4, %r1; st.shared.b32 [%r5], %r6;
add.u32 %r4, %r4, 32; setp.lt.u32 %p3, %r4, {size // 4};
@%p3 bra FILL;
fence.proxy.async.shared::cta;
bar.warp.sync -1;
setp.eq.u32 %p1, %r3, 0;
@%p1 {instruction.format(rank=rank, at=", ".join(map(str, at)))}
@%p1 cp.async.bulk.commit_group;
@%p1 cp.async.bulk.wait_group 0;
ret;
}}"""
    )


STORE = "cp.async.bulk.tensor.{rank}d.global.shared::cta.bulk_group [%rd1, {{{at}}}], [%r1];"
REDUCE = "cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.add.bulk_group [%rd1, {{{at}}}], [%r1];"


@pytest.mark.parametrize("instruction", [STORE, REDUCE], ids=["store", "reduce"])
@pytest.mark.parametrize("kind", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("shape, box, at, width", [
    ((128,), (64,), (80,), 0),
    ((40, 64), (16, 8), (32, 5), 0),
    ((40, 64), (16, 8), (56, -3), 64),
    ((40, 64), (16, 8), (48, 36), 128),
    ((3, 20, 64), (8, 8, 2), (-4, -2, 1), 32),
    ((2, 5, 6, 2, 32), (8, 2, 3, 2, 1), (28, 1, 4, 3, 1), 0),
])  # fmt: skip
def test_tensor_store_and_reduction(instruction, kind, shape, box, at, width):
    """5.5 (tensors, swizzling modes), 9.7.9.25.5: what lies outside the tensor is not written."""
    rng = np.random.default_rng(1)
    data, tile = values(rng, kind, *shape), values(rng, kind, int(np.prod(box)))
    size = tile.nbytes
    expected = data.copy()
    for number, element in enumerate(np.ndindex(*reversed(box))):
        index = [a + i for a, i in zip(reversed(at), element)]
        if any(not 0 <= i < n for i, n in zip(index, shape)):
            continue
        byte = number * tile.itemsize
        if width:
            byte ^= byte // 128 % (width // 16) * 16
        value = tile[byte // tile.itemsize]
        if instruction is REDUCE:
            value = rounded(real(data[tuple(index)], kind) + real(value, kind), kind)
        expected[tuple(index)] = value
    for mode in MODES:
        simulator = Simulator("h200", num_sms=1, mode=mode)
        tensor, source = simulator.array(data), simulator.array(tile)
        tensor_map = simulator.tensor_map(tensor, box, swizzle=width, kind=kind)
        simulator.launch(store_kernel(len(box), at, size, instruction), "store", 1, 32, tensor_map, source)
        assert (tensor == expected).all()


BULK = (
    HEAD.format(target="sm_90a")
    + """
.visible .entry bulk(.param .u64 target, .param .u64 source, .param .u64 seen) {
.reg .pred %p<4>; .reg .b32 %r<9>; .reg .b64 %rd<9>;
.shared .align 128 .b8 tile[128];
ld.param.u64 %rd1, [target]; ld.param.u64 %rd2, [source]; ld.param.u64 %rd4, [seen];
mov.u32 %r1, tile; mov.u32 %r3, %tid.x;
mad.wide.u32 %rd3, %r3, 4, %rd2; ld.global.b32 %r6, [%rd3];
mad.lo.u32 %r5, %r3, 4, %r1; st.shared.b32 [%r5], %r6;
fence.proxy.async.shared::cta;
bar.warp.sync -1;
setp.eq.u32 %p1, %r3, 0;
createpolicy.fractional.L2::evict_first.b64 %rd5, 1.0;
@%p1 prefetch.global.L2 [%rd1];
@%p1 INSTRUCTION
@%p1 cp.async.bulk.commit_group;
@%p1 cp.async.bulk.wait_groupWHAT;
@%p1 ld.global.b32 %r7, [%rd1];
@%p1 st.global.b32 [%rd4], %r7;
ret; }"""
)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind, operation", [("f32", "add.f32"), ("f16", "add.noftz.f16"), ("bf16", "add.noftz.bf16")])
def test_bulk_reduction(kind, operation, mode):
    """9.7.9.25.4.2."""
    rng = np.random.default_rng(2)
    count = 128 // np.dtype({"f32": "f4", "f16": "f2", "bf16": "u2"}[kind]).itemsize
    old, new = (rounded(rng.standard_normal(count), kind) for _ in range(2))
    simulator = Simulator("h200", num_sms=1, mode=mode)
    target, source, seen = simulator.array(old), simulator.array(new), simulator.array(shape=(1,), dtype=np.uint32)
    line = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.{operation} [%rd1], [%r1], 128, %rd5;"
    text = BULK.replace("INSTRUCTION", line).replace("WHAT", " 0")
    simulator.launch(text, "bulk", 1, 32, target, source, seen)
    expected = rounded(real(old, kind) + real(new, kind), kind)
    assert (target == expected).all() and seen[0] == expected.view(np.uint32)[0]


def test_a_group_that_has_been_read_need_not_be_written():
    """9.7.9.25.6: wait_group.read waits for the reads of shared memory, wait_group for all."""

    def seen(what: str, mode: str, seed: int = 0) -> int:
        simulator = Simulator("h200", num_sms=1, mode=mode, seed=seed)
        target, source = simulator.array(np.zeros(32, np.uint32)), simulator.array(np.arange(7, 39, dtype=np.uint32))
        out = simulator.array(shape=(1,), dtype=np.uint32)
        line = "cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], 128;"
        text = BULK.replace("INSTRUCTION", line).replace("WHAT", what)
        simulator.launch(text, "bulk", 1, 32, target, source, out)
        assert target.tolist() == list(range(7, 39))
        return int(out[0])

    assert seen(".read 0", "eager") == 7 and seen(".read 0", "late") == 0
    assert {seen(" 0", "random", seed) for seed in range(10)} | {seen(" 0", "late")} == {7}


# ---- wgmma -----------------------------------------------------------------------------------------

PRODUCT = (
    HEAD.format(target="sm_90a")
    + """
.visible .entry product(.param .u64 a, .param .u64 b, .param .u64 d) {
.reg .pred %p<4>; .reg .b32 %r<40>; .reg .b64 %rd<20>; .reg .f32 %f<9>;
.shared .align 1024 .b8 tile[3072];
ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; ld.param.u64 %rd3, [d];
mov.u32 %r1, tile; mov.u32 %r2, %tid.x; mov.u32 %r3, %r2;
FILL_A: mad.wide.u32 %rd4, %r3, 4, %rd1; ld.global.b32 %r4, [%rd4]; mad.lo.u32 %r5, %r3, 4, %r1;
st.shared.b32 [%r5], %r4; add.u32 %r3, %r3, 128; setp.lt.u32 %p1, %r3, 512; @%p1 bra FILL_A;
mad.wide.u32 %rd4, %r2, 4, %rd2; ld.global.b32 %r4, [%rd4]; mad.lo.u32 %r5, %r2, 4, %r1;
st.shared.b32 [%r5 + 2048], %r4;
fence.proxy.async.shared::cta;
bar.sync 0;
shr.u32 %r6, %r1, 4; cvt.u64.u32 %rd5, %r6; or.b64 %rd6, %rd5, A_STRIDES;
add.u32 %r7, %r1, 2048; shr.u32 %r7, %r7, 4; cvt.u64.u32 %rd7, %r7; or.b64 %rd7, %rd7, B_STRIDES;
mad.wide.u32 %rd8, %r2, 16, %rd1;
ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd8];
mad.wide.u32 %rd9, %r2, 32, %rd3;
ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd9]; ld.global.v4.f32 {%f5, %f6, %f7, %f8}, [%rd9 + 16];
setp.ne.u32 %p2, SCALE_D, 0;
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n16k16.f32.KIND.KIND {%f1, %f2, %f3, %f4, %f5, %f6, %f7, %f8}, A, %rd7, %p2, SIGNS;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
st.global.v4.f32 [%rd9], {%f1, %f2, %f3, %f4}; st.global.v4.f32 [%rd9 + 16], {%f5, %f6, %f7, %f8};
ret; }"""
)


def core_matrices(x: np.ndarray, mn_major: bool) -> np.ndarray:
    """[mn, k] as 8 x 8 core matrices of 128 bytes, mn fastest; MN-major turns every one (9.7.15.5.1.2.1)."""
    mn, k = x.shape
    tiles = x.reshape(mn // 8, 8, k // 8, 8).transpose(2, 0, 3, 1) if mn_major else (
        x.reshape(mn // 8, 8, k // 8, 8).transpose(2, 0, 1, 3)
    )  # fmt: skip
    return np.ascontiguousarray(tiles).reshape(-1)


def strides(mn: int) -> str:
    """Descriptor bits (9.7.15.5.1.2.2): the next 8 of k after mn / 8 core matrices, the next 8 of mn after one."""
    return hex((mn // 8 * 128 >> 4) << 16 | (128 >> 4) << 32)


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize("a_place", ["shared", "shared, M-major", "registers"])
@pytest.mark.parametrize("b_major, scale_d, signs", [("K", 1, (1, 1)), ("N", 1, (-1, 1)), ("N", 0, (-1, -1))])
def test_wgmma(kind, a_place, b_major, scale_d, signs):
    """9.7.15.5: D = A B + D, with the fragments of 9.7.15.5.1.1.1."""
    rng = np.random.default_rng(3)
    a, b = values(rng, kind, 64, 16), values(rng, kind, 16, 16)
    d = rng.standard_normal((64, 16)).astype(np.float32)
    lane, i = np.arange(128) % 32, np.arange(8)[:, None]
    row = 16 * (np.arange(128) // 32) + lane // 4 + 8 * (i // 2 % 2)
    column = 8 * (i // 4) + 2 * (lane % 4) + i % 2
    in_registers = a_place == "registers"
    a_bytes = a[row, column].T if in_registers else core_matrices(a, "M" in a_place)
    b_bytes = core_matrices(b.T, b_major == "N")
    tail = ([] if in_registers else [int("M" in a_place)]) + [int(b_major == "N")]
    text = PRODUCT.replace("SIGNS", ", ".join(map(str, (*signs, *tail)))).replace("SCALE_D", str(scale_d))
    text = text.replace("A_STRIDES", strides(64)).replace("B_STRIDES", strides(16)).replace("KIND", kind)
    text = text.replace("}, A, ", "}, {%r10, %r11, %r12, %r13}, " if in_registers else "}, %rd6, ")
    expected = signs[0] * signs[1] * (real(a, kind) @ real(b, kind)) + (d if scale_d else 0)
    for mode in MODES:
        simulator = Simulator("h200", num_sms=1, mode=mode)
        left, right = (simulator.array(np.ascontiguousarray(x)) for x in (a_bytes, b_bytes))
        out = simulator.array(np.ascontiguousarray(d[row, column].T))
        simulator.launch(text, "product", 1, 128, left, right, out)
        assert np.allclose(out.T, expected[row, column], atol=1e-4)


def test_wgmma_descriptors_are_checked():
    text = PRODUCT.replace("SIGNS", "1, 1, 0, 0").replace("SCALE_D", "0").replace("KIND", "bf16")
    text = text.replace("}, A, ", "}, %rd6, ").replace("A_STRIDES", strides(64))
    cases = [(1 << 50, "base offset"), (0x3FFF << 32, "past the allocation")]
    cases += [(1 << bit, r"is .*, must be 0 \(9.7.15.5.1.2.2\)") for bit in (14, 31, 46, 48, 52, 61)]
    for bits, report in cases:
        simulator = Simulator("h200", num_sms=1)
        arrays = [simulator.array(np.zeros(n, np.float32)) for n in (512, 128, 1024)]
        with pytest.raises(SimulationError, match=f"descriptor: .*{report}"):
            simulator.launch(text.replace("B_STRIDES", hex(bits)), "product", 1, 128, *arrays)


@pytest.mark.parametrize("old, new, what", [
    ("wgmma.fence", "xor.b64 %rd7, %rd7, %rd10; wgmma.fence", "descriptor B"),
    ("wgmma.fence", "xor.b64 %rd6, %rd6, %rd10; wgmma.fence", "descriptor A"),
    ("setp.ne.u32 %p2, 1, 0;", "setp.ne.u32 %p2, %r20, 0;", "scale-d"),
])  # fmt: skip
def test_operands_of_wgmma_are_alike_in_a_warp(old, new, what):
    text = PRODUCT.replace("SIGNS", "1, 1, 0, 0").replace("SCALE_D", "1").replace("KIND", "bf16")
    text = text.replace("}, A, ", "}, %rd6, ").replace("A_STRIDES", strides(64)).replace("B_STRIDES", strides(16))
    for factor in (0, 1):
        simulator = Simulator("h200", num_sms=1)
        arrays = [simulator.array(np.zeros(n, np.float32)) for n in (512, 128, 1024)]
        values = f"and.b32 %r20, %r2, {factor}; cvt.u64.u32 %rd10, %r20; setp.ne.u32"
        changed = text.replace(old, new).replace("setp.ne.u32 %p2", f"{values} %p2", 1)
        assert new in changed
        if factor:
            with pytest.raises(SimulationError, match=f"illegal: {what} of wgmma differs between the lanes"):
                simulator.launch(changed, "product", 1, 128, *arrays)
        else:
            simulator.launch(changed, "product", 1, 128, *arrays)


@pytest.mark.parametrize("a, tail", [
    ("%rd6", "2, 1, 0, 0"), ("%rd6", "1, 0, 0, 0"), ("%rd6", "1, 1, 2, 0"), ("%rd6", "1, 1, 0"),
    ("{%r10, %r11, %r12, %r13}", "1, 1, 1, 0"),
])  # fmt: skip
def test_immediates_of_wgmma_are_checked(a, tail):
    """9.7.15.5.2; A in registers is K-major."""
    text = PRODUCT.replace("SCALE_D", "1").replace("KIND", "bf16").replace("}, A, ", f"}}, {a}, ")
    text = text.replace("A_STRIDES", strides(64)).replace("B_STRIDES", strides(16)).replace("SIGNS", tail)
    simulator = Simulator("h200", num_sms=1)
    arrays = [simulator.array(np.zeros(n, np.float32)) for n in (512, 128, 1024)]
    with pytest.raises(PtxError, match="with scales .* and transpositions .*9.7.15.5.2"):
        simulator.launch(text, "product", 1, 128, *arrays)
