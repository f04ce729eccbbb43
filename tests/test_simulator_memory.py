"""Address spaces, faults, calls, brx.idx and the parser of the simulator, against the PTX ISA's text."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from simulator import PtxError, SimulationError, Simulator, compile_ptx

LANES = np.arange(32)
U32 = np.uint32
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")

KERNEL = """.version 9.0
.target sm_100a
.address_size 64
{module}
.visible .entry test(.param .u64 out, .param .u64 in, .param .align 8 .b8 block[16]){directives}
{{
.reg .pred %p<4>; .reg .b16 %h<4>; .reg .b32 %r<16>; .reg .b64 %rd<16>; .reg .b32 %t; .reg .b32 %d; .reg .b64 %in;
.reg .b64 %out; .shared .align 16 .b8 shared[256]; .local .align 16 .b8 local[40];
mov.u32 %t, %tid.x; ld.param.u64 %in, [in]; mov.b32 %d, 0;
{body}
END: ld.param.u64 %out, [out]; mad.wide.u32 %out, %t, 4, %out; st.global.b32 [%out], %d;
ret;
}}"""


def text(body: str, module: str = "", directives: str = "") -> str:
    return KERNEL.format(body=body, module=module, directives=directives)


def run(body: str, module: str = "", *, directives: str = "", threads: int = 32, **options):
    """Runs `body`; `%in` is the address of 32 words, thread t's `%d` is element t of the result. (Result, reports.)"""
    simulator = Simulator("b200", num_sms=1, **options)
    source = simulator.array(np.arange(32, dtype=U32), name="the input")
    out = simulator.array(np.full(threads, 0xDEAD, U32))
    arguments = out, source, np.arange(16, dtype=np.uint8).tobytes()
    simulator.launch(text(body, module, directives), "test", 1, threads, *arguments)
    return out.tolist(), simulator.reports


def execute(*arguments, **options) -> list[int]:
    return run(*arguments, **options)[0]


def fails(message: str, body: str, module: str = "", error=SimulationError, **options) -> None:
    with pytest.raises(error, match=message):
        execute(body, module, **options)


# ---- local memory (5.1.5, 6.4.1.1) ---------------------------------------------------------------

LOCAL = "mov.b64 %rd1, local; mov.b32 %r1, local;"
INDEXED = LOCAL + "and.b32 %r2, %t, 7; mad.lo.u32 %r3, %r2, 4, %r1; mad.wide.u32 %rd3, %r2, 4, %rd1;"
GENERIC = INDEXED + "cvta.local.u64 %rd2, %rd1; mad.wide.u32 %rd4, %r2, 4, %rd2;"


@pytest.mark.parametrize("body, expected", [
    (INDEXED + "st.local.b32 [%r3+8], %t; ld.local.b32 %d, [%rd3+8];", LANES),
    (INDEXED + "st.local.b32 [0], %t; bar.warp.sync -1; ld.local.b32 %d, [local];", LANES),
    (GENERIC + "st.b32 [%rd4], %t; ld.local.b32 %d, [%r3];", LANES),
    (GENERIC + "st.local.b32 [%r3], %t; ld.b32 %d, [%rd4];", LANES),
    (GENERIC + "cvta.to.local.u64 %rd5, %rd4; st.local.b32 [%rd5], %t; ld.b32 %d, [%rd4];", LANES),
    (LOCAL + "st.local.v4.b32 [%r1+16], {0, %t, 2, 3}; ld.local.v2.b32 {%r4, %d}, [%r1+16];", LANES),
    (LOCAL + "st.local.u8 [%r1+39], %t; ld.local.s8 %d, [%r1+39];", LANES),
    (LOCAL + "setp.gt.u32 %p1, %t, 20; mov.b32 %d, 9; @%p1 st.local.b32 [%r1+36], %t; @%p1 ld.local.b32 %d, [%r1+36];",
     np.where(LANES > 20, LANES, 9)),
    (LOCAL + "setp.gt.u32 %p1, %t, 20; @%p1 bra A; st.local.b32 [%r1], 5; bra B; A: st.local.b32 [%r1], %t; "
     "B: ld.local.b32 %d, [%r1];", np.where(LANES > 20, LANES, 5)),
    # Of one instruction a lane each: local, shared and global memory.
    (GENERIC + "rem.u32 %r4, %t, 3; setp.eq.u32 %p1, %r4, 0; setp.eq.u32 %p2, %r4, 1; mad.wide.u32 %rd6, %t, 4, %in;"
     "mov.b64 %rd5, shared; cvta.shared.u64 %rd5, %rd5; mad.wide.u32 %rd5, %t, 4, %rd5; selp.b64 %rd5, %rd5, %rd6, %p2;"
     "selp.b64 %rd5, %rd4, %rd5, %p1; add.u32 %r5, %t, 100; st.b32 [%rd5], %r5; ld.b32 %d, [%rd5];", LANES + 100),
])  # fmt: skip
def test_local_memory_is_private_to_each_thread(body, expected):
    assert run(body) == (expected.tolist(), [])


