"""The machine-code reader and the report of benchmarks/static_report.py."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import sass
import static_report
from static_report import Kernel, Role

from msa_ext import _runtime

ROOT = Path(__file__).parents[1]

# As nvdisasm prints it, but for the width of the columns.
LISTING = """
\t.target\tsm_100a

//--------------------- .text.kernel --------------------------
\t.section\t.text.kernel,"ax",@progbits
\t.align\t128
                                                                   // |      GPR        |  PRED   |
                                                                   // |     00000000001  |         |
\t.global         kernel
        /*0000*/                   IMAD.SHL.U32 R3, R3, 0x4 ;      /* 0x0000000403037824 */    // |      |    |
                                                                   /* 0x000fc800078e00ff */    // |   2 :  x        | 1 :  |
.L_x_1:
        /*0010*/              @!P0 LDTM.x32 R4, tmem[UR4] ;        /* 0x0000000004047dee */    // |      |    |
                                                                   /* 0x000e6200082c0000 */    // | 100 :   ^^^^^^^ | 1 v  |
        /*0020*/                   BRX R4 -0x30      (*"BRANCH_TARGETS .L_x_1,.L_x_2"*); /* 0xffffffbc04a07949 */ // | | |
                                                                   /* 0x000fea000383ffff */    // |   2 :   v       |      |
.L_x_2:
        /*0030*/                   CALL.REL.NOINC `($__internal_1_$__cuda_guardrail_trap_x) ; /* 0x00000078001c7944 */ // | | |
                                                                   /* 0x000fea0003c00000 */    // |   9 ::::::::::  |      |
        /*0040*/                   EXIT ;                          /* 0x000000000000794d */    // |      |    |
                                                                   /* 0x000fea0003800000 */    // |               |      |
"""


def function(*lines: str, stall: int = 1) -> tuple[list[sass.Instruction], dict[str, int]]:
    """Instructions and labels of lines `[label:] [@predicate] OPCODE [operands] [; registers in use]`."""
    text = ["\t.target\tsm_100a", '\t.section\t.text.kernel,"ax",@progbits']
    for line in lines:
        if ":" in line:
            label, line = line.split(":")
            text.append(f".L_x_{label}:")
        body, _, registers = line.partition(";")
        text.append(f"  /*0000*/  {body.strip()} ; /* 0x0000000000000000 */")
        text.append(f"  /* {stall << 41:#018x} */ // |     {':' * int(registers or 1)} |")
    return sass.parse("\n".join(text))[1]["kernel"]


def opcodes(path: list[sass.Instruction] | None) -> list[str]:
    assert path is not None
    return [x.opcode for x in path]


@pytest.mark.parametrize(
    "high, cycles",
    [
        (0x000FEA0003800000, 5),  # a branch
        (0x000FC800078E00FF, 4),  # IMAD whose result the next instruction reads
        (0x001FCA00078E0206, 5),  # IMAD.WIDE before a load of its address, waiting for two scoreboards
        (0x000E220000002500, 1),  # S2UR that sets a scoreboard
        (0x000FC00000000000, 1),  # padding: 0, an issue cycle
    ],
)
def test_stall_count(high, cycles):
    assert sass.stall_cycles(high) == cycles


@pytest.mark.parametrize(
    "high, sets, waits",
    [
        (0x000E6200082C0000, 1, set()),  # a load that sets scoreboard 1
        (0x000FEA0003800000, None, set()),
        (0x001FCA00078E0206, None, {0}),  # an address that waits for scoreboard 0
    ],
)
def test_scoreboards(high, sets, waits):
    assert sass.scoreboards(high) == (sets, waits)


def test_round_trips():
    load, use, other = (
        sass.Instruction("", opcode, "", 1, 0, sets, frozenset(waits))
        for opcode, sets, waits in (("LDTM.x32", 0, ()), ("FADD", None, (0,)), ("FADD", None, (1,)))
    )
    assert sass.round_trips(4 * [load, use], "LDTM") == 4
    assert sass.round_trips([*4 * [load], other, use, use], "LDTM") == 1
    assert sass.round_trips([load, other], "LDTM") == 0


def test_listing():
    target, functions = sass.parse(LISTING)
    code, labels = functions["kernel"]
    assert target == "sm_100a"
    assert labels == {".L_x_1": 1, ".L_x_2": 3}
    assert [x.opcode for x in code] == ["IMAD.SHL.U32", "LDTM.x32", "BRX", "CALL.REL.NOINC", "EXIT"]
    assert [x.predicate for x in code] == ["", "@!P0", "", "", ""]
    assert [x.stall for x in code] == [4, 1, 5, 5, 5]
    assert [x.registers for x in code] == [4, 11, 5, 0, 0]  # not what a trap's callee may clobber
    assert code[0].operands == "R3, R3, 0x4"
    assert code[1].count("LDTM") == 32 and code[1].count("STTM") == 0
    assert sass.Graph(code, labels).next == [[1], [1, 2], []]


def test_listing_of_something_else():
    with pytest.raises(ValueError, match="no .target line"):
        sass.parse("Fatbin elf code:")


@pytest.mark.parametrize(
    "line, falls_through",
    [
        ("BRA `(.L_x_0)", False),
        ("@P0 BRA `(.L_x_0)", True),
        ("BRA.U !UP0, `(.L_x_0)", True),
        ("BRA.DIV UR4, `(.L_x_0)", True),
        ("BRX R4 -0x30", False),
        ("EXIT", False),
        ("@!P1 EXIT", True),
        ("FADD R0, R1, R2", True),
    ],
)
def test_falls_through(line, falls_through):
    (instruction,), _ = function(line)
    assert instruction.falls_through == falls_through


