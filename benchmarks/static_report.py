"""What a tile costs the main kernels, read from their machine code: registers, issue slots, stalls, the modelled bound.

    python benchmarks/static_report.py CUBIN_OR_SO [--arch sm_100a] [--kernel REGEX] [--json FILE]

Nothing is run. A warp role is found by its loop: the smallest one with an iteration that issues exactly the work the
table below states for a tile, and of such iterations the one with the fewest instructions. So waits succeed at once,
and segment changes, diagonal masks and empty slots are left out. `slots` are issue slots of a warp, `stall` the cycles
its control codes make it wait with every scoreboard free. Exit status 1: local memory, or a role over its registers.
Needs cuobjdump and nvdisasm: from PyPI (nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm) or on PATH.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from sass import PIPE_NAMES, Graph, Instruction, parse, round_trips

# --------------------------------------------------------------------------------------------------
# The kernels. Work of a role: instructions an iteration issues, by regular expression of the opcode; `.xN` counts N.

TILE = 128  # rows, keys and head dimension
GEMM_MACS = TILE**3
OPERAND_BYTES = TILE * TILE * 2  # BF16
SHARED_BYTES_PER_CYCLE = 128
EXP2_PER_CYCLE = 16
FLUSH = r"REDG.*F32x4"  # dK, dV of a segment


@dataclass(frozen=True)
class Role:
    """`work` of one iteration and, on top of it, of an iteration that ends or begins a segment."""

    warps: range
    work: dict[str, int]
    segment: dict[str, int] = field(default_factory=dict)
    iterations: int = 1  # a tile


@dataclass(frozen=True)
class Kernel:
    """Roles and per-tile resources of a main kernel on one SM. `compute` is the role that makes P and dS."""

    roles: dict[str, Role]
    macs_per_cycle: int
    shared_bytes: dict[str, int]
    l2_bytes: int
    l2_bytes_per_cycle: float | None  # of one SM while all reduce; None: not measured
    bars: dict[str, float] = field(default_factory=dict)


def sm90(slots: int, dq_bytes: int) -> Kernel:
    """`slots`: queries of a tile; `dq_bytes`: of a dQ element. An iteration of compute is half a tile."""
    return Kernel(
        roles={
            # Each lane's copies are issued one by one; STS: what a step is about.
            "load": Role(range(0, 1), {r"UTMALDG\.5D": 2 * slots, "UBLKCP": 2 * slots, "STS": 8}, {r"UTMALDG\.4D": 2}),
            # S, dP, dQ: K = 128 by 16; dV, dK: K = 64. UBLKRED: the slots of the warp's 16 rows; DEPBAR: to stage.
            "compute": Role(
                range(4, 12),
                {"HGMMA": 3 * 8 + 2 * 4, "UBLKRED": slots // 2 // 4, "DEPBAR": 1},
                {FLUSH: 32},
                iterations=2,
            ),
        },
        macs_per_cycle=2048,
        shared_bytes={
            # m64: every instruction reads its B again, so two warpgroups or steps read 32 KiB twice.
            "S, dP, dQ operands": 3 * 4 * OPERAND_BYTES,
            "dV, dK operands": 2 * 2 * OPERAND_BYTES,
            "Q, dO by TMA": 2 * OPERAND_BYTES,
            "dS stored": OPERAND_BYTES,
            "dQ staged, read": 2 * TILE * TILE * dq_bytes,
        },
        l2_bytes=TILE * TILE * dq_bytes,
        # 3.1 TB/s (BF16), 3.3 TB/s (FP32) in 512-token windows on an H200: 132 SMs at about 1.71 GHz.
        l2_bytes_per_cycle=(3.1e12 if dq_bytes == 2 else 3.3e12) / (132 * 1.71e9),
    )


def sm100(slots: int, dq_bytes: int) -> Kernel:
    """`slots`: queries of a tile; `dq_bytes`: of a dQ element."""
    dq_adds = r"REDG.*(BF16|F16)x8" if dq_bytes == 2 else FLUSH
    return Kernel(
        roles={
            "load": Role(range(0, 1), {r"UTMALDG\.5D": 2 * slots}, {r"UTMALDG\.4D": 2}),
            # Five GEMMs by K = 16, a commit each; waits: two halves of P and of dS, dQ and dS read, next rows, P read.
            # The waits tell it from iterations that begin or end a segment, with as many MMAs.
            "mma": Role(range(1, 2), {r"UTC\w*MMA": 5 * 8, "UTCBAR": 5, r"SYNCS\.PHASECHK": 8}),
            "scalar": Role(range(2, 3), {r"STS\.128": 2}),
            "reduce": Role(
                range(4, 8),
                {"LDTM": TILE, dq_adds: TILE * dq_bytes // 16},
                {"LDTM": 2 * TILE, FLUSH: 2 * TILE * 4 // 16},
            ),
            # Two warpgroups: 64 rows of S and of dP in, packed pairs of P and of dS out.
            "compute": Role(range(8, 16), {"LDTM": TILE, "STTM": TILE // 2}),
        },
        macs_per_cycle=4096,
        shared_bytes={
            "S, dP, dQ operands": 3 * 2 * OPERAND_BYTES,
            "dV, dK operands": 2 * OPERAND_BYTES,
            "Q, dO by TMA": 2 * OPERAND_BYTES,
            "dS stored": OPERAND_BYTES,
        },
        l2_bytes=TILE * TILE * dq_bytes,
        l2_bytes_per_cycle=None,
        bars={
            "busiest sub-partition, slots": 1300,
            "compute stall, cycles": 1150,
            "mma slots": 300,
            # A slot's copies of Q and dO take 8: UTMALDG, its shared address and that one's move each, the token's
            # R2UR and move. The rest of a tile, header, tokens and wait, has one bar for both group sizes.
            "load slots": 86 + 8 * slots,
            "first hand-off, % of compute's stall": 50,
            "serial chain, cycles": 2400,
            # While mma waits to overwrite dQ. ptxas packs the first load before it issues the others.
            "round trips of reduce's loads of dQ": 2,
        },
    )


KERNELS = {"sm_90": sm90, "sm_100": sm100, "sm_103": sm100}
DQ_ACCUM = ("bf16", "fp16", "fp32")  # in the order of params.h

# --------------------------------------------------------------------------------------------------
# What is made of it


def _registers(code: list[Instruction]) -> int:
    return max(x.registers for x in code)


def budget_in_force(graph: Graph, header: int, launch: int) -> tuple[int, int]:
    """The register budget at a block and the most that is in use anywhere after it was set, in registers a thread."""
    for block in sorted(graph.dominators[header], key=lambda x: -len(graph.dominators[x])):
        code = graph.blocks[block]
        for i, x in enumerate(code):
            if x.opcode.startswith("USETMAXREG"):
                later = set().union(*(graph.reach(after) for after in graph.next[block]))
                used = [_registers(graph.blocks[y]) for y in later]
                return int(x.operands.split()[-1], 16), max(_registers(code[i:]), *used)
    return launch, launch


def find_roles(graph: Graph, kernel: Kernel, launch: int) -> dict[str, dict]:
    """Of every role: warps, registers, budgets, and slots, stall and pipes of a tile, all of one warp."""
    loops = graph.loops()
    found: dict[str, tuple[int, set[int], list[Instruction]]] = {}
    for name, role in kernel.roles.items():
        for header, body in loops:
            if path := graph.iteration(header, body, role.work):
                found[name] = header, body, path
                break
        else:
            raise ValueError(f"{name}: no loop has an iteration that issues exactly {role.work}")
    report = {}
    for name, (header, body, path) in found.items():
        role = kernel.roles[name]
        others = set().union(*(graph.dominators[found[x][0]] for x in found if x != name))
        own = graph.dominators[header] - others
        if not own:
            raise ValueError(f"{name}: its loop is another role's too")
        root = min(own, key=lambda x: len(graph.dominators[x]))
        budget, used_in_budget = budget_in_force(graph, header, launch)
        arrivals = [i for i, x in enumerate(path) if x.opcode.startswith("SYNCS.ARRIVE")]
        stall = sum(x.stall for x in path)
        pipes = Counter(x.pipe for x in path)
        report[name] = {
            "warps": list(role.warps),
            "registers": max(_registers(graph.blocks[x]) for x in graph.reach(root)),
            "budget": budget,
            "used_in_budget": used_in_budget,  # by any role of the warpgroup
            "slots": role.iterations * len(path),
            "stall": role.iterations * stall,
            "pipes": {pipe: role.iterations * pipes[pipe] for pipe in PIPE_NAMES},
            "tmem_round_trips": role.iterations * round_trips(path, "LDTM"),
            "exp2": role.iterations * sum(x.count(r"MUFU\.EX2") for x in path),
            "shared_loads": role.iterations * sum(x.count("LDS") for x in path),
            "hand_offs": [sum(x.stall for x in path[:i]) / stall for i in arrivals],  # of an iteration, as its share
        }
        if role.segment:
            work = {x: role.work.get(x, 0) + role.segment.get(x, 0) for x in {**role.work, **role.segment}}
            outer = (graph.iteration(*loop, work) for loop in loops if body <= loop[1])
            longer = next((x for x in outer if x), None)
            if longer is None:
                raise ValueError(f"{name}: no iteration issues exactly {work}, a tile and a segment's change")
            report[name]["segment_slots"] = len(longer) - len(path)
            report[name]["segment_stall"] = sum(x.stall for x in longer) - stall
    return report


def resources(kernel: Kernel, roles: dict[str, dict]) -> dict[str, dict[str, float]]:
    """Cycles a tile keeps each resource of an SM busy, by what asks for it."""
    compute = roles["compute"]
    warps = len(compute["warps"])
    partitions = [sum(x["slots"] for x in roles.values() for w in x["warps"] if w % 4 == i) for i in range(4)]
    shared = {what: amount / SHARED_BYTES_PER_CYCLE for what, amount in kernel.shared_bytes.items()}
    found = {
        "tensor core": {"five GEMMs": 5 * GEMM_MACS / kernel.macs_per_cycle},
        # Lanes read the same few words: a cycle each.
        "shared memory": {**shared, "row statistics": warps * compute["shared_loads"]},
        "exp2": {"MUFU": warps * 32 * compute["exp2"] / EXP2_PER_CYCLE},
        "issue": {f"warps w % 4 = {partitions.index(max(partitions))}:": max(partitions)},
    }
    if kernel.l2_bytes_per_cycle:
        found["L2 reductions"] = {"dQ": kernel.l2_bytes / kernel.l2_bytes_per_cycle}
    return found


def against_bars(kernel: Kernel, roles: dict[str, dict], cycles: dict[str, dict[str, float]]) -> dict[str, float]:
    """What the kernel's bars limit, in their order."""
    compute = roles["compute"]
    gemm = GEMM_MACS / kernel.macs_per_cycle
    stages = len(compute["hand_offs"]) / 2  # P and dS each
    values = (
        max(cycles["issue"].values()),
        compute["stall"],
        roles["mma"]["slots"],
        roles["load"]["slots"],
        100 * compute["hand_offs"][0],
        gemm + compute["stall"] + gemm / stages + gemm,  # S, compute, last stage of dV or dK, dQ
        roles["reduce"]["tmem_round_trips"],
    )
    return dict(zip(kernel.bars, values, strict=True))