@pytest.mark.parametrize("body, message", [
    ("st.local.b32 [%r1+40], %t;", "out_of_bounds: .* 4 bytes past the end of local memory .40 bytes.*thread .0, 0, 0."),
    ("st.local.u8 [%r1+40], %t;", "out_of_bounds: .* 1 bytes past the end of local memory"),
    ("st.b32 [%rd2+40], %t;", "out_of_bounds: .* 4 bytes past the end of local memory"),
    ("st.local.b32 [%rd2], %t;", "out_of_bounds: .* outside local memory"),
    ("ld.local.b32 %d, [%r1];", "uninitialised: .* at 0x0 .local memory"),
    ("st.local.b16 [%r1], %h1; ld.local.b32 %d, [%r1];", "uninitialised"),
    ("setp.eq.u32 %p1, %t, 7; @!%p1 st.local.b32 [%r1], 1; ld.local.b32 %d, [%r1];", "uninitialised: .*lane 7 "),
    ("st.local.b32 [%r1+2], %t;", "misaligned: access of 4 bytes at 0x2"),
    ("st.local.v2.b32 [%r1+4], {0, 0};", "misaligned: access of 8 bytes at 0x4"),
])  # fmt: skip
def test_local_memory_is_checked(body, message):
    fails(message, GENERIC + body)


# ---- what a fault says ---------------------------------------------------------------------------


@pytest.mark.parametrize("body, message", [
    ("@%p1 ld.global.b32 %d, [%in+128];", "4 bytes past the end of the input .128 bytes., by thread .49, 0, 0., lane 17 .test"),
    ("@%p1 ld.global.b64 %rd1, [%in+128];", "access of 8 bytes at 0x[0-9a-f]+0, 8 bytes past the end of the input"),
    ("@%p1 ld.b8 %d, [%in+-1];", "1 bytes before the input .128 bytes., by thread .49, 0, 0."),
    ("@%p1 st.global.b32 [%in+128], %t;", "4 bytes past the end of the input .*lane 17"),
    ("@%p1 red.global.add.u32 [%in+128], 1;", "4 bytes past the end of the input .*lane 17"),
    ("mov.b64 %rd1, 0; @%p1 ld.global.b32 %d, [%rd1];", "at 0x0, outside every allocation, by thread .49, 0, 0."),
    ("mov.b32 %r1, shared; @%p1 st.shared.b32 [%r1+256], %t;", "4 bytes past the end of shared memory .*lane 17"),
    ("mov.b32 %r1, shared; @%p1 ld.shared.b32 %d, [%r1];", "uninitialised: .* at 0x0 .shared.*lane 17"),
    ("@%p1 ld.global.b32 %d, [%in+2];", "misaligned: .*lane 17 .test, PTX line 10, CTA 0, warp 1"),
    ("mad.wide.u32 %rd1, %t, 4, %in; ld.global.b32 %d, [%rd1];", "4 bytes past the end of the input .*lane 0 .*warp 1"),
])  # fmt: skip
def test_a_fault_names_thread_address_and_allocation(body, message):
    fails(message, "setp.eq.u32 %p1, %t, 49;" + body, threads=64)


# ---- severities ----------------------------------------------------------------------------------