@pytest.mark.parametrize(
    "opcode, pipe",
    [
        ("FFMA2", "FMA"), ("IMAD.MOV.U32", "FMA"), ("HFMA2.BF16", "FMA"), ("MUFU.EX2", "MUFU"), ("F2FP.BF16.F32.PACK_AB", "ALU"),
        ("FSEL", "ALU"), ("LDTM.x32", "TMEM"), ("UTCHMMA", "MMA"), ("UTCBAR", "MMA"), ("HGMMA.64x64x16.F32.BF16", "MMA"),
        ("UTMALDG.5D", "TMA"), ("UBLKRED.G.S.ADD.F32.RN", "TMA"), ("LDS.128", "LSU"), ("REDG.E.ADD.BF16x8.RN.STRONG.GPU", "LSU"),
        ("LDC.64", "LSU"), ("LDCU.64", "uniform"), ("UIADD3", "uniform"), ("R2UR", "uniform"), ("SYNCS.ARRIVE.TRANS64.A1T0", "sync"),
        ("WARPGROUP.DEPBAR.LE", "sync"), ("BRA.U", "branch"), ("BSSY.RECONVERGENT", "branch"), ("NOP", "NOP"),
    ],
)  # fmt: skip
def test_pipes(opcode, pipe):
    (instruction,), _ = function(opcode)
    assert instruction.pipe == pipe


# A tile's loop (1) with a wait that may miss (8), a rare mask, an inner loop (3) and, rarely, a flush.
LOOP = function(
    "S2R R0",
    "1: SYNCS.PHASECHK P0",
    "@!P0 BRA `(.L_x_8)",
    "9: MUFU.EX2 R0",
    "@P1 BRA `(.L_x_2)",
    "FSEL R0",
    "2: LDS R1",
    "3: RED R2",
    "@P2 BRA `(.L_x_3)",
    "@P3 BRA `(.L_x_4)",
    "REDG.F32x4 R2",
    "4: @P4 BRA `(.L_x_1)",
    "EXIT",
    "8: SYNCS.PHASECHK P0",
    "@!P0 BRA `(.L_x_8)",
    "BRA `(.L_x_9)",
    "NOP",
)


def test_loops_smallest_first():
    graph = sass.Graph(*LOOP)
    headers = [graph.blocks[header][0].opcode for header, _ in graph.loops()]
    assert headers == ["RED", "SYNCS.PHASECHK", "SYNCS.PHASECHK"]
    assert len(graph.blocks) - 1 == len(graph.dominators), "the padding is unreachable"


def test_iteration_is_the_shortest_with_the_work():
    graph = sass.Graph(*LOOP)
    loop = graph.loops()[-1]
    steady = ["SYNCS.PHASECHK", "BRA", "MUFU.EX2", "BRA", "LDS", *["RED", "BRA"], "BRA", "BRA"]
    assert opcodes(graph.iteration(*loop, {r"RED\b": 1})) == steady
    assert opcodes(graph.iteration(*loop, {r"RED\b": 3})) == steady[:5] + 3 * ["RED", "BRA"] + steady[7:]
    flush = graph.iteration(*loop, {r"RED\b": 1, "REDG": 1})
    assert opcodes(flush) == [*steady[:8], "REDG.F32x4", "BRA"]
    assert "FSEL" in opcodes(graph.iteration(*loop, {r"RED\b": 1, "FSEL": 1}))
    assert graph.iteration(*loop, {r"RED\b": 0}) is None
    assert graph.iteration(*loop, {"REDG": 2}) is None


