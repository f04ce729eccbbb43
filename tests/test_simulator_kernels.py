"""Micro kernels of the simulator: copies and MMAs in every mode, and generated mutations of their synchronisation."""

import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from simulator import SimulationError, Simulator, compile_ptx, mutation
from simulator.formats import bf16_to_f32, f32_to_bf16

KERNELS = Path(__file__).with_name("simulator") / "kernels"
MODES = [("eager", 0), ("late", 0), *[("random", seed) for seed in range(5)]]

needs_nvcc = pytest.mark.skipif(
    shutil.which("nvcc") is None or not (KERNELS.parents[2] / "third_party/cutlass/include").exists(),
    reason="needs nvcc and the CUTLASS headers",
)


def bf16(rng, *shape: int) -> np.ndarray:
    return f32_to_bf16(rng.standard_normal(shape).astype(np.float32))


def real(x: np.ndarray) -> np.ndarray:
    return bf16_to_f32(x).astype(np.float64)


class Pipeline:
    """pipeline_sm90.cu: TMA ring, wgmma, staged bulk reduction."""

    tiles = 5

    def __init__(self):
        rng = np.random.default_rng(0)
        self.text = compile_ptx(KERNELS / "pipeline_sm90.cu", "sm_90a")
        self.a, self.b = bf16(rng, 1, self.tiles, 64, 64), bf16(rng, 1, self.tiles, 64, 64)
        self.expected = sum(real(self.a[0, i]) @ real(self.b[0, i]).T for i in range(self.tiles))

    def run(self, text: str, mode: str, seed: int, **options) -> bool:
        simulator = Simulator("h200", num_sms=1, mode=mode, seed=seed, **options)
        a, b = simulator.array(self.a), simulator.array(self.b)
        out = simulator.array(np.zeros((64, 64), np.float32))
        maps = b"".join(simulator.tensor_map(x, (64, 64, 1, 1), swizzle=128) for x in (a, b))
        simulator.launch(text, "pipeline", 1, 160, maps, out, self.tiles, shared_bytes=50 << 10)
        return bool(np.allclose(out, self.expected, atol=1e-3)) and not simulator.reports


class Attention:
    """attention_sm100.cu: two chained GEMMs through tensor memory, A from tensor memory, B seen MN-major."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.text = compile_ptx(KERNELS / "attention_sm100.cu", "sm_100a")
        self.a, self.b, self.c = bf16(rng, 1, 2, 128, 64), bf16(rng, 1, 2, 128, 64), bf16(rng, 1, 1, 128, 64)
        scores = sum(real(self.a[0, h]) @ real(self.b[0, h]).T for h in range(2))
        weights = f32_to_bf16(scores.astype(np.float32) * np.float32(0.125))
        self.expected = real(weights) @ real(self.c[0, 0])

    def run(self, text: str, mode: str, seed: int, **options) -> bool:
        simulator = Simulator("b200", num_sms=1, mode=mode, seed=seed, **options)
        arrays = [simulator.array(x) for x in (self.a, self.b, self.c)]
        out = simulator.array(shape=(128, 64), dtype=np.float32)
        boxes = ((64, 128, 2, 1), (64, 128, 2, 1), (64, 128, 1, 1))
        maps = b"".join(simulator.tensor_map(x, box, swizzle=128) for x, box in zip(arrays, boxes))
        simulator.launch(text, "attention", 1, 160, maps, out, shared_bytes=81 << 10)
        # Scores next to a rounding boundary may round the other way.
        error = np.linalg.norm(out - self.expected) / np.linalg.norm(self.expected)
        return bool(error < 1e-3) and not simulator.reports


@pytest.fixture(scope="module")
def pipeline():
    return Pipeline()


@pytest.fixture(scope="module")
def attention():
    return Attention()


@needs_nvcc
@pytest.mark.parametrize("mode, seed", MODES)
def test_unchanged_kernels_pass_every_mode_without_a_report(pipeline, attention, mode, seed):
    assert pipeline.run(pipeline.text, mode, seed)
    assert attention.run(attention.text, mode, seed)


# Changes that leave a correct program: no other CTA wants the allocation permit.
EQUIVALENT = ("relinquish_alloc_permit",)


@needs_nvcc
def test_generated_mutations_are_caught(pipeline, attention, capsys):
    found = []
    for kernel in (pipeline, attention):
        mutants = mutation.mutations(kernel.text)
        assert len(mutants) >= 30
        # Nobody overwrites what is loaded before dealloc: only the last wait::ld is needed.
        loads = [m for m in mutants if "tcgen05.wait::ld" in m.name]
        mutants = [m for m in mutants if m not in loads[:-1]]
        found += mutation.score(mutants, kernel.run, seeds=2)
    with capsys.disabled():
        print("\n" + mutation.table(found))
    missed = [m.name for m in found if not m.caught and not any(e in m.name for e in EQUIVALENT)]
    assert not missed
    assert sum("eager" in m.missed for m in found if m.caught) >= 5


@needs_nvcc
def test_values_alone_show_a_missing_wait_only_to_the_adversary(pipeline):
    """With happens-before off, what is left is the timing of the asynchronous work."""
    text = pipeline.text.replace("wgmma.wait_group.sync.aligned 0;", "")
    off = {"checks": {"race": "off", "proxy_fence": "off", "exit": "off"}}
    assert pipeline.run(text, "eager", 0, **off)
    assert not pipeline.run(text, "late", 0, **off)


@needs_nvcc
def test_runs_are_reproducible(pipeline):
    def instructions(seed: int) -> int:
        simulator = Simulator("h200", num_sms=1, mode="random", seed=seed)
        a, b = simulator.array(pipeline.a), simulator.array(pipeline.b)
        out = simulator.array(np.zeros((64, 64), np.float32))
        maps = b"".join(simulator.tensor_map(x, (64, 64, 1, 1), swizzle=128) for x in (a, b))
        simulator.launch(pipeline.text, "pipeline", 1, 160, maps, out, pipeline.tiles, shared_bytes=50 << 10)
        return simulator.machine.instructions, simulator.machine.engine.steps, out.tobytes()

    assert instructions(3) == instructions(3)


@needs_nvcc
def test_speed_and_profile(attention):
    attention.run(attention.text, "late", 0)  # translated
    simulator = Simulator("b200", num_sms=1)
    arrays = [simulator.array(x) for x in (attention.a, attention.b, attention.c)]
    out = simulator.array(shape=(128, 64), dtype=np.float32)
    boxes = ((64, 128, 2, 1), (64, 128, 2, 1), (64, 128, 1, 1))
    maps = b"".join(simulator.tensor_map(x, box, swizzle=128) for x, box in zip(arrays, boxes))
    begin = time.perf_counter()
    with simulator.profiled() as profile:
        simulator.launch(attention.text, "attention", 1, 160, maps, out, shared_bytes=81 << 10)
    seconds = time.perf_counter() - begin
    table = profile.table()
    mmas = {w: n for (_, w, opcode), n in table.items() if opcode.startswith("tcgen05.mma")}
    loads = {w: sum(c for (_, v, o), c in table.items() if v == w and o.startswith("tcgen05.ld")) for w in range(5)}
    assert sum(n for (_, w, o), n in table.items() if o.startswith("tcgen05.mma")) == 16 and set(mmas) == {4}
    assert loads == {0: 24, 1: 24, 2: 24, 3: 24, 4: 0}
    assert seconds < 5.0  # a generous bound for a busy machine; about 0.2 s alone


# ---- copies, written by hand -----------------------------------------------------------------------

HEAD = ".version 9.0\n.target sm_100a\n.address_size 64\n"


def tensor_copy(rank: int, at: tuple[int, ...], size: int, words: int) -> str:
    """Loads one box into shared memory and copies it to `out`, 32 threads."""
    coordinates = ", ".join(str(x) for x in at)
    return (
        HEAD
        + f"""