@pytest.mark.parametrize("severity", ["off", "warning"])
@pytest.mark.parametrize("check, body, first", [
    ("uninitialised", "mov.b32 %r1, shared; ld.shared.b32 %d, [%r1];", 0xCBCBCBCB),
    ("uninitialised", "mov.b32 %r1, shared; setp.lt.u32 %p1, %t, 32; @%p1 red.shared.add.u32 [%r1], 1;", 0),
    ("out_of_bounds", "setp.eq.u32 %p1, %t, 5; @%p1 ld.global.b32 %d, [%in+128];", 0xDEAD),
    ("misaligned", "setp.eq.u32 %p1, %t, 5; @%p1 st.global.b32 [%in+2], %t;", 0xDEAD),
    ("trap", "setp.eq.u32 %p1, %t, 5; @%p1 trap;", 0xDEAD),
    ("trap", "setp.eq.u32 %p1, %t, 5; @%p1 brkpt;", 0xDEAD),
    ("illegal", "TAB: .branchtargets END; setp.eq.u32 %p1, %t, 5; @%p1 brx.idx %t, TAB;", 0xDEAD),
])  # fmt: skip
def test_below_error_a_read_goes_on_and_a_faulting_warp_ends(check, body, first, severity):
    """The other warp goes on, past a barrier too."""
    result, reports = run(body + "bar.sync 0;", threads=64, checks={check: severity})
    assert result[:32] == [first] * 32
    assert result[32:] == ([first] * 32 if first == 0xCBCBCBCB else [0] * 32)
    assert {r.check for r in reports} == ({check} if severity == "warning" else set())


# ---- initialisation of global memory -------------------------------------------------------------


def outputs(body: str, write, dtype=np.uint32) -> list[int]:
    """`%in` is an array handed out uninitialised, that `write` then changes on the host."""
    simulator = Simulator("b200", num_sms=1)
    source, out = simulator.array(shape=(8,), dtype=dtype), simulator.array(np.zeros(1, U32))
    write(source)
    simulator.launch(text(body), "test", 1, 1, out, source, bytes(16))
    return out.tolist()


def some(array) -> None:
    array[1:3] = 0x3F8000CB, 0xCBCB0000  # bytes of the poison within


BYTES = "st.global.u8 [%in], 1; st.global.u8 [%in+1], 0; mov.b16 %h1, 0x302;"


def test_global_memory_is_initialised_by_byte():
    assert outputs(BYTES + "st.global.b16 [%in+2], %h1; ld.global.b32 %d, [%in];", lambda array: None) == [0x03020001]
    for stores in ("st.global.u8 [%in], %t;", "st.global.u8 [%in+3], %t;", BYTES):
        with pytest.raises(SimulationError, match="uninitialised: .*array"):
            outputs(stores + "ld.global.b32 %d, [%in];", lambda array: None)


def test_what_the_host_wrote_is_initialised_by_element():
    assert outputs("ld.global.b32 %d, [%in+4];", some) == [0x3F8000CB]
    assert outputs("ld.global.b32 %d, [%in+8];", some) == [0xCBCB0000]
    assert outputs("st.global.u8 [%in+4], 1; ld.global.b32 %d, [%in+4];", some) == [0x3F800001]
    for body in ("ld.global.b32 %d, [%in];", "ld.global.v2.b32 {%d, %r1}, [%in];", "ld.global.b64 %rd1, [%in+8];"):
        with pytest.raises(SimulationError, match="uninitialised"):
            outputs(body, some)
    with pytest.raises(SimulationError, match="uninitialised"):
        outputs("ld.global.b32 %d, [%in];", lambda array: array.__setitem__(0, 1), np.uint16)


def test_shared_memory_is_initialised_by_byte():
    fails("uninitialised", "mov.b32 %r1, shared; st.shared.u8 [%r1], %t; ld.shared.u16 %d, [%r1];")


# ---- state spaces (5.1.3, 5.1.6.1, 6.4.1, 9.7.9.8, 9.7.9.11) --------------------------------------

CONST = ".const .align 4 .b32 table[4] = {1, 2, 3, 4}; .global .align 4 .b32 other[2] = {7, 8};"