def analyse(target: str, name: str, code: list[Instruction], labels: dict[str, int], usage: dict[str, int]) -> dict:
    """The report of one kernel as JSON types; `usage` is cuobjdump's -res-usage."""
    make = KERNELS.get(target.rstrip("abcdefghijklmnopqrstuvwxyz"))
    instance = re.search(r"backward_kernelILi(\d+)E\w*DqAccumE(\d)", name)
    if not make or not instance:
        raise ValueError(f"expected backward_kernel<group, dq_accum> for {', '.join(KERNELS)}, got {name} for {target}")
    group, accum = int(instance[1]), DQ_ACCUM[int(instance[2])]
    kernel = make(TILE // group, 4 if accum == "fp32" else 2)
    roles = find_roles(Graph(code, labels), kernel, usage["REG"])
    cycles = resources(kernel, roles)
    bound = {resource: sum(terms.values()) for resource, terms in cycles.items()}
    spills = sum(x.count("LDL|STL") for x in code)
    faults = [f"{x} is {usage[x]} bytes" for x in ("STACK", "LOCAL") if usage[x]]
    faults += [f"{spills} accesses of local memory"] if spills else []
    faults += [
        f"{role}: {x['used_in_budget']} registers in use under setmaxnreg {x['budget']}"
        for role, x in roles.items()
        if x["used_in_budget"] > x["budget"]
    ]
    return {
        "kernel": f"backward_kernel<{group}, {accum}>",
        "target": target,
        "registers_at_launch": usage["REG"],
        "local_bytes": usage["STACK"] + usage["LOCAL"],
        "static_shared_bytes": usage["SHARED"],
        "faults": faults,
        "roles": roles,
        "cycles": cycles,
        "binds": max(bound, key=lambda x: bound[x]),
        "bound": max(bound.values()),
        "l2_bytes": kernel.l2_bytes,
        "bars": {
            what: {"value": value, "bar": kernel.bars[what]}
            for what, value in (against_bars(kernel, roles, cycles) if kernel.bars else {}).items()
        },
    }


def text(report: dict) -> str:
    """The report of one kernel to read."""
    lines = [
        f"{report['kernel']} for {report['target']}: {report['registers_at_launch']} registers at launch, "
        f"{report['local_bytes']} B local, {report['static_shared_bytes']} B static shared memory",
        "",
        "A warp and tile       registers   slots   stall |" + "".join(f"{pipe:>8}" for pipe in PIPE_NAMES),
    ]
    for name, role in report["roles"].items():
        warps = f"{len(role['warps'])} x {name}"
        lines.append(
            f"  {warps:<18} {role['registers']:>4} / {role['budget']:<4} {role['slots']:>7} {role['stall']:>7} |"
            + "".join(f"{role['pipes'][pipe] or '.':>8}" for pipe in PIPE_NAMES)
        )
        if "segment_slots" in role:
            lines.append(f"    a segment more  {'':>12} {role['segment_slots']:>7} {role['segment_stall']:>7} |")
    compute = report["roles"]["compute"]
    hand_offs = ", ".join(f"{share:.0%}" for share in compute["hand_offs"])
    lines += [f"  compute arrives on barriers at {hand_offs} of an iteration's stall", ""]
    lines.append("An SM and tile, cycles")
    for resource, terms in report["cycles"].items():
        items = ", ".join(f"{what} {cycles:.0f}" for what, cycles in terms.items())
        lines.append(f"  {resource:<14} {sum(terms.values()):>6.0f}  {items}")
    rate = report["l2_bytes"] / report["bound"]
    lines += [
        f"  {report['binds']} binds; dQ adds {report['l2_bytes']} B to L2, {rate:.1f} B a cycle at the bound",
        "",
    ]
    for what, x in report["bars"].items():
        verdict = "pass" if x["value"] <= x["bar"] else "MISS"
        lines.append(f"  {verdict}  {what}: {x['value']:.0f}, bar {x['bar']}")
    if report["bars"]:
        verdict = "pass" if report["binds"] in ("tensor core", "shared memory") else "MISS"
        lines += [f"  {verdict}  nothing but tensor core and shared memory binds: {report['binds']}", ""]
    return "\n".join(lines + [f"  FAULT {fault}" for fault in report["faults"]])


# --------------------------------------------------------------------------------------------------
# Files and tools


def tool(name: str) -> str:
    """Path of cuobjdump or nvdisasm."""
    try:
        files = importlib.metadata.files(f"nvidia-cuda-{name}") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    installed = [str(file.locate()) for file in files if file.name == name]
    for candidate in [*installed, name]:
        if path := shutil.which(candidate):  # executable ones only
            return path
    raise FileNotFoundError(f"{name}: expected package nvidia-cuda-{name}, or an executable on PATH")


def _output(command: list[str], folder: str | None = None) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder).stdout


