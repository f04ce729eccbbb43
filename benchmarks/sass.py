"""Reads SASS: instructions with their stall counts and live registers, basic blocks, loops, ways around a loop.

The listing is that of `nvdisasm -c -hex -plr -lrm narrow`: an instruction takes two lines, the second one ends in a map
of the registers in use.
"""

from __future__ import annotations

import heapq
import re
from dataclasses import dataclass

# Where an instruction issues, first match; everything else is ALU.
PIPES = {
    "MUFU": r"MUFU",
    "FMA": r"(FFMA|FMUL|FADD|FFMA2|FMUL2|FADD2|IMAD|H\w+2)\b",
    "TMEM": r"(LDTM|STTM)",
    "MMA": r"(HGMMA|UTC)",
    "TMA": r"(UTMA|UBLK)",
    "LSU": r"(LD|ST|LDG|STG|LDS|STS|LDSM|STSM|LDL|STL|LDC|RED|REDG|ATOM|ATOMG|ATOMS|SHFL)\b",
    "sync": r"(SYNCS|BAR|FENCE|MEMBAR|\w*DEPBAR|WARPSYNC|WARPGROUP|ELECT|NANOSLEEP|ERRBAR|CCTL)\b",
    "branch": r"(BRA|BRX|BRXU|JMP|CALL|RET|EXIT|BSSY|BSYNC|BREAK|BMOV|YIELD|BPT)\b",
    "uniform": r"(U[A-Z]|R2UR|S2UR|LDCU|VOTEU|REDUX)",
    "NOP": r"NOP",
}
PIPE_NAMES = [*PIPES, "ALU"]
_SECTION = re.compile(r"\s*\.section\s+\.text\.(\w+)")
_LABEL = re.compile(r"(\.L_x_\d+):")
_LINE = re.compile(
    r"\s*/\*[0-9a-f]{4,}\*/\s+((?P<predicate>@!?U?P\w+)\s+)?(?P<opcode>[A-Z][\w.]*)(?P<operands>[^/]*)"
    r"/\* 0x[0-9a-f]{16} \*/"
)
_CONTROL = re.compile(r"\s*/\* 0x(?P<high>[0-9a-f]{16}) \*/\s*// \|.{5}(?P<registers>[^|]*)\|")


@dataclass(frozen=True)
class Instruction:
    """One SASS instruction."""

    predicate: str
    opcode: str
    operands: str
    stall: int  # cycles before the warp's next instruction, at least 1
    registers: int  # highest general register in use, plus one
    sets: int | None = None  # the scoreboard that its result frees
    waits: frozenset[int] = frozenset()  # scoreboards that must be free before it issues

    @property
    def pipe(self) -> str:
        return next((name for name, opcode in PIPES.items() if re.match(opcode, self.opcode)), "ALU")

    @property
    def jumps_to(self) -> list[str]:
        """Labels."""
        return re.findall(r"\.L_x_\d+", self.operands) if re.match(r"(BRA|BRX|JMP)", self.opcode) else []

    @property
    def ends_block(self) -> bool:
        return bool(re.match(r"(BRA|BRX|JMP|EXIT|RET)", self.opcode))

    @property
    def falls_through(self) -> bool:
        """Whether the next instruction may follow: predicates stand before the opcode or, of a BRA, among operands."""
        operand = self.opcode.startswith("BRA") and re.match(r"!?~?U?[PR]", self.operands)
        return not self.ends_block or bool(self.predicate or operand)

    def count(self, opcode: str) -> int:
        """How much work of that opcode it is: N if it is an `.xN`."""
        if not re.match(opcode, self.opcode):
            return 0
        times = re.search(r"\.x(\d+)", self.opcode)
        return int(times[1]) if times else 1


def stall_cycles(high: int) -> int:
    """The stall count in the upper 64 bits of an encoding, bits 105 to 108; an instruction takes its issue cycle."""
    return max(high >> 41 & 0xF, 1)


def scoreboards(high: int) -> tuple[int | None, frozenset[int]]:
    """`sets` and `waits` in the upper 64 bits of an encoding: bits 110 to 112, 7 for none, and a mask, 116 to 121."""
    sets = high >> 46 & 7
    return None if sets == 7 else sets, frozenset(i for i in range(6) if high >> 52 >> i & 1)


def round_trips(path: list[Instruction], opcode: str) -> int:
    """How often loads of `opcode`, which complete in order, are waited for."""
    trips, in_flight = 0, set()
    for x in path:
        if x.waits & in_flight:
            trips += 1
            in_flight = set()
        if x.count(opcode) and x.sets is not None:
            in_flight.add(x.sets)
    return trips