@pytest.mark.parametrize("body, message", [
    ("mov.b64 %rd1, shared; cvta.shared.u64 %rd1, %rd1; ld.shared.b32 %d, [%rd1];", "out_of_bounds: .*outside shared"),
    ("mov.b64 %rd1, table; cvta.const.u64 %rd1, %rd1; st.b32 [%rd1], %t;", "out_of_bounds: write .* read-only table"),
    ("mov.b64 %rd1, table; red.global.add.u32 [%rd1], 1;", "out_of_bounds: atomic on read-only table"),
    ("ld.const.b32 %d, [%in];", "out_of_bounds: ld.const at .* in the input"),
    ("ld.const.b32 %d, [other];", "out_of_bounds: ld.const at .* in other"),
    ("mov.b64 %rd1, block; cvta.param.u64 %rd1, %rd1; st.b32 [%rd1], %t;", "out_of_bounds: write .* parameters of test"),
    ("mov.b64 %rd1, block; cvta.param.u64 %rd1, %rd1; red.add.u32 [%rd1], 1;", "out_of_bounds: atomic on read-only param"),
    ("ld.param.b32 %d, [block+2];", "misaligned"),
    ("mov.b64 %rd1, block; ld.param.b32 %d, [%rd1+2];", "misaligned"),
    ("ld.param.v2.b32 {%r1, %d}, [block+4];", "misaligned"),
    ("ld.param.b32 %d, [block+16];", "out_of_bounds: .* 4 bytes past the end of parameters of test .32 bytes"),
    ("mov.b64 %rd1, block; ld.param.b64 %rd1, [%rd1+16];", "out_of_bounds: .* 8 bytes past the end of parameters"),
])  # fmt: skip
def test_accesses_in_the_wrong_state_space(body, message):
    fails(message, body, CONST)


@pytest.mark.parametrize("body, expected", [
    ("and.b32 %r1, %t, 3; mov.b64 %rd1, table; mad.wide.u32 %rd1, %r1, 4, %rd1; ld.const.b32 %d, [%rd1];", LANES % 4 + 1),
    ("mov.b64 %rd1, table; cvta.const.u64 %rd1, %rd1; ld.b32 %d, [%rd1+8];", 0 * LANES + 3),
    ("mov.b64 %rd1, block; ld.param.b32 %d, [%rd1+4];", 0 * LANES + 0x07060504),
    ("and.b32 %r1, %t, 3; mov.b64 %rd1, block; mad.wide.u32 %rd1, %r1, 4, %rd1; ld.param.u8 %d, [%rd1];", LANES % 4 * 4),
    ("mov.b64 %rd1, block; cvta.param::entry.u64 %rd1, %rd1; ld.u8 %d, [%rd1+9];", 0 * LANES + 9),
    ("mov.b64 %rd1, block; cvta.param.u64 %rd1, %rd1; cvta.to.param.u64 %rd1, %rd1; ld.param.u8 %d, [%rd1];", 0 * LANES),
    ("mov.b32 %r1, 0xFFFFFFF8; add.u32 %r1, %r1, 16; st.shared.b32 [%r1+-4], %t; st.shared.b32 [shared], 0;"
     "bar.warp.sync -1; ld.shared.b32 %d, [%r1+-8];", 0 * LANES),
])  # fmt: skip
def test_accesses_in_the_right_state_space(body, expected):
    assert execute(body, CONST) == expected.tolist()


def test_isspacep():
    """9.7.9.19: the parameters are in the global window too."""
    pointers = {
        "global": "mov.b64 %rd1, %in;",
        "const": "mov.b64 %rd1, table; cvta.const.u64 %rd1, %rd1;",
        "param": "mov.b64 %rd1, block; cvta.param.u64 %rd1, %rd1;",
        "shared": "mov.b64 %rd1, shared; cvta.shared.u64 %rd1, %rd1;",
        "local": "mov.b64 %rd1, local; cvta.local.u64 %rd1, %rd1;",
    }
    for space in (*pointers, "param::entry", "shared::cta"):
        for name, pointer in pointers.items():
            inside = space.split("::")[0] == name or (space, name) == ("global", "param")
            assert execute(f"{pointer} isspacep.{space} %p1, %rd1; selp.b32 %d, 1, 0, %p1;", CONST) == [inside] * 32


