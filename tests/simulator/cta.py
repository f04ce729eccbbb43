"""CTAs and warps: divergence, control flow, barriers, reports."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from . import memory
from .clocks import GRANULE, Clocks, join

if TYPE_CHECKING:
    from .machine import Launch, Machine

LANES = 32
FULL = np.ones(LANES, bool)


@dataclass
class Report:
    """One finding, with the place it was seen at."""

    check: str
    text: str
    kernel: str
    line: int
    cta: int
    warp: int

    def __str__(self) -> str:
        return f"{self.check}: {self.text} [{self.kernel}, PTX line {self.line}, CTA {self.cta}, warp {self.warp}]"


class Wait:
    """What a group of lanes waits for. `merge` = for the other lanes of its warp."""

    merge = False

    def __init__(self, text: str, ready):
        self.text, self.ready = text, ready


class Converge(Wait):
    """Until all lanes of the instruction's mask have arrived; ends when groups merge."""

    merge = True

    def __init__(self, text: str):
        super().__init__(text, lambda: False)


class Mbarrier:
    """PTX ISA 9.7.13.15: pending arrivals, transaction count, phase."""

    def __init__(self, count: int, clocks: Clocks):
        self.expected = self.pending = count
        self.transactions = 0
        self.phase = 0
        self.observed = 0  # phases that a test_wait or try_wait has seen complete
        self.owner = self.owner_lane = self.owner_epoch = 0  # the warp that initialised it, the agent of its lane
        self.fenced = False  # its initialisation is visible to the asynchronous proxy: ISA 9.0, 9.1 asks no fence
        self.clocks = clocks
        self.gathering = clocks.zero()
        self.done = clocks.zero()

    def join(self, token: np.ndarray) -> None:
        join(self.gathering, token)

    def arrive(self, count: int) -> str | None:
        """Arrive-on; returns what is wrong with it (9.7.13.15.4, 9.7.13.15.7)."""
        error = None
        if self.pending < count:
            error = f"whose {self.expected} arrivals of phase {self.phase} are complete"
        elif self.observed < self.phase:
            error = f"before a wait has seen the end of phase {self.phase - 1}"
        self.pending -= count
        return error

    def settle(self) -> None:
        if self.pending == 0 and self.transactions == 0:
            self.phase += 1
            self.pending = self.expected
            self.done = np.maximum(self.done, self.gathering)
            self.gathering = self.clocks.zero()

    def completed(self, parity: int) -> bool:
        return (self.phase & 1) != parity


class BarrierPhase:
    """One use of a named barrier: what its warps know and vote, which they read after its end."""

    def __init__(self, clocks: Clocks):
        self.complete = False
        self.known = clocks.zero()
        self.count, self.all, self.any = 0, True, False


class NamedBarrier:
    """PTX ISA 9.7.13.1 barrier{.cta}."""

    def __init__(self, clocks: Clocks):
        self.arrived = 0
        self.expected: int | None = None
        self.clocks = clocks
        self.phase = BarrierPhase(clocks)


@dataclass(eq=False)
class AsyncOp:
    """Work that is done later: its stages run in order, at times the adversary chooses."""

    text: str
    line: int
    cta: object
    warp: int
    stages: deque
    finished: int = 0  # stages

    @property
    def done(self) -> bool:
        return not self.stages


@dataclass(eq=False)
class Group:
    """Lanes of a warp at the same place; `mask` None = all 32."""

    block: int
    mask: np.ndarray | None
    wait: Wait | None = None
    released: bool = False  # the gate was passed by waiting


