"""Order between threads, proxies and grids: programs that are right, and the same with one thing wrong."""

import numpy as np
import pytest
from simulator import PtxError, SimulationError, Simulator

HEAD = ".version 9.0\n.target sm_100a\n.address_size 64\n"
FENCE = "fence.proxy.async.shared::cta;"
COMMIT = "cp.async.bulk.commit_group;"


def program(body: str, target: str = "sm_100a") -> str:
    """%r1 a tile, %r2 the thread, %r3 its word of the tile, %r4 an mbarrier of one arrival; %r0 is the result."""
    return f"""{HEAD.replace("sm_100a", target)}
.visible .entry test(.param .u64 out, .param .u64 other) {{
.reg .pred %p<9>; .reg .b32 %r<20>; .reg .b64 %rd<9>; .reg .f32 %f<9>;
.shared .align 1024 .b8 tile[4096];
.shared .align 8 .b8 bar[16];
mov.u32 %r1, tile; mov.u32 %r2, %tid.x; mad.lo.u32 %r3, %r2, 4, %r1; mov.u32 %r4, bar; mov.u32 %r0, 0;
ld.param.u64 %rd1, [out]; mad.wide.u32 %rd1, %r2, 4, %rd1;
ld.param.u64 %rd2, [other];
setp.eq.u32 %p1, %r2, 0;
setp.lt.u32 %p2, %r2, 2;
setp.eq.u32 %p3, %r2, 1;
setp.lt.u32 %p4, %r2, 32;
@%p1 mbarrier.init.shared::cta.b64 [%r4], 1;
@%p1 fence.mbarrier_init.release.cluster;
bar.sync 0;
{body}
st.global.u32 [%rd1], %r0;
ret; }}"""


def run(body: str, mode: str, *, threads: int = 64, seed: int = 0, device: str = "b200", **options) -> np.ndarray:
    simulator = Simulator(device, num_sms=1, mode=mode, seed=seed, **options)
    out = simulator.array(shape=(threads,), dtype=np.uint32)
    other = simulator.array(np.arange(1024, dtype=np.uint32))
    simulator.launch(program(body, {"b200": "sm_100a", "h200": "sm_90a"}[device]), "test", 1, threads, out, other)
    assert not simulator.reports
    return np.concatenate([out, other])


LOAD = """
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], 256;
@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd2], 256, [%r4];
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p8, [%r4], 0;
@!%p8 bra WAIT;
"""
STORE = "cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r1], 256;"
LATE = ("late", "random")
ALL = ("eager", *LATE)