# ---- initial values (5.4.4) ----------------------------------------------------------------------


@pytest.mark.parametrize("module, loads, expected", [
    (".global .u64 p = generic(other);", "ld.global.u64 %rd1, [p]; ld.b32 %d, [%rd1];", 7),
    (".global .u64 p = other;", "ld.global.u64 %rd1, [p]; ld.global.b32 %d, [%rd1+4];", 8),
    (".global .u64 p = generic(other)+4;", "ld.global.u64 %rd1, [p]; ld.b32 %d, [%rd1];", 8),
    (".const .u64 p[2] = {other+4, generic(table)+8};", "ld.const.u64 %rd1, [p+8]; ld.b32 %d, [%rd1];", 3),
    (".global .u64 p[3] = {5, generic(table)};", "ld.global.u64 %rd1, [p+8]; ld.b32 %d, [%rd1];", 1),
    (".global .align 8 .b8 p[9] = {9, " + ", ".join(f"0xFF{'00' * i}(generic(other)+4)" for i in range(8)) + "};",
     "mov.b64 %rd2, 0;" + "".join(f"ld.global.u8 %rd3, [p+{i}]; shl.b64 %rd2, %rd2, 8; or.b64 %rd2, %rd2, %rd3;"
                                  for i in range(8, 0, -1)) + "ld.b32 %d, [%rd2];", 8),
    (".global .u64 q = p; .global .u64 p = other;", "ld.global.u64 %rd1, [q]; ld.global.u64 %rd1, [%rd1]; ld.b32 %d, [%rd1];", 7),
    (".global .u32 p[3][2] = {{1, 2}, {3}};", "ld.global.b32 %d, [p+8]; ld.global.b32 %r1, [p+12]; add.u32 %d, %d, %r1;", 3),
    (".global .u32 p[] = {2, 010, 0b11};", "ld.global.v2.b16 {%h1, %h2}, [p+4]; cvt.u32.u16 %d, %h1;", 8),
    (".global .f32 p[2] = {1.5};", "ld.global.b32 %d, [p];", 0x3FC00000),
    (".global .f32 p = 0d3FF8000000000000;", "ld.global.b32 %d, [p];", 0x3FC00000),
])  # fmt: skip
def test_initial_values(module, loads, expected):
    assert execute(loads, CONST + module) == [expected] * 32


@pytest.mark.parametrize("module, message", [
    (".global .u64 p = nowhere;", "address of nowhere is not modelled"),
    (".global .u32 p = other;", "line 4: an initial value that is not modelled"),
    (".global .u32 p[2][2] = {1, 2};", "line 4: an initialiser of another shape"),
    (".global .b128 p = 1 + ;", "line 4: "),
])  # fmt: skip
def test_initial_values_that_are_refused(module, message):
    fails(message, "", CONST + module, PtxError)


# ---- brx.idx (9.7.12.4) --------------------------------------------------------------------------

BRX = """and.b32 %r1, %t, MASK; TABLE: .branchtargets A, B, C;
GUARD brx.idx %r1, TABLE; mov.b32 %d, 9; bra END;
A: mov.b32 %d, 10; bra END; B: add.u32 %d, %t, 20; bra END; C: mov.b32 %d, 30;"""


def brx(mask: int, guard: str = "", opcode: str = "brx.idx") -> str:
    return BRX.replace("MASK", str(mask)).replace("GUARD", guard).replace("brx.idx", opcode)


def test_brx():
    assert execute(brx(1)) == np.where(LANES % 2, LANES + 20, 10).tolist()
    assert execute(brx(0, opcode="brx.idx.uni")) == [10] * 32
    divergent = execute("setp.gt.u32 %p1, %t, 7;" + brx(2, "@%p1"))
    assert divergent == np.where(LANES > 7, np.where(LANES & 2, 30, 10), 9).tolist()
    assert execute("setp.gt.u32 %p1, %t, 40;" + brx(2, "@%p1")) == [9] * 32
    fails("illegal: brx.idx with index 3, there are 3 targets, by thread .3, 0, 0.", brx(3))
    fails("illegal: a brx.idx.uni of lanes with different indices", brx(1, opcode="brx.idx.uni"))
    fails("test, line 11: unknown branch target", brx(1).replace("B, C", "B, D"), error=PtxError)