.visible .entry copy(.param .align 64 .b8 map[128], .param .u64 out) {{
.reg .pred %p<4>; .reg .b32 %r<9>; .reg .b64 %rd<9>;
.shared .align 1024 .b8 tile[{size}];
.shared .align 8 .b8 bar[8];
mov.b64 %rd1, map; cvta.param.u64 %rd1, %rd1;
ld.param.u64 %rd2, [out];
mov.u32 %r1, tile; mov.u32 %r2, bar; mov.u32 %r3, %tid.x;
setp.eq.u32 %p1, %r3, 0;
@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
@%p1 fence.mbarrier_init.release.cluster;
bar.warp.sync -1;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], {size};
@%p1 cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {{{coordinates}}}], [%r2];
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0;
@!%p2 bra WAIT;
mov.u32 %r4, %r3;
LOOP: mad.lo.u32 %r5, %r4, 4, %r1; ld.shared.b32 %r6, [%r5];
mad.wide.u32 %rd3, %r4, 4, %rd2; st.global.b32 [%rd3], %r6;
add.u32 %r4, %r4, 32; setp.lt.u32 %p3, %r4, {words};
@%p3 bra LOOP;
ret;
}}"""
    )


@pytest.mark.parametrize("width", [0, 32, 64, 128])
@pytest.mark.parametrize("shape, box, at", [
    ((40, 64), (16, 8), (32, 5)),
    ((40, 64), (16, 32), (48, -3)),
    ((40, 64), (16, 16), (56, 30)),
    ((3, 20, 64), (16, 8, 2), (16, -2, 1)),
    ((2, 5, 6, 2, 32), (16, 2, 3, 2, 1), (16, 1, 4, 3, 1)),
])  # fmt: skip
def test_tensor_copy_with_swizzle_and_bounds(shape, box, at, width):
    """Element by element, from the text on tensors and swizzling (5.5.7): chunk number XOR row number."""
    if 2 * box[0] > (width or 256):
        pytest.skip("the box is wider than the swizzle")
    rng = np.random.default_rng(1)
    data = rng.integers(1, 1 << 16, shape).astype(np.uint16)
    size = 2 * int(np.prod(box))
    simulator = Simulator("b200", num_sms=1)
    source, out = simulator.array(data), simulator.array(shape=(size // 2,), dtype=np.uint16)
    tensor_map = simulator.tensor_map(source, box, swizzle=width)
    simulator.launch(tensor_copy(len(box), at, size, size // 4), "copy", 1, 32, tensor_map, out)
    expected = np.zeros(size // 2, np.uint16)
    for number in range(size // 2):
        rest, index, inside = number, [], True
        for extent, begin, limit in zip(box, at, reversed(shape)):
            x = begin + rest % extent
            rest //= extent
            index.append(x)
            inside &= 0 <= x < limit
        byte = 2 * number
        if width:
            rows_in_pattern = {32: 2, 64: 4, 128: 8}[width]
            row = byte // 128
            byte ^= (row % rows_in_pattern) * 16
        expected[byte // 2] = data[tuple(reversed(index))] if inside else 0
    assert (out == expected).all()


def test_tensor_map_arguments_are_checked():
    simulator = Simulator("b200", num_sms=1)
    source = simulator.array(np.zeros((16, 24), np.uint16))
    for box, swizzle, text in (
        ((300, 1), 0, "box 0 = 300"),
        ((4, 1), 0, "not a multiple of 16"),
        ((24, 1), 32, "more than the swizzle's 32"),
        ((8, 0), 0, "box 1 = 0"),
    ):
        with pytest.raises(ValueError, match=text):
            simulator.tensor_map(source, box, swizzle=swizzle)
    odd = simulator.array(np.zeros((16, 20), np.uint16))
    with pytest.raises(ValueError, match="stride 1 = 40"):
        simulator.tensor_map(odd, (8, 1))


SETMAXNREG = HEAD + """
.visible .entry registers() .maxntid 256, 1, 1 {{
.reg .pred %p<2>; .reg .b32 %r<3>;
mov.u32 %r1, %tid.x; setp.ge.u32 %p1, %r1, 128;
@%p1 bra MORE;
{first}
ret;
MORE:
setmaxnreg.inc.sync.aligned.u32 {count};
ret;
}}"""  # fmt: skip


def test_register_pool_blocks_until_registers_are_free():
    give = "setmaxnreg.dec.sync.aligned.u32 240;"  # no cubin: 256 threads launch with 248 each, 255 rounded down

    def run(first: str, count: int, mode: str = "late", registers: int = 0) -> None:
        text = SETMAXNREG.format(first=first, count=count)
        Simulator("h200", num_sms=1, mode=mode).launch(text, "registers", 1, 256, registers=registers)

    for mode in ("eager", "late", "random"):
        run(give, 256, mode)
    with pytest.raises(SimulationError, match="(?s)deadlock.*registers, 0 free"):
        run("", 256)
    with pytest.raises(SimulationError, match="illegal: setmaxnreg 244"):
        run(give, 244)
    give = "setmaxnreg.dec.sync.aligned.u32 24;"  # of 126, which is 128 in units of 8
    run(give, 232, registers=126)
    with pytest.raises(SimulationError, match=r"(?s)deadlock.*waits for 3584 registers, \d+ free"):
        run(give, 240, registers=126)
    with pytest.raises(SimulationError, match="67584 registers a CTA, more than 65536"):
        run(give, 240, registers=257)


def test_bulk_reduction_adds_in_the_pool_type():
    text = (
        HEAD
        + """