# Two roles of a warpgroup, told apart by the warp, and one of another; all meet at the end.
ROLES = (
    "S2R R0 ; 40",
    "@P0 BRA `(.L_x_5)",
    "USETMAXREG.DEALLOC.CTAPOOL 0x18",
    "FADD R0 ; 20",
    "@P1 BRA `(.L_x_2)",
    "1: UTMALDG.5D ; 10",
    "FADD R0",
    "@P2 BRA `(.L_x_1)",
    "BRA `(.L_x_7)",
    "2: UTCHMMA ; 16",
    "@P2 BRA `(.L_x_2)",
    "BRA `(.L_x_7)",
    "5: USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0x98",
    "BRA.U !UP0, `(.L_x_5)",
    "6: LDTM.x32 ; 100",
    "SYNCS.ARRIVE.TRANS64.A1T0",
    "@P2 BRA `(.L_x_6)",
    "7: BAR.SYNC ; 12",
    "EXIT",
)


def table(**roles: Role) -> Kernel:
    return Kernel(roles, macs_per_cycle=1, shared_bytes={}, l2_bytes=1, l2_bytes_per_cycle=None)


THREE = {
    "load": Role(range(0, 1), {"UTMALDG": 1}),
    "mma": Role(range(1, 2), {"UTCHMMA": 1}),
    "compute": Role(range(4, 8), {"LDTM": 32}, iterations=2),
}


def test_roles():
    graph = sass.Graph(*function(*ROLES, stall=3))
    found = static_report.find_roles(graph, table(**THREE), launch=64)
    assert {name: (x["registers"], x["budget"], x["used_in_budget"]) for name, x in found.items()} == {
        "load": (12, 24, 20),
        "mma": (16, 24, 20),
        "compute": (100, 152, 100),
    }
    assert {name: (x["slots"], x["stall"]) for name, x in found.items()} == {
        "load": (3, 9),
        "mma": (2, 6),
        "compute": (6, 18),
    }
    assert found["compute"]["pipes"]["TMEM"] == 2 and found["compute"]["warps"] == [4, 5, 6, 7]
    assert found["compute"]["hand_offs"] == [1 / 3] and found["mma"]["hand_offs"] == []


def test_budget_without_setmaxnreg_is_the_launch():
    graph = sass.Graph(*function("S2R R0", "1: LDTM.x32 ; 50", "@P0 BRA `(.L_x_1)", "EXIT"))
    found = static_report.find_roles(graph, table(compute=THREE["compute"]), launch=64)
    assert (found["compute"]["budget"], found["compute"]["used_in_budget"]) == (64, 64)


def test_a_role_that_is_not_there():
    graph = sass.Graph(*function(*ROLES))
    with pytest.raises(ValueError, match="mma: no loop has an iteration that issues exactly {'UTCHMMA': 40}"):
        static_report.find_roles(graph, table(mma=Role(range(1), {"UTCHMMA": 40})), launch=64)
    with pytest.raises(ValueError, match="load: no iteration issues exactly .*'FADD': 2"):
        static_report.find_roles(graph, table(load=Role(range(1), {"UTMALDG": 1}, {"FADD": 2})), launch=64)
    with pytest.raises(ValueError, match="load: its loop is another role's too"):
        static_report.find_roles(graph, table(load=THREE["load"], mma=THREE["load"]), launch=64)


def test_segment():
    graph = sass.Graph(*LOOP)
    role = Role(range(4), {"MUFU": 1, r"RED\b": 1}, {"REDG": 1})
    found = static_report.find_roles(graph, table(reduce=role), launch=64)["reduce"]
    assert (found["slots"], found["segment_slots"], found["segment_stall"]) == (9, 1, 1)


@pytest.mark.parametrize(
    "kernel, tensor, shared",
    [
        (static_report.sm100(8, 2), 2560, 2816),
        (static_report.sm90(8, 2), 5120, 5376),
        (static_report.sm90(8, 4), 5120, 5888),
    ],
)
def test_floors_of_the_design(kernel, tensor, shared):
    """Of design.md sections 7 and 8, without the row statistics; compute: 64 EX2 a warp and tile."""
    roles = {
        name: {"warps": list(x.warps), "slots": 100, "exp2": 64, "shared_loads": 1} for name, x in kernel.roles.items()
    }
    cycles = static_report.resources(kernel, roles)
    assert sum(cycles["tensor core"].values()) == tensor
    assert sum(cycles["shared memory"].values()) == shared + 8
    assert sum(cycles["exp2"].values()) == 1024
    on_busiest = max(sum(w % 4 == i for x in kernel.roles.values() for w in x.warps) for i in range(4))
    assert sum(cycles["issue"].values()) == 100 * on_busiest