# ---- barrier.cluster (9.7.13.3) of a cluster of one CTA ------------------------------------------

EXCHANGE = """mov.b32 %r1, shared; mad.lo.u32 %r2, %t, 4, %r1; st.shared.b32 [%r2], %t;
ARRIVE WAIT
xor.b32 %r3, %t, 32; mad.lo.u32 %r3, %r3, 4, %r1; ld.shared.b32 %d, [%r3];
ARRIVE setp.lt.u32 %p1, %t, 32; @%p1 bra END; WAIT st.shared.b32 [%r3], %t;"""


@pytest.mark.parametrize("mode", ["eager", "late", "random"])
def test_cluster_barrier(mode):
    def run(arrive="barrier.cluster.arrive.aligned;", wait="barrier.cluster.wait.acquire.aligned;"):
        return execute(EXCHANGE.replace("ARRIVE", arrive).replace("WAIT", wait), threads=64, mode=mode)

    assert run() == [t ^ 32 for t in range(64)]
    with pytest.raises(SimulationError, match="race|uninitialised"):
        run("barrier.cluster.arrive.relaxed.aligned;")
    with pytest.raises(SimulationError, match="race|uninitialised|arrives again"):
        run(wait="")
    with pytest.raises(SimulationError, match="race|uninitialised|wait without"):
        run(arrive="")
    with pytest.raises(SimulationError, match="deadlock"):
        execute("setp.lt.u32 %p1, %t, 32; @%p1 bra A; barrier.cluster.arrive; barrier.cluster.wait; A: bar.sync 0;",
                threads=64, mode=mode)  # fmt: skip


# ---- what the parser and the launch refuse -------------------------------------------------------


@pytest.mark.parametrize("body, message", [
    (".reg .b128 %q;", "test, line 10: a register that is not modelled"),
    (".reg .v4 .f32 %q;", "test, line 10: not understood"),
    ("\nld.global.b32 %d, [%rd99];", "test, line 11: unknown register %rd99"),
    ("popc.b32 %zz, %t;", "test, line 10: unknown register %zz"),
    ("ld.global.b32 %d, [%in-4];", "test, line 10: unknown register %in-4"),
    ("mov.u32 %d, %nwarpid;", "test, line 10: special register %nwarpid is not modelled"),
    ("popc.b32 %d, %gridid;", "test, line 10: special register %gridid is not modelled"),
    ("mov.b32 %d, nothing;", "test, line 10: test: unknown symbol nothing"),
    ("@%p77 mov.b32 %d, 1;", "test, line 10: unknown predicate %p77"),
    ("add.u32 %d, 09, 1;", "test, line 10: "),
    ("(mov.b32) %d, 1;", "test, line 10: not understood"),
    (".alias f, g;", "test, line 10: not modelled"),
    ("{ .local .b8 local[4]; }", "test, line 10: a second variable of this name"),
    ("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r1], %t, [%r2];", "line 10: st.async.* not modelled"),
    ("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r1], %t, [%r2];", "red.async.* not"),
    ("st.bulk.shared::cta [%rd1], 64, 0;", "line 10: st.bulk.* is not modelled"),
    ("ld.global.b128 %d, [%in];", "line 10: ld.global.b128 is not modelled"),
    ("{ .param .b64 a; st.param.b32 [a+4], %t; }", "a part of a call's parameter is not modelled"),
    ("call.uni f, ();", "line 10: a call of f is not modelled"),
])  # fmt: skip
def test_what_is_not_modelled_is_refused_with_its_line(body, message):
    fails(message, body, error=PtxError)