def report_file(cubin: Path, kernels: str) -> list[dict]:
    """Reports of the kernels of a cubin whose mangled name matches `kernels`."""
    found = re.findall(r"Function (\S+):\s+(.*)", _output([tool("cuobjdump"), "-res-usage", str(cubin)]))
    usage = {name: {k: int(v) for k, v in re.findall(r"(\w+):(\d+)", line)} for name, line in found}
    if not any(re.search(kernels, name) for name in usage):
        return []
    target, functions = parse(_output([tool("nvdisasm"), "-c", "-hex", "-plr", "-lrm", "narrow", str(cubin)]))
    wanted = [name for name in functions if re.search(kernels, name)]
    return [analyse(target, name, *functions[name], usage[name]) for name in wanted]


def report(path: Path, kernels: str = "backward_kernel", arch: str = "") -> list[dict]:
    """Reports of the main kernels in a cubin, or in all of a library's cubins (of one architecture)."""
    machine = int.from_bytes(path.read_bytes()[18:20], "little")
    if machine == 190:  # EM_CUDA
        return report_file(path, kernels)
    with tempfile.TemporaryDirectory() as folder:
        _output([tool("cuobjdump"), "-xelf", "all", str(path.resolve())], folder)
        cubins = sorted(Path(folder).glob(f"*{arch}.cubin"))
        return [x for cubin in cubins for x in report_file(cubin, kernels)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--arch", default="", help="of a library's cubins, e.g. sm_100a; all of them by default")
    parser.add_argument("--kernel", default="backward_kernel", help="regular expression of mangled names")
    parser.add_argument("--json", type=Path, help="write the reports there too")
    arguments = parser.parse_args()
    reports = report(arguments.file, arguments.kernel, arguments.arch)
    if not reports:
        print(f"{arguments.file}: no kernel matches {arguments.kernel!r}", file=sys.stderr)
        return 1
    print("\n\n".join(text(x) for x in reports))
    if arguments.json:
        arguments.json.write_text(json.dumps(reports, indent=1))
    return int(any(x["faults"] for x in reports))


if __name__ == "__main__":
    sys.exit(main())