# name: (a right program, its results, [(what is replaced, by what, the report, the modes that see it)])
PROGRAMS = {
    "bulk store of generic stores (8.6, proxies)": (
        f"add.u32 %r5, %r2, 500; st.shared.u32 [%r3], %r5; {FENCE} bar.sync 0; @%p1 {STORE} @%p1 {COMMIT} "
        "@%p1 cp.async.bulk.wait_group 0;",
        [*[0] * 64, *range(500, 564), 64],
        [
            (FENCE, "", "proxy_fence", ALL),
            (FENCE, "fence.proxy.async.global;", "proxy_fence", ALL),
            (f"st.shared.u32 [%r3], %r5; {FENCE}", f"{FENCE} st.shared.u32 [%r3], %r5;", "proxy_fence", ALL),
            ("bar.sync 0;", "", "race", ALL),
        ],
    ),
    "bulk load over generic stores": (
        f"st.shared.u32 [%r3], %r2; {FENCE} bar.sync 0; {LOAD} ld.shared.u32 %r0, [%r3];",
        range(64),
        [
            (FENCE, "", "proxy_fence: asynchronous copy: .* overwrites", ALL),
            ("@!%p8 bra WAIT;", "", "race", LATE),  # try_wait may give up (9.7.13.15.16)
            ("[%r4], 256;", "[%r4], 240;", "deadlock", ALL),
            ("[%r4], 0;", "[%r4], 1;", "race|deadlock", LATE),
        ],
    ),
    "atomics on shared memory": (
        f"""setp.lt.u32 %p5, %r2, 4; @%p5 st.shared.u32 [%r3], 5; bar.sync 0; red.shared.add.u32 [%r1], 1; {FENCE} bar.sync 1;
        ld.shared.u32 %r0, [%r1]; @%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r1], 16;
        @%p1 {COMMIT} @%p1 cp.async.bulk.wait_group 0;""",
        [*[69] * 64, 69, 5, 5, 5, 4],
        [
            ("bar.sync 0;", "", "race|uninitialised", ALL),
            ("bar.sync 1;", "", "race", ALL),
            (FENCE, "", "proxy_fence", ALL),
        ],
    ),
    "bulk groups, the newest of which may be pending": (
        f"""add.u32 %r5, %r2, 500; st.shared.u32 [%r3], %r5; {FENCE} bar.sync 0;
        @%p1 {STORE} @%p1 {COMMIT} @%p1 {STORE} @%p1 {COMMIT} @%p1 cp.async.bulk.wait_group.read 0;
        bar.sync 1; add.u32 %r5, %r2, 700; st.shared.u32 [%r3], %r5;""",
        [*[0] * 64, *range(500, 564), 64],
        [("read 0;", f"read {n};", "may still read|exit", ALL) for n in (1, 2, 3)],
    ),
    "bulk groups of two threads": (
        f"""add.u32 %r5, %r2, 500; st.shared.u32 [%r3], %r5; {FENCE} bar.sync 0;
        @%p2 {STORE} @%p2 {COMMIT} @%p2 cp.async.bulk.wait_group.read 0;
        bar.sync 1; add.u32 %r5, %r2, 700; st.shared.u32 [%r3], %r5;""",
        [*[0] * 64, *range(500, 564), 64],
        [("@%p2 cp.async.bulk.wait", "@%p3 cp.async.bulk.wait", "may still read", ALL)],
    ),
    "an mbarrier's life (9.7.13.15)": (
        """mov.u32 %r5, 9; @%p1 mbarrier.arrive.shared::cta.b64 _, [%r4];
        W1: mbarrier.try_wait.parity.shared::cta.b64 %p8, [%r4], 0; @!%p8 bra W1;
        bar.sync 0;
        @%p1 mbarrier.arrive.shared::cta.b64 _, [%r4];
        W2: mbarrier.try_wait.parity.shared::cta.b64 %p8, [%r4], 1; @!%p8 bra W2;
        bar.sync 0; @%p1 mbarrier.inval.shared::cta.b64 [%r4]; @%p1 st.shared.u32 [%r4], %r5;""",
        [0] * 64,
        [
            ("W1: mbarrier.try_wait.parity.shared::cta.b64 %p8, [%r4], 0; @!%p8 bra W1;", "", "before a wait", ALL),
            ("@%p1 mbarrier.inval.shared::cta.b64 [%r4];", "", "of a live mbarrier", ALL),
            ("mov.u32 %r5, 9;", "ld.shared.u32 %r5, [%r4];", "of a live mbarrier", ALL),
            ("@%p1 mbarrier.inval", "@%p1 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r4], 16;"
             "@%p1 mbarrier.inval", "16 bytes outstanding", ALL),
            ("@%p1 mbarrier.inval", "@%p1 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r4], 1048576;"
             "@%p1 mbarrier.inval", "the most is", ALL),
            ("arrive.shared::cta.b64 _, [%r4];\n        W2", "arrive.noComplete.shared::cta.b64 _, [%r4], 1;\n        W2",
             "noComplete", ALL),
            ("bar.sync 0;\n        @%p1 mbarrier.arrive", "bar.sync 0;\n        mbarrier.arrive", "are complete|before a wait", ALL),
        ],
    ),
    "arrive_drop takes its count from the next phases (9.7.13.15.14)": (
        """@%p1 mbarrier.inval.shared::cta.b64 [%r4]; @%p1 mbarrier.init.shared::cta.b64 [%r4], 3;
        bar.sync 0;
        @%p1 mbarrier.arrive_drop.shared::cta.b64 _, [%r4], 2;
        @%p1 mbarrier.arrive.shared::cta.b64 _, [%r4];
        W1: mbarrier.try_wait.parity.shared::cta.b64 %p8, [%r4], 0; @!%p8 bra W1;
        bar.sync 0;
        @%p1 mbarrier.arrive.shared::cta.b64 _, [%r4];
        W2: mbarrier.try_wait.parity.shared::cta.b64 %p8, [%r4], 1; @!%p8 bra W2;""",
        [0] * 64,
        [("_, [%r4], 2;", "_, [%r4], 1;", "deadlock", ALL)],
    ),
    "a lane spins for another one of its warp": (
        """mov.u64 %rd3, %rd2; @%p1 bra SPIN; @!%p3 bra END; mov.u32 %r5, 77; st.volatile.global.u32 [%rd3], %r5; bra END;
        SPIN: ld.volatile.global.u32 %r0, [%rd3]; setp.ne.u32 %p5, %r0, 77; @%p5 bra SPIN;
        END:""",
        [77] + [0] * 63,
        [],
    ),
    "named barriers": (
        "@%p4 bra ARRIVE; bar.sync 1, 64; bra END; ARRIVE: bar.arrive 1, 64; END: bar.sync 0;",
        [0] * 64,
        [
            ("bar.arrive 1, 64", "bar.arrive 1, 96", "barrier 1 expects", ALL),
            ("ARRIVE: bar", "ARRIVE: @!%p1 bar", "deadlock", ALL),  # half a warp does not arrive
        ],
    ),
    "a lane arrives for its warp (9.7.13.2)": (
        """add.u32 %r5, %r2, 500; @!%p4 bra WAIT;
        st.shared.u32 [%r3], %r5; bar.warp.sync -1; @%p1 mbarrier.arrive.shared::cta.b64 _, [%r4]; bra END;
        WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p8, [%r4], 0; @!%p8 bra WAIT;
        ld.shared.u32 %r0, [%r3 + -128];
        END:""",
        [*[0] * 32, *range(500, 532)],
        [
            ("bar.warp.sync -1;", "", "race: reads shared .* written by warp 0 lane 1 ", ALL),
            ("bar.warp.sync -1;", "@%p2 bar.warp.sync 3;", "race: reads shared .* written by warp 0 lane 2 ", ALL),
            ("bar.warp.sync -1;", "shfl.sync.idx.b32 %r6, %r2, 0, 31, -1;", "race: reads shared", ALL),
            ("st.shared.u32 [%r3], %r5; bar.warp.sync -1;", "bar.warp.sync -1; st.shared.u32 [%r3], %r5;", "race", ALL),
        ],
    ),
    "a lane arrives for what its warp has read": (
        """st.shared.u32 [%r3], %r2; bar.sync 0; @!%p4 bra WAIT;
        ld.shared.u32 %r0, [%r3]; ld.shared.u32 %r5, [%r1]; bar.warp.sync -1;
        @%p1 mbarrier.arrive.shared::cta.b64 _, [%r4]; bra END;
        WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p8, [%r4], 0; @!%p8 bra WAIT;
        st.shared.u32 [%r3 + -128], %r2;
        END:""",
        [*range(32), *[0] * 32],
        [
            ("bar.warp.sync -1;", "", "race: overwrites .* that warp 0 may still read", ALL),
            ("ld.shared.u32 %r0, [%r3]; ld.shared.u32 %r5, [%r1]; bar.warp.sync -1;", "ld.shared.u32 %r0, [%r1];",
             "race: overwrites .* that warp 0 may still read", ALL),
        ],
    ),
    "a lane waits for its warp": (
        """setp.eq.u32 %p5, %r2, 32; st.shared.u32 [%r3], %r2; @!%p4 bra SECOND;
        bar.warp.sync -1; @%p1 mbarrier.arrive.shared::cta.b64 _, [%r4]; bra END;
        SECOND: @!%p5 bra READ;
        WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p8, [%r4], 0; @!%p8 bra WAIT;
        READ: bar.warp.sync -1; ld.shared.u32 %r0, [%r3 + -128];
        END:""",
        [*[0] * 32, *range(32)],
        [("READ: bar.warp.sync -1;", "READ:", "race: reads shared|uninitialised", ALL)],
    ),
    "lanes exchange words": (
        """xor.b32 %r5, %r3, 4; st.shared.u32 [%r3], %r2; bar.warp.sync -1; ld.shared.u32 %r0, [%r5];
        bar.warp.sync %r6; st.shared.u32 [%r3], %r2;""".replace("xor", "mov.u32 %r6, -1; xor"),
        [t ^ 1 for t in range(64)],
        [
            ("bar.warp.sync -1;", "", "race: reads shared", ALL),
            ("bar.warp.sync %r6;", "", "race: overwrites .* may still read", ALL),
        ],
    ),
    "halves of a warp exchange words": (
        """shr.u32 %r5, %r2, 4; shl.b32 %r5, %r5, 4; mov.u32 %r6, 0xFFFF; shl.b32 %r6, %r6, %r5; xor.b32 %r7, %r3, 4;
        @!%p4 bra END; st.shared.u32 [%r3], %r2; bar.warp.sync %r6; ld.shared.u32 %r0, [%r7]; END:""",
        [*[t ^ 1 for t in range(32)], *[0] * 32],
        [("%r3, 4;", "%r3, 64;", "race: reads shared", ALL)],
    ),
    "a bulk store by one lane of its warp's stores": (
        f"""add.u32 %r5, %r2, 500; @!%p4 bra END; st.shared.u32 [%r3], %r5; {FENCE} bar.warp.sync -1;
        @%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r1], 128; @%p1 {COMMIT}
        @%p1 cp.async.bulk.wait_group.read 0; bar.warp.sync %r6; st.shared.u32 [%r3], %r2;
        END:""".replace("@!%p4", "mov.u32 %r6, -1; @!%p4"),
        [*[0] * 64, *range(500, 532), 32],
        [
            (FENCE, f"@%p1 {FENCE}", "proxy_fence: .* written by generic stores of warp 0 lane 1 ", ALL),
            ("bar.warp.sync -1;", "", "race: a bulk copy .* written by warp 0 lane 1 ", ALL),
            ("bar.warp.sync %r6;", "", "race: overwrites .* may still read", ALL),
        ],
    ),
    "a fence by the lane that its warp has synchronised with": (
        f"""add.u32 %r5, %r2, 500; @!%p4 bra END; st.shared.u32 [%r3], %r5; bar.warp.sync -1; @%p1 {FENCE}
        @%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r1], 128; @%p1 {COMMIT}
        @%p1 cp.async.bulk.wait_group 0;
        END:""",
        [*[0] * 64, *range(500, 532), 32],
        [(f"@%p1 {FENCE}", f"@%p3 {FENCE}", "proxy_fence", ALL), (f"@%p1 {FENCE}", "", "proxy_fence", ALL)],
    ),
    "operands of a barrier (9.7.13.1)": (
        """and.b32 %r5, %r2, 0; mad.lo.u32 %r6, %r5, 1, 1; mad.lo.u32 %r7, %r5, 32, 64;
        bar.sync %r6, %r7; @%p4 bar.arrive %r6, %r7; @!%p4 bar.sync %r6, %r7;""",
        [0] * 64,
        [
            ("%r5, 1, 1;", "%r5, 1, 1; @%p1 mov.u32 %r6, 2;", "the number of a barrier .* differs between", ALL),
            ("32, 64;", "32, 64; @%p1 mov.u32 %r7, 32;", "the thread count of a barrier .* differs between", ALL),
            ("bar.arrive", "and.b32 %r6, %r2, 1; @%p4 bar.arrive", "the number of a barrier .* differs between", ALL),
        ],
    ),
    "votes of one barrier used again": (
        """setp.ge.u32 %p5, %r2, 0; setp.lt.u32 %p6, %r2, 0;
        bar.red.popc.u32 %r0, 1, 64, %p5; bar.red.popc.u32 %r5, 1, 64, %p6; add.u32 %r0, %r0, %r5;""",
        [64] * 64,
        [],
    ),
    "polling and locks with atomics": (
        """@!%p4 bra END;
        LOCK: atom.global.cas.b32 %r5, [%rd2], 0, 1; setp.ne.u32 %p5, %r5, 0; @%p5 bra LOCK;
        ld.volatile.global.u32 %r0, [%rd2 + 4]; add.u32 %r6, %r0, 1; st.volatile.global.u32 [%rd2 + 4], %r6;
        atom.global.exch.b32 %r5, [%rd2], 0;
        END: mov.u32 %r0, 0;""",
        [*[0] * 64, 0, 33],
        [],
    ),
    "bra.uni (9.7.12.3)": (
        "@%p4 bra.uni END; mov.u32 %r0, 1; END:",
        [0] * 32 + [1] * 32,
        [("@%p4 bra.uni", "@%p2 bra.uni", "bra.uni that only some lanes take", ALL)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("mode, seed", [("eager", 0), ("late", 0), *[("random", seed) for seed in range(4)]])
@pytest.mark.parametrize("name", PROGRAMS)
def test_right_programs_pass(name, mode, seed):
    body, expected, _ = PROGRAMS[name]
    assert run(body, mode, seed=seed)[: len(expected)].tolist() == list(expected)


@pytest.mark.parametrize("name", PROGRAMS)
def test_wrong_ones_are_reported(name):
    body, _, faults = PROGRAMS[name]
    for old, new, report, modes in faults:
        assert old in body
        for mode in modes:
            with pytest.raises(SimulationError, match=f"(?s){report}"):
                for seed in range(8 if mode == "random" else 1):
                    run(body.replace(old, new), mode, seed=seed)


# ---- collectives -----------------------------------------------------------------------------------

MASKS = """
shr.u32 %r5, %r2, 3; shl.b32 %r5, %r5, 3; mov.u32 %r6, 255; shl.b32 %r6, %r6, %r5;  // eight lanes a group
"""


@pytest.mark.parametrize("line, expected", [
    ("setp.gt.u32 %p5, %r2, 9; vote.sync.ballot.b32 %r0, %p5, %r6;", lambda t: (0xFFFFFC00 & 0xFF << t // 8 * 8)),
    ("mov.u32 %r7, 1; redux.sync.add.u32 %r0, %r7, %r6;", lambda t: 8),
    ("and.b32 %r7, %r2, 1; match.any.sync.b32 %r0, %r7, %r6;", lambda t: (0x55 << t % 2) << t // 8 * 8),
    ("elect.sync _|%p5, %r6; selp.u32 %r0, 1, 0, %p5;", lambda t: int(t % 8 == 0)),
    ("shfl.sync.idx.b32 %r0, %r2, 3, 0x1807, %r6;", lambda t: t // 8 * 8 + 3),
])  # fmt: skip
def test_lanes_of_different_member_masks_are_separate_groups(line, expected):
    """9.7.9.6, 9.7.13.9, 9.7.13.10, 9.7.13.12, 9.7.13.14: each mask names its own threads."""
    assert run(MASKS + line, "late", threads=32).tolist()[:32] == [expected(t) & 0xFFFFFFFF for t in range(32)]
    outside = MASKS + "and.b32 %r6, %r6, 0x7FFFFFFF;" + line
    with pytest.raises(SimulationError, match="lane 31 executes .* not a member of"):
        run(outside, "late", threads=32)


# ---- tensor memory ---------------------------------------------------------------------------------

TENSOR = """
@!%p4 bra END;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 64;
bar.warp.sync -1;
ld.shared.u32 %r5, [%r1];
tcgen05.st.sync.aligned.32x32b.x1.b32 [%r5], {%r2};
tcgen05.wait::st.sync.aligned;
tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r6}, [%r5];
USE
tcgen05.wait::ld.sync.aligned;
mov.u32 %r0, %r6;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 64;
END:
"""


@pytest.mark.parametrize("mode", ALL)
def test_a_use_waits_for_its_tensor_load_and_an_overwriting_does_not(mode):
    """9.7.16.6.4.5: a true dependency holds without wait::ld; nothing else does."""

    def with_use(use: str) -> list[int]:
        return run(TENSOR.replace("USE", use), mode).tolist()[:32]

    assert with_use("") == list(range(32))
    assert with_use("mov.u32 %r7, %r6; add.u32 %r0, %r7, 1; add.u32 %r6, %r6, 1;") == list(range(1, 33))
    with pytest.raises(SimulationError, match="overwrites registers of a tcgen05.ld"):
        with_use("mov.u32 %r6, 1;")
    with pytest.raises(SimulationError, match="into the registers of an earlier one"):
        with_use("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r6}, [%r5];")


def test_tensor_memory_allocations_may_not_grow():
    """9.7.16.7.1."""
    alloc = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 64;"
    again = alloc + "tcgen05.dealloc.cta_group::1.sync.aligned.b32 0, 64;" + alloc.replace("64", "128")
    with pytest.raises(SimulationError, match="128 columns after one of 64"):
        run(TENSOR.replace(alloc, again), "late")


def test_instructions_of_another_architecture_are_refused():
    with pytest.raises(PtxError, match="tcgen05.* on a device of capability 9"):
        run(TENSOR.replace("USE", ""), "late", device="h200")
    with pytest.raises(PtxError, match="wgmma.* on a device of capability 10"):
        run("wgmma.fence.sync.aligned;", "late")


def test_one_thread_commits():
    commit = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r4];"
    run(f"@%p1 {commit} WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p8, [%r4], 0; @!%p8 bra WAIT;", "late")
    with pytest.raises(SimulationError, match="tcgen05.commit executed by more than one thread"):
        run(commit, "late")


@pytest.mark.parametrize("line", [
    "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r1], [%r1], 16, [%r4];",
    "cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%rd2], [%r1], 16, 1;",
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r2}], [%r4];",
    "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%rd1, {%r2, %r2}], [%r1];",
    "tcgen05.mma.cta_group::1.kind::f16.ashift [%r1], [%r1], %rd1, %r1, %p1;",
    "tcgen05.ld.sync.aligned.32x32b.x1.pack::16b.b32 {%r5}, [%r1];",
    "fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster;",
    "fence.nonsense;", "bar.sync.nonsense 0;", "shfl.sync.nonsense.b32 %r5, %r5, 0, 31, -1;",
])  # fmt: skip
def test_forms_that_are_not_modelled_are_refused(line):
    with pytest.raises(PtxError, match=r"test, line \d+: .*(is not modelled|with 2 coordinates)"):
        run(line, "late")


HANDED_OVER = """
@%p4 bra FIRST;
W1: mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 %p8, [%r4], 0; @!%p8 bra W1;
tcgen05.fence::after_thread_sync;
ld.shared.u32 %r5, [%r1];
tcgen05.dealloc.cta_group::1.sync.aligned.b32 0, 64;
bra END;
FIRST:
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 64;
tcgen05.st.sync.aligned.32x32b.x1.b32 [0], {%r2};
tcgen05.wait::st.sync.aligned;
tcgen05.fence::before_thread_sync;
bar.warp.sync -1;
@%p1 mbarrier.arrive.relaxed.cluster.shared::cta.b64 _, [%r4];
END:
"""


def test_relaxed_arrivals_hand_tensor_memory_over_and_nothing_else():
    """9.7.16.6.3: the tcgen05 fences compose with any ordering of execution."""
    with pytest.raises(SimulationError, match="race: reads shared bytes 0x0"):
        run(HANDED_OVER, "late")
    only_tensor = HANDED_OVER.replace("ld.shared.u32 %r5, [%r1];", "")
    for mode in ALL:
        run(only_tensor, mode)
        for fence in ("tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;", "bar.warp.sync -1;"):
            with pytest.raises(SimulationError, match="race: overwrites tensor memory"):
                run(only_tensor.replace(fence, ""), mode)


# ---- streams and overlapping grids -----------------------------------------------------------------

GRIDS = (
    HEAD
    + """
.visible .entry count(.param .u64 total) {
.reg .b32 %r<4>; .reg .b64 %rd<2>; .reg .pred %p1;
ld.param.u64 %rd1, [total]; mov.u32 %r1, 0;
LOOP: ld.volatile.global.u32 %r2, [%rd1]; add.u32 %r2, %r2, 1;
bra STORE;
STORE: st.volatile.global.u32 [%rd1], %r2;
add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 8;
@%p1 bra LOOP;
ret; }

.visible .entry first(.param .u64 flag, .param .u64 value) {
.reg .b32 %r<4>; .reg .b64 %rd<3>; .reg .pred %p1;
ld.param.u64 %rd1, [flag]; ld.param.u64 %rd2, [value];
SIGNAL
LOOP: ld.volatile.global.u32 %r1, [%rd1]; setp.eq.u32 %p1, %r1, 0;
@%p1 bra LOOP;
mov.u32 %r2, 7; st.global.u32 [%rd2], %r2;
ret; }

.visible .entry second(.param .u64 flag, .param .u64 value, .param .u64 out) {
.reg .b32 %r<4>; .reg .b64 %rd<4>;
ld.param.u64 %rd1, [flag]; ld.param.u64 %rd2, [value]; ld.param.u64 %rd3, [out];
mov.u32 %r1, 1; st.volatile.global.u32 [%rd1], %r1;
WAIT
ld.global.u32 %r2, [%rd2]; st.global.u32 [%rd3], %r2;
ret; }
"""
)


def test_grids_of_two_streams_interleave():
    """Eight increments each that are no atomics: all count when a grid runs after the other, some are lost beside it."""

    def total(mode: str, seed: int, streams: tuple[int, int]) -> int:
        simulator = Simulator("h200", mode=mode, seed=seed)
        counter = simulator.array(np.zeros(1, np.uint32))
        for stream in streams:
            simulator.launch(GRIDS, "count", 1, 1, counter, stream=stream)
        simulator.synchronize()
        return int(counter[0])

    assert total("eager", 0, (1, 2)) == 16
    assert {total("random", seed, (1, 1)) for seed in range(10)} == {16}
    assert len({total("random", seed, (1, 2)) for seed in range(40)}) >= 3


def test_a_dependent_grid_overlaps_until_it_waits():
    """`first` ends only after `second` has begun; what `first` stores is `second`'s only after its wait."""

    signals, waits = "griddepcontrol.launch_dependents;", "griddepcontrol.wait;"

    def run(mode: str, seed: int = 0, signal: str = signals, wait: str = waits, ctas: int = 3) -> int:
        simulator = Simulator("h200", num_sms=1, mode=mode, seed=seed)
        flag, value = simulator.array(np.zeros(1, np.uint32)), simulator.array(shape=(1,), dtype=np.uint32)
        out = simulator.array(shape=(1,), dtype=np.uint32)
        text = GRIDS.replace("SIGNAL", signal).replace("WAIT", wait)
        simulator.launch(text, "first", ctas, 1, flag, value, stream=1)
        simulator.launch(text, "second", 1, 1, flag, value, out, stream=1, may_overlap=True)
        simulator.synchronize()
        return int(out[0])

    for mode, seed in [("late", 0), *[("random", seed) for seed in range(8)]]:
        assert run(mode, seed) == 7
    with pytest.raises(SimulationError, match="deadlock"):  # nobody lets `second` start
        run("late", signal="", ctas=1)
    with pytest.raises(SimulationError, match="deadlock"):  # nothing overlaps
        run("eager", ctas=1)
    with pytest.raises(SimulationError, match="uninitialised"):
        run("late", wait="")


def test_a_chain_of_dependent_grids_fits():
    """Each waits only for the one before; the later ones leave room for the CTAs of the first."""
    for mode in ALL:
        simulator = Simulator("h200", num_sms=1, mode=mode)
        counter = simulator.array(np.zeros(1, np.uint32))
        text = GRIDS.replace("ld.volatile.global.u32 %r2, [%rd1]; add.u32 %r2, %r2, 1;", "mov.u32 %r2, 0;").replace(
            "st.volatile.global.u32 [%rd1], %r2;", "red.global.add.u32 [%rd1], 1;"
        )
        text = text.replace(
            "mov.u32 %r1, 0;", "mov.u32 %r1, 0; griddepcontrol.launch_dependents; griddepcontrol.wait;", 1
        )
        for _ in range(4):
            simulator.launch(text, "count", 100, 1, counter, stream=1, may_overlap=True)
        simulator.synchronize()
        assert counter[0] == 3200


def test_launches_after_one_that_failed():
    """Its grids, events and parameters are forgotten."""
    text = GRIDS.replace("SIGNAL", "trap;")
    simulator = Simulator("h200", num_sms=1)
    counter = simulator.array(np.zeros(1, np.uint32))
    simulator.launch(text, "count", 1, 1, counter)
    regions = len(simulator.machine.memory.regions)
    for kernel in ("first", "count"):
        simulator.launch(text, kernel, 1, 1, *[counter] * (2 if kernel == "first" else 1), stream=1)
    simulator.streams.record(1, 5)
    with pytest.raises(SimulationError, match="trap"):
        simulator.synchronize()
    assert len(simulator.machine.memory.regions) == regions and simulator.launches[-1][0] == "first"
    simulator.streams.wait(2, 5)
    simulator.launch(text, "count", 1, 1, counter, stream=2)
    simulator.synchronize()
    assert counter[0] == 16


@pytest.mark.parametrize("grid, block", [(0, 1), ((1, 70000), 1), (1, 0), (1, (1, 1, 65)), (1, 1025)])
def test_launches_the_driver_refuses(grid, block):
    simulator = Simulator("h200", num_sms=1)
    with pytest.raises(SimulationError, match="grid of|block of"):
        simulator.launch(GRIDS, "count", grid, block, simulator.array(np.zeros(1, np.uint32)))


# ---- warpgroups ------------------------------------------------------------------------------------

WGMMA = (
    HEAD.replace("100a", "90a")
    + """
.visible .entry products(.param .u64 out, .param .u32 which) {
.reg .pred %p<3>; .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .f32 %f<9>;
.shared .align 1024 .b8 tile[4096];
ld.param.u64 %rd1, [out]; ld.param.u32 %r7, [which];
mov.u32 %r1, tile; mov.u32 %r2, %tid.x; mad.lo.u32 %r3, %r2, 4, %r1; mov.b32 %r4, 0x3F803F80;
mov.u32 %r5, 0;
FILL: st.shared.b32 [%r3], %r4; add.u32 %r3, %r3, 512; add.u32 %r5, %r5, 1; setp.lt.u32 %p1, %r5, 8;
@%p1 bra FILL;
fence.proxy.async.shared::cta;
bar.sync 0;
shr.u32 %r6, %r1, 4; cvt.u64.u32 %rd2, %r6; or.b64 %rd2, %rd2, 0x0000001000080000;
shr.u32 %r8, %r2, 5; setp.eq.u32 %p2, %r8, %r7;
wgmma.fence.sync.aligned;
@%p2 bra OTHER;
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1, %f2, %f3, %f4}, %rd2, %rd2, 0, 1, 1, 0, 0;
bra BOTH;
OTHER: BODY
BOTH: wgmma.commit_group.sync.aligned;
FIRST_WAIT
add.f32 %f5, %f1, %f2;
FENCE
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1, %f2, %f3, %f4}, %rd2, %rd2, 0, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
add.f32 %f5, %f5, %f4;
mad.wide.u32 %rd3, %r2, 4, %rd1; st.global.f32 [%rd3], %f5;
ret; }"""
)


@pytest.mark.parametrize("mode", ["eager", "late", "random"])
def test_what_wgmma_asks_of_registers_and_warps(mode):
    parts = {
        "BODY": "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1, %f2, %f3, %f4}, %rd2, %rd2, 0, 1, 1, 0, 0;",
        "FIRST_WAIT": "wgmma.wait_group.sync.aligned 0;",
        "FENCE": "wgmma.fence.sync.aligned;",
    }

    def run(which: int = 9, **changed: str) -> np.ndarray:
        text = WGMMA
        for name, line in {**parts, **changed}.items():
            text = text.replace(name, line)
        simulator = Simulator("h200", num_sms=1, mode=mode)
        out = simulator.array(shape=(128,), dtype=np.float32)
        simulator.launch(text, "products", 1, 128, out, which)
        return out

    assert (run() == 48).all()
    with pytest.raises(SimulationError, match="accesses registers of the wgmma of line 19 without wgmma.wait_group"):
        run(FIRST_WAIT="")
    with pytest.raises(SimulationError, match="registers accessed after the last wgmma.fence"):
        run(FENCE="")
    with pytest.raises(SimulationError, match="of a warpgroup execute different wgmma"):
        run(which=2)
    with pytest.raises(SimulationError, match="illegal: warps"):
        run(which=1, BODY="")