.visible .entry reduce(.param .u64 out) {
.reg .b32 %r<9>; .reg .b64 %rd<3>; .reg .pred %p1;
.shared .align 16 .b8 tile[64];
ld.param.u64 %rd1, [out]; mov.u32 %r1, tile; mov.u32 %r2, %tid.x; mad.lo.u32 %r3, %r2, 4, %r1;
mov.b32 %r4, 0x3F803B80;
setp.lt.u32 %p1, %r2, 16;
@%p1 st.shared.b32 [%r3], %r4;
FENCE
bar.warp.sync -1;
setp.eq.u32 %p1, %r2, 0;
@%p1 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16 [%rd1], [%r1], 64;
@%p1 cp.async.bulk.commit_group;
@%p1 cp.async.bulk.wait_group.read 0;
ret; }"""
    )

    def run(text: str, mode: str) -> np.ndarray:
        simulator = Simulator("h200", num_sms=1, mode=mode)
        out = simulator.array(np.full(32, 0x3F80, np.uint16))
        simulator.launch(text, "reduce", 1, 32, out)
        return out

    for mode in ("eager", "late", "random"):
        # 1 + 2^-8 is a tie of bf16 and goes to even; 1 + 1 = 2.
        assert run(text.replace("FENCE", "fence.proxy.async.shared::cta;"), mode).tolist() == [0x3F80, 0x4000] * 16
        with pytest.raises(SimulationError, match="proxy_fence"):
            run(text.replace("FENCE", ""), mode)
    early = text.replace("FENCE", "fence.proxy.async.shared::cta;").replace("@%p1 cp.async.bulk.wait_group.read 0;", "")
    with pytest.raises(SimulationError, match="exit: the CTA exits while"):
        run(early, "late")