def parse(listing: str) -> tuple[str, dict[str, tuple[list[Instruction], dict[str, int]]]]:
    """Target (sm_90a) and, by mangled name, every function's instructions and its labels' positions among them."""
    target = re.search(r"\.target\s+(\w+)", listing)
    if not target:
        raise ValueError("expected a listing of nvdisasm, got no .target line")
    functions: dict[str, tuple[list[Instruction], dict[str, int]]] = {}
    first = None
    for line in listing.splitlines():
        if section := _SECTION.match(line):
            code, labels = functions.setdefault(section[1], ([], {}))
        elif label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _LINE.match(line):
            first = found
        elif first and (control := _CONTROL.match(line)):
            operands = first["operands"].strip(" ;")
            # A call's map has all that its callee may clobber; the traps that ptxas adds for tcgen05 never return.
            registers = 0 if "guardrail_trap" in operands else len(control["registers"].rstrip())
            high = int(control["high"], 16)
            timing = stall_cycles(high), registers, *scoreboards(high)
            code.append(Instruction(first["predicate"] or "", first["opcode"], operands, *timing))
            first = None
    return target[1], functions


class Graph:
    """Basic blocks of a function by number, what may follow each, and which blocks dominate it if it is reachable."""

    def __init__(self, code: list[Instruction], labels: dict[str, int]):
        starts = {0} | {labels[name] for x in code for name in x.jumps_to}
        starts |= {i + 1 for i, x in enumerate(code) if x.ends_block and i + 1 < len(code)}
        cuts = [*sorted(starts), len(code)]
        self.blocks = [code[begin:end] for begin, end in zip(cuts, cuts[1:])]
        at = {begin: block for block, begin in enumerate(cuts)}
        self.next = [[at[labels[name]] for name in block[-1].jumps_to] for block in self.blocks]
        for i, block in enumerate(self.blocks[:-1]):
            if block[-1].falls_through:
                self.next[i].append(i + 1)
        reachable = sorted(self.reach(0))
        self.before: dict[int, list[int]] = {block: [] for block in reachable}
        for block in reachable:
            for after in self.next[block]:
                self.before[after].append(block)
        self.dominators = {block: set(reachable) for block in reachable} | {0: {0}}
        changed = True
        while changed:
            changed = False
            for block in reachable[1:]:
                new = set.intersection(*(self.dominators[x] for x in self.before[block])) | {block}
                changed |= new != self.dominators[block]
                self.dominators[block] = new

    def reach(self, start: int) -> set[int]:
        """The block and all that may run after it."""
        seen, todo = {start}, [start]
        while todo:
            new = set(self.next[todo.pop()]) - seen
            seen |= new
            todo += new
        return seen

    def loops(self) -> list[tuple[int, set[int]]]:
        """Header and blocks of the natural loops, the ones with fewest instructions first."""
        bodies: dict[int, set[int]] = {}
        for block, dominators in self.dominators.items():
            for header in dominators.intersection(self.next[block]):
                body = bodies.setdefault(header, {header})
                todo = [block]
                while todo:
                    x = todo.pop()
                    if x not in body:
                        body.add(x)
                        todo += self.before[x]
        return sorted(bodies.items(), key=lambda loop: sum(len(self.blocks[x]) for x in loop[1]))

    def iteration(self, header: int, body: set[int], work: dict[str, int]) -> list[Instruction] | None:
        """The way from the header back to it with fewest instructions that issues exactly `work`, or None.

        `work` is how often what is issued, by regular expression of the opcode. Loops inside go around as often as it
        takes. What a way may leave out and must not has to be part of the work.
        """
        counts = {x: tuple(sum(i.count(opcode) for i in self.blocks[x]) for opcode in work) for x in body}
        goal = tuple(work.values())
        queue: list[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = [(0, header, (0,) * len(goal), ())]
        seen = set()
        while queue:
            slots, block, done, path = heapq.heappop(queue)
            if path and block == header:
                if done == goal:
                    return [instruction for x in path for instruction in self.blocks[x]]
                continue
            done = tuple(a + b for a, b in zip(done, counts[block]))
            if (block, done) in seen or any(a > b for a, b in zip(done, goal)):
                continue
            seen.add((block, done))
            for after in body.intersection(self.next[block]):
                heapq.heappush(queue, (slots + len(self.blocks[block]), after, done, (*path, block)))
        return None