class Warp:
    def __init__(self, cta: Cta, index: int, threads: int):
        self.cta, self.index = cta, index
        self.machine = cta.machine
        count = min(LANES, threads - index * LANES)
        self.alive = np.arange(LANES) < count
        self.groups = [Group(0, None if count == LANES else self.alive.copy())]
        self.registers = list(cta.program.initial_registers)
        self.line = 0
        self.bulk_open: dict[int, list[AsyncOp]] = {}
        self.bulk_groups: dict[int, list[list[AsyncOp]]] = {}
        self.wgmma_open: list[AsyncOp] = []
        self.wgmma_groups: list[list[AsyncOp]] = []
        self.wgmma_fenced: list | None = None  # the registers at the last wgmma.fence
        self.wgmma_touched = 0  # those that other instructions accessed since, as bits of Program.wgmma_registers
        self.tensor_ops: dict[str, list[AsyncOp]] = {"ld": [], "st": []}
        self.loading = 0  # tcgen05.ld whose registers nothing has used, as bits of Program.load_bits
        self.tensor_in_order: set[int] = set()
        self.tensor_last: dict[int, AsyncOp] = {}  # the last MMA of every agent
        self.fragments: dict[int, tuple] = {}
        self.executed: Counter = Counter()  # see Cta.execute_together
        self.register_count = cta.launch_registers
        self.tried = False  # the last try_wait gave up
        self.barrier_phase: BarrierPhase | None = None  # it waits for, or last waited for
        self.cluster_arrivals = self.cluster_waits = 0  # barrier.cluster
        self.local = None  # memory.Region
        thread = index * LANES + np.arange(LANES)
        x, y, _ = cta.block
        self.specials = {
            "%tid.x": (thread % x).astype(np.uint32),
            "%tid.y": (thread // x % y).astype(np.uint32),
            "%tid.z": (thread // (x * y)).astype(np.uint32),
            "%laneid": np.arange(LANES, dtype=np.uint32),
            "%warpid": np.full(LANES, index, np.uint32),
        }

    def lanes(self, mask: np.ndarray | None) -> np.ndarray | None:
        """Numbers of the lanes of a mask for `Clocks`, None for all that have not exited."""
        return None if mask is None or not (self.alive & ~mask).any() else np.flatnonzero(mask)

    def issue(self, key: object, text: str, line: int, stages: list) -> AsyncOp:
        """Makes an asynchronous operation; those of one `key` that is not None stay in order."""
        cta, op = self.cta, AsyncOp(text, line, self.cta, self.index, deque(stages))
        if len(cta.in_flight) > cta.in_flight_limit:
            cta.in_flight = [o for o in cta.in_flight if not o.done]
            cta.in_flight_limit = 2 * len(cta.in_flight) + 64
        cta.in_flight.append(op)
        self.machine.progress += 1
        self.machine.engine.issue(key if key is not None else op, op)
        return op

    # ---- reports

    def report(self, check: str, text: str, line: int | None = None) -> None:
        self.machine.report(Report(check, text, self.cta.program.name, line or self.line, self.cta.index, self.index))

    def report_fault(self, fault: memory.Fault) -> None:
        text = str(fault)
        if fault.lane is not None:
            x, y, z = (int(self.specials[f"%tid.{axis}"][fault.lane]) for axis in "xyz")
            text += f", by thread ({x}, {y}, {z}), lane {fault.lane}"
        self.report(fault.check, text)

    def end(self) -> None:
        """After a fault that its check does not make an error."""
        self.groups, self.alive = [], np.zeros(LANES, bool)
        self.machine.progress += 1

    def touch_wgmma(self, registers: int, line: int) -> None:
        """Registers of wgmma (bits of Program.wgmma_registers) are accessed by other instructions, from `line` on."""
        self.wgmma_touched |= registers
        for op in (op for group in (*self.wgmma_groups, self.wgmma_open) for op in group):
            if op.registers & registers:
                self.report("race", f"accesses registers of the wgmma of line {op.line} without wgmma.wait_group", line)
                return

    def access_loads(self, used: int, overwritten: int, line: int) -> None:
        """Registers of tcgen05.ld are accessed before wait::ld, from `line` on.

        A use waits for its load, whatever the fences; an overwriting does not (9.7.16.6.4.5).
        """
        if self.loading & overwritten:
            self.report("race", "overwrites registers of a tcgen05.ld without tcgen05.wait::ld", line)
        for op in self.tensor_ops["ld"]:
            if op.bit & used:
                self.machine.engine.finish(("tcgen05.ld", self), op)
        self.loading &= ~used

    def check_uniform(self, condition: np.ndarray, mask: np.ndarray | None, line: int) -> None:
        """bra.uni: the active lanes agree (9.7.12.3)."""
        active = condition if mask is None else condition[mask]
        if active.any() and not active.all():
            self.report("illegal", "a bra.uni that only some lanes take", line)

    # ---- control flow

    def step(self) -> bool:
        """Runs one basic block of the runnable group of lowest address. False = blocked."""
        chosen = None
        for group in self.groups:
            if group.wait is not None:
                if group.wait.merge or not group.wait.ready():
                    continue
                group.wait = None
                group.released = True
            if chosen is None or group.block < chosen.block:
                chosen = group
        if chosen is None:
            return False
        if self.machine.idle_rounds > 20:  # a group may spin for another one
            chosen = self.machine.rng.choice([g for g in self.groups if g.wait is None])
        block = self.cta.program.blocks[chosen.block]
        mask = chosen.mask
        if block.gate is not None and not chosen.released:
            wait = block.gate(self, self.registers, mask)
            if wait is not None:
                chosen.wait = wait
                return True
        chosen.released = False
        self.machine.count(block, self)
        result = block.run(self, self.registers, mask)
        if type(result) is int:
            self._go(chosen, result)
        elif type(result) is np.ndarray:  # brx.idx: every lane's next block
            self.groups.remove(chosen)
            active = FULL if mask is None else mask
            for number in np.unique(result[active]):
                self._add(int(number), active & (result == number))
        else:
            taken, target, fall = result
            other = (FULL if mask is None else mask) & ~taken
            if not taken.any():
                self._go(chosen, fall)
            elif not other.any():
                self._go(chosen, target)
            else:
                self.groups.remove(chosen)
                self._add(target, taken)
                self._add(fall, other)
        return True

    def _go(self, group: Group, block: int) -> None:
        if len(self.groups) == 1 and block >= 0:
            group.block = block
            return
        self.groups.remove(group)
        self._add(block, group.mask)

    def _add(self, block: int, mask: np.ndarray | None) -> None:
        if block < 0:
            self.alive = self.alive & ~(FULL if mask is None else mask)
            for group in self.groups:  # a converging group may now be complete
                if group.wait is not None and group.wait.merge:
                    group.wait = None
            return
        for group in self.groups:
            if group.block == block and not group.released and (group.wait is None or group.wait.merge):
                merged = group.mask | mask
                group.mask = None if merged.all() else merged
                group.wait = None
                return
        self.groups.append(Group(block, None if mask is None or mask.all() else mask))

    @property
    def finished(self) -> bool:
        return not self.groups


class Cta:
    def __init__(self, machine: Machine, launch: Launch, index: int):
        program = launch.program
        self.machine, self.launch, self.program, self.index = machine, launch, program, index
        self.block = launch.block
        threads = launch.threads
        gx, gy, _ = launch.grid
        self.coordinates = index % gx, index // gx % gy, index // (gx * gy)
        self.launch_registers = launch.lane_registers
        self.register_pool = 0  # what setmaxnreg.dec gave back
        size = program.static_shared_bytes + launch.shared_bytes
        self.shared = memory.Region(
            0, np.full(max(size, 16), memory.POISON_BYTE, np.uint8), False, "shared memory of the CTA"
        )
        self.shared.size = size
        num_warps = -(-threads // LANES)
        self.clocks = Clocks(num_warps, size)
        self.mbarriers: dict[int, Mbarrier] = {}
        self.named: dict[int, NamedBarrier] = {}
        self.warps = [Warp(self, i, threads) for i in range(num_warps)]
        self.signalled = False
        self.in_flight: list[AsyncOp] = []
        self.in_flight_limit = 64
        self.tensor = None  # tensor.TensorMemory
        self.cluster_clocks: dict[int, np.ndarray] = {}  # what every phase of barrier.cluster releases
        self._together: dict[tuple, list] = {}  # see execute_together

    def execute_together(self, warp: Warp, what: str, key: object) -> None:
        """The warps of a warpgroup execute the same instructions of kind `what`: `key` tells one from another."""
        number = warp.executed[what]
        warp.executed[what] += 1
        warps = self.warps[warp.index // 4 * 4 :][:4]
        if len(warps) < 4:
            warp.report("illegal", f"{what} in a warpgroup of {len(warps)} warps")
        first = self._together.setdefault((what, warp.index // 4, number), [key, warp.index, warp.line, 0])
        if first[0] != key:
            warp.report(
                "illegal",
                f"warps {first[1]} (line {first[2]}) and {warp.index} of a warpgroup execute different {what}: all four "
                "must execute the same one, with the same operands",
            )
        first[3] += 1
        if first[3] == len(warps):
            del self._together[what, warp.index // 4, number]

    def check_together(self) -> None:
        """What some warps of a warpgroup executed before the CTA's end, and others did not."""
        for (what, group, _), (_, index, line, count) in self._together.items():
            self.warps[index].report("illegal", f"{count} of the warps of warpgroup {group} executed this {what}", line)

    def let_next_start(self) -> None:
        """griddepcontrol.launch_dependents by a thread, or the CTA's end."""
        if not self.signalled:
            self.signalled = True
            self.launch.signalled += 1

    def named_barrier(self, number: int) -> NamedBarrier:
        if number not in self.named:
            self.named[number] = NamedBarrier(self.clocks)
        return self.named[number]

    def granules(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Granule numbers that accesses of `size` bytes touch."""
        first = (addresses >> np.uint64(2)).astype(np.int64)
        if size <= GRANULE:
            return first
        return (first[:, None] + np.arange(size // GRANULE)).ravel()