def test_bars():
    kernel = static_report.sm100(8, 2)
    hand_offs = [0.4, 0.6, 0.8, 1.0]
    roles = {name: {"slots": 10, "stall": 900, "hand_offs": hand_offs, "tmem_round_trips": 3} for name in kernel.roles}
    values = static_report.against_bars(kernel, roles, {"issue": {"warps": 1250}})
    assert list(values.values()) == [1250, 900, 10, 10, 40, 512 + 900 + 256 + 512, 3]


def test_load_bar_grows_with_the_copies():
    assert [static_report.sm100(slots, 2).bars["load slots"] for slots in (8, 16)] == [150, 214]


# -------------------------------------------------------------------------------------------------
# the kernels of this build


@pytest.fixture(scope="module")
def library() -> Path:
    try:
        path = Path(_runtime.extension().__file__)
    except RuntimeError as error:
        pytest.skip(f"pure-Python install: {error}")
    for name in ("cuobjdump", "nvdisasm"):
        try:
            static_report.tool(name)
        except FileNotFoundError as error:
            pytest.skip(str(error))
    return path


def run(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "benchmarks" / "static_report.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_main_kernels(library, arch, tmp_path):
    result = run(library, "--arch", arch, "--json", tmp_path / "report.json")
    if "no kernel matches" in result.stderr:
        pytest.skip(f"no main kernel for {arch} in this build")
    assert result.returncode == 0, result.stdout + result.stderr
    reports = json.loads((tmp_path / "report.json").read_text())
    assert {"backward_kernel<16, bf16>", "backward_kernel<8, bf16>"} <= {x["kernel"] for x in reports}
    for report in reports:
        assert report["target"] == arch and report["kernel"] in result.stdout
        assert report["faults"] == [] and report["local_bytes"] == 0
        assert report["binds"] in ("tensor core", "shared memory")
        for role in report["roles"].values():
            assert role["registers"] <= role["used_in_budget"] <= role["budget"]
            assert sum(role["pipes"].values()) == role["slots"] <= role["stall"]
        missed = {what: x for what, x in report["bars"].items() if x["value"] > x["bar"]}
        assert not missed, report["kernel"]
        compute = report["roles"]["compute"]
        assert compute["hand_offs"] and 0 < compute["exp2"] <= 64


def test_faults(library, tmp_path):
    """Local memory, and registers over a budget, of a kernel that has neither."""
    cuobjdump, nvdisasm = static_report.tool("cuobjdump"), static_report.tool("nvdisasm")
    subprocess.run([cuobjdump, "-xelf", "all", library], check=True, cwd=tmp_path, capture_output=True)
    for cubin in tmp_path.glob("launch*.cubin"):
        listing = subprocess.run(
            [nvdisasm, "-c", "-hex", "-plr", "-lrm", "narrow", cubin], check=True, capture_output=True, text=True
        )
        target, functions = sass.parse(listing.stdout)
        name = next(x for x in functions if "ILi16E" in x)
        code, labels = functions[name]
        usage = {"REG": 168, "STACK": 0, "LOCAL": 0, "SHARED": 1024}
        assert static_report.analyse(target, name, code, labels, usage)["faults"] == []
        worse = {**usage, "STACK": 8}
        assert static_report.analyse(target, name, code, labels, worse)["faults"] == ["STACK is 8 bytes"]
        at = next(i for i, x in enumerate(code) if x.opcode.startswith("USETMAXREG.DEALLOC"))
        smaller = dataclasses.replace(code[at], operands="0x8")
        spilling = dataclasses.replace(code[-1], opcode="STL")
        changed = [*code[:at], smaller, *code[at + 1 : -1], spilling]
        spills, *over = static_report.analyse(target, name, changed, labels, usage)["faults"]
        assert spills == "1 accesses of local memory"
        assert over and all("registers in use under setmaxnreg 8" in x for x in over)


def test_no_such_kernel(library):
    result = run(library, "--kernel", "forward")
    assert result.returncode == 1 and "no kernel matches 'forward'" in result.stderr