@pytest.mark.parametrize("constant, value", [
    ("010", 8), ("0b1010", 10), ("0x1F", 31), ("-010", 2**32 - 8), ("17U", 17), ("WARP_SZ", 32), ("1.5", 0x3FC00000),
    ("-2.5e-1", 0xBE800000), ("0f40000000", 0x40000000), ("0d3FF8000000000000", 0x3FC00000),
])  # fmt: skip
def test_constants(constant, value):
    """4.5.1, 4.5.2."""
    kind = "f32" if "." in constant or constant[1] in "fd" else "b32"
    assert execute(f"mov.{kind} %d, {constant};") == [value] * 32


def test_directives_of_the_launch():
    """11.4.2, 11.4.3, 11.7."""
    assert execute("", directives=" .reqntid 32, 1") == [0] * 32
    assert execute("", directives=" .maxntid 64") == [0] * 32
    assert execute("", directives=" .explicitcluster .reqnctapercluster 1, 1, 1") == [0] * 32
    fails(r"test: a CTA of \(32, 1, 1\), .reqntid says \(64, 1, 1\)", "", directives=" .reqntid 64")
    fails(r"a CTA of \(32, 1, 1\), .reqntid says \(8, 4, 1\)", "", directives=" .reqntid 8, 4")
    for directives in (" .reqnctapercluster 2", " .explicitcluster", " .explicitcluster .reqnctapercluster 1, 2"):
        fails("test, line 6: a cluster of several CTAs is not modelled", "", error=PtxError, directives=directives)


# ---- compiled kernels ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled():
    return compile_ptx(Path(__file__).with_name("simulator") / "kernels" / "memory.cu", "sm_100a")


@needs_nvcc
@pytest.mark.parametrize("threads, steps", [(32, 0), (32, 13), (50, 6), (64, 40)])
def test_compiled_local_array(compiled, threads, steps):
    data = np.random.default_rng(0).integers(0, 100, (8, threads), dtype=np.int32)
    simulator = Simulator("b200", num_sms=1)
    out = simulator.array(shape=(threads,), dtype=np.int32)
    simulator.launch(compiled, "local_array", 1, threads, out, simulator.array(data), steps)
    for t in range(threads):
        a = data[:, t].tolist()
        for i in range(steps):
            k = a[i % 8] % 8
            old = a[k]
            a[k] = a[(k + 3) % 8] + t
            a[i % 8] = old
        assert out[t] == a[steps % 8]
    assert not simulator.reports


@needs_nvcc
def test_compiled_printf(compiled, capsys):
    """It returns the number of its arguments, 0 without any."""
    simulator = Simulator("b200", num_sms=1)
    out = simulator.array(np.zeros(32, np.int32))
    simulator.launch(compiled, "print", 1, 32, out, np.float64(2.125).tobytes(), -(1 << 40))
    lines = [f"-{t} 7   | 2.12|2.125000e+00 2.125 text {'ABCDEF'[t]} -1099511627776 0xff 1099511627776 00042 2.1 %"
             for t in (1, 3, 5)]  # fmt: skip
    assert capsys.readouterr().out.splitlines() == lines + ["none"] * 3
    assert out.tolist() == [1300 if t in (1, 3, 5) else 0 for t in range(32)]


VPRINTF = """{{ .param .b64 a; .param .b64 b; .param .b32 r; st.param.b64 [a], {form}; st.param.b64 [b], %rd2;
call.uni (r), vprintf, (a, b); ld.param.b32 %d, [r]; }}"""


def test_printf_by_hand(capsys):
    def module(form: str) -> str:
        return f".global .b8 form[{len(form) + 1}] = {{{', '.join(str(ord(c)) for c in form)}}};"

    call = VPRINTF.format(form="%rd3")
    body = GENERIC + "mov.b64 %rd3, form; setp.gt.u32 %p1, %t, 29; @!%p1 bra END; st.local.b32 [local], -2;" + call
    assert execute(body, module("[%hhu %hd]\n"), checks={"uninitialised": "off"})[29:] == [0, 2, 2]
    assert capsys.readouterr().out == f"[254 {0xCBCB - 0x10000}]\n" * 2
    fails("uninitialised: .* at 0x4 .local memory.*lane 30", body, module("%d %d"))
    fails("line 11: the printf format '%n' is not modelled", body, module("%n"), PtxError)
    assert execute(GENERIC + VPRINTF.format(form="0")) == [2**32 - 1] * 32
