"""The machine: CTAs, warps, barriers, the asynchronous engine with its adversary, the scheduler."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from . import memory
from .clocks import GRANULE, Clocks

LANES = 32
FULL = np.ones(LANES, bool)
MODES = ("eager", "late", "random")
MMA_ORDERS = ("issue", "isa")
REGISTER_FILE = 65536
DEFAULT_CHECKS = {
    "out_of_bounds": "error",
    "uninitialised": "error",
    "misaligned": "error",
    "race": "error",
    "mma_order": "error",
    "proxy_fence": "error",
    "barrier": "error",
    "descriptor": "error",
    "illegal": "error",
    "deadlock": "error",
    "exit": "error",
    "trap": "error",
}


class SimulationError(RuntimeError):
    """A kernel did something the hardware forbids or leaves undefined."""


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
        self.owner = self.owner_epoch = 0  # the warp that initialised it
        self.fenced = False  # its initialisation is visible to the asynchronous proxy: ISA 9.0, 9.1 asks no fence
        self.clocks = clocks
        self.gathering = clocks.zero()
        self.done = clocks.zero()

    def join(self, token) -> None:
        for mine, other in zip(self.gathering, token):
            np.maximum(mine, other, out=mine)

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
            self.done = tuple(np.maximum(a, b) for a, b in zip(self.done, self.gathering))
            self.gathering = self.clocks.zero()

    def completed(self, parity: int) -> bool:
        return (self.phase & 1) != parity


class NamedBarrier:
    """PTX ISA 9.7.13.1 barrier{.cta}."""

    def __init__(self, clocks: Clocks):
        self.arrived = 0
        self.expected: int | None = None
        self.generation = 0
        self.clocks = clocks
        self.gathering = clocks.zero()
        self.done = clocks.zero()
        self.votes = [0, True, False]
        self.result = (0, True, False)


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


class Engine:
    """Asynchronous operations in flight, in queues that keep their order."""

    def __init__(self, mode: str, rng: random.Random):
        self.mode, self.rng = mode, rng
        self.queues: dict[object, deque[AsyncOp]] = {}
        self.steps = 0

    def issue(self, key: object, op: AsyncOp) -> None:
        if self.mode == "eager":
            while op.stages:
                self._stage(op)
            return
        self.queues.setdefault(key, deque()).append(op)

    def _stage(self, op: AsyncOp) -> None:
        stage = op.stages[0]
        stage()
        op.stages.popleft()
        op.finished += 1
        self.steps += 1

    def step(self) -> bool:
        """Runs one stage: of the oldest operation, or of a random queue's first."""
        if not self.queues:
            return False
        keys = list(self.queues)
        self._advance(keys[0] if self.mode == "late" else self.rng.choice(keys))
        return True

    def _advance(self, key: object) -> None:
        """Runs one stage of a queue's first operation."""
        queue = self.queues[key]
        op = queue[0]
        self._stage(op)
        if op.done:
            queue.popleft()
            del self.queues[key]
            if queue:
                self.queues[key] = queue  # to the back: round robin between queues

    def finish(self, key: object, op: AsyncOp) -> None:
        """Runs what is left of an operation of a queue, and what comes before it there."""
        while not op.done:
            self._advance(key)

    def drain(self, launch: Launch) -> None:
        """Runs what is in flight of a grid."""
        while keys := [k for k, queue in self.queues.items() if queue[0].cta.launch is launch]:
            self._advance(keys[0] if self.mode == "late" else self.rng.choice(keys))


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

    def poll(self) -> bool:
        """Whether some group can go on; releases the waits that are over."""
        for group in self.groups:
            if group.wait is None:
                return True
            if not group.wait.merge and group.wait.ready():
                group.wait = None
                group.released = True
                return True
        return False

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
        self.cluster_clocks: dict[int, tuple] = {}  # what every phase of barrier.cluster releases
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

    def live_warps(self) -> int:
        return sum(not w.finished for w in self.warps)

    def granules(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Granule numbers that accesses of `size` bytes touch."""
        first = (addresses >> np.uint64(2)).astype(np.int64)
        if size <= GRANULE:
            return first
        return (first[:, None] + np.arange(size // GRANULE)).ravel()


@dataclass(eq=False)
class Launch:
    """A grid, and how far its execution has come."""

    program: object
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    parameters: object  # memory.Region
    cooperative: bool = False
    registers: int = 0  # a thread, at launch; 0: not known
    on_end: Callable[[], None] = lambda: None
    limit: int = 0  # resident CTAs
    resident: list[Cta] = field(default_factory=list)
    started: int = 0  # CTAs
    signalled: int = 0  # CTAs that let the next grid start
    overlapped: Launch | None = None
    instructions: int = 0
    done: bool = False

    @property
    def lets_next_start(self) -> bool:
        return any("launch_dependents" in x.parts for x in self.program.kernel.instructions)

    @property
    def threads(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def ctas(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def lane_registers(self) -> int:
        """At launch, in units of 8; where no cubin tells, the register file divided by the threads."""
        if self.registers:
            return -(-self.registers // 8) * 8
        return min(255, REGISTER_FILE // self.threads) // 8 * 8


@dataclass
class Profile:
    """Executed warp instructions by kernel, warp and opcode."""

    blocks: Counter = field(default_factory=Counter)

    def table(self) -> Counter:
        total: Counter = Counter()
        for (block, warp), times in self.blocks.items():
            for opcode in block.opcodes:
                total[block.kernel, warp, opcode] += times
        return total


class Machine:
    """Executes launches. `num_sms` SMs; as many CTAs resident as threads and shared memory allow."""

    def __init__(
        self, *, num_sms: int, mode: str, seed: int, mma_order: str = "issue", checks: dict[str, str] | None = None
    ):
        for name, value, values in (("mode", mode, MODES), ("mma_order", mma_order, MMA_ORDERS)):
            if value not in values:
                raise ValueError(f"{name}: expected one of {', '.join(values)}, got {value!r}")
        self.num_sms, self.mode, self.mma_order = num_sms, mode, mma_order
        self.rng = random.Random(seed)
        self.checks = dict(DEFAULT_CHECKS)
        for name, severity in (checks or {}).items():
            if name not in self.checks or severity not in ("error", "warning", "off"):
                raise ValueError(f"checks: expected one of {', '.join(self.checks)}, got {name!r}: {severity!r}")
            self.checks[name] = severity
        self.memory = memory.GlobalMemory()
        self.engine = Engine(mode, self.rng)
        self.active: list[Launch] = []  # oldest first
        self.idle_rounds, self.last_progress = 0, -1
        self.reports: list[Report] = []
        self.progress = 0  # stores, arrivals, barriers: what a spinning warp may wait for
        self.profile: Profile | None = None
        self.instructions = 0
        tracked = ("race", "proxy_fence", *(("mma_order",) if mma_order == "isa" else ()))
        self.track = any(self.checks[c] != "off" for c in tracked)

    def report(self, report: Report) -> None:
        severity = self.checks[report.check]
        if severity == "off":
            return
        if len(self.reports) < 1000:
            self.reports.append(report)
        if severity == "error":
            raise SimulationError(str(report))

    def count(self, block, warp: Warp) -> None:
        self.instructions += block.size
        warp.cta.launch.instructions += block.size
        if self.profile is not None:
            self.profile.blocks[block, warp.index] += 1

    # ---- running

    def start(self, launch: Launch, overlapped: Launch | None = None) -> None:
        """Makes a grid active, beside an `overlapped` one that its griddepcontrol.wait waits for.

        Raises:
            SimulationError: it does not fit.
        """
        program = launch.program
        if launch.threads > (program.kernel.max_threads or 1024):
            raise SimulationError(f"{program.name}: {launch.threads} threads a CTA, more than the kernel allows")
        if program.kernel.block not in (None, launch.block):
            raise SimulationError(f"{program.name}: a CTA of {launch.block}, .reqntid says {program.kernel.block}")
        shared = program.static_shared_bytes + launch.shared_bytes
        if shared > 232448:
            raise SimulationError(f"{program.name}: {shared} bytes of shared memory, more than 232448")
        padded = -(-launch.threads // 32) * 32
        registers = launch.lane_registers * padded if launch.registers else 0
        if registers > REGISTER_FILE:
            raise SimulationError(f"{program.name}: {registers} registers a CTA, more than {REGISTER_FILE}")
        by_registers = REGISTER_FILE // registers if registers else 32
        per_sm = max(1, min(2048 // padded, 233472 // (shared + 1024), by_registers, 32))
        launch.limit, launch.overlapped = per_sm * self.num_sms, overlapped
        if launch.cooperative and launch.ctas > launch.limit:
            raise SimulationError(f"{program.name}: a cooperative grid of {launch.ctas} CTAs, {launch.limit} fit")
        self.memory.adopt_host_writes()
        self.active.append(launch)

    def abort(self) -> None:
        """Forgets the active grids."""
        for launch in self.active:
            launch.on_end()
        self.active.clear()
        self.engine.queues.clear()

    def round(self) -> None:
        """A pass over the CTAs of one active grid: of the youngest that can run, or in mode random of any."""
        engine = self.engine
        order = self.rng.sample(self.active, len(self.active)) if self.mode == "random" else self.active[::-1]
        ran, steps = False, engine.steps
        with np.errstate(all="ignore"):
            for launch in order:
                ran |= self._pass(launch)
                if ran and self.idle_rounds <= 20:
                    break
            ran |= engine.steps != steps
            if self.progress != self.last_progress:
                self.last_progress, self.idle_rounds = self.progress, 0
            else:
                self.idle_rounds += 1
            if not ran or self.idle_rounds > 20:
                if engine.step():
                    self.idle_rounds = 0
                elif not ran or self.idle_rounds > 3000:
                    self._deadlock([cta for launch in self.active for cta in launch.resident])

    def _fill(self, launch: Launch) -> None:
        """Makes CTAs resident, as many as the grids beside it leave room for; of a cooperative grid all at once.

        A grid that overlaps this one takes no room: on the chip it would start when all CTAs of this one have.
        """
        others = sum(len(x.resident) / x.limit for x in self.active if x is not launch and x.overlapped is not launch)
        room = int((1 - others) * launch.limit + 1e-6) - len(launch.resident)
        left = launch.ctas - launch.started
        if launch.cooperative and room < left:
            return
        for _ in range(min(room, left)):
            launch.resident.append(Cta(self, launch, launch.started))
            launch.started += 1

    def _pass(self, launch: Launch) -> bool:
        """Some blocks of every warp of a grid's CTAs; whether there was one that could run."""
        self._fill(launch)
        ran, rng, engine = False, self.rng, self.engine
        for cta in list(launch.resident):
            warps = [w for w in cta.warps if w.groups]
            if self.mode != "eager" or rng.random() < 0.1:
                rng.shuffle(warps)
            for warp in warps:
                ran |= self._slice(warp)
                if self.mode == "random" and engine.queues and rng.random() < 0.3:
                    engine.step()
            if not any(w.groups for w in cta.warps):
                self._exit(cta)
                launch.resident.remove(cta)
                self.progress += 1
        if not launch.resident and launch.started == launch.ctas:
            engine.drain(launch)
            launch.done = ran = True
            self.active.remove(launch)
            launch.on_end()
            self.progress += 1
        return ran

    def _slice(self, warp: Warp) -> bool:
        """A few basic blocks of one warp."""
        blocks = self.rng.choice((1, 2, 4, 16, 64))
        ran = False
        try:
            for _ in range(blocks):
                if not warp.groups or not warp.step():
                    break
                ran = True
        except memory.Fault as fault:
            warp.report_fault(fault)
            warp.end()
            ran = True
        return ran

    def _exit(self, cta: Cta) -> None:
        cta.let_next_start()
        cta.in_flight = [op for op in cta.in_flight if not op.done]
        for op in cta.in_flight:
            if op.finished == 0:  # still to read or write the CTA's shared memory
                cta.warps[op.warp].report(
                    "exit", f"the CTA exits while {op.text} still uses its shared memory", op.line
                )
        cta.check_together()
        if cta.tensor is not None and cta.tensor.owner.any():
            cta.warps[0].report("exit", "the CTA exits with tensor memory allocated")
        for address, barrier in cta.mbarriers.items():
            if barrier.transactions:
                cta.warps[0].report(
                    "exit", f"the CTA exits with {barrier.transactions} bytes outstanding on mbarrier {address:#x}"
                )
        if not cta.in_flight:
            cta.clocks.close()

    def _deadlock(self, resident: list[Cta]) -> None:
        lines = []
        for cta in resident[:4]:
            for warp in cta.warps:
                for group in warp.groups:
                    lanes = 32 if group.mask is None else int(group.mask.sum())
                    line = cta.program.blocks[group.block].line
                    reason = "spins" if group.wait is None else f"waits for {group.wait.text}"
                    lines.append(f"CTA {cta.index} warp {warp.index} ({lanes} lanes) {reason} at line {line}")
        cta = resident[0]
        for address, b in sorted(cta.mbarriers.items()):
            lines.append(
                f"CTA {cta.index} mbarrier {address:#x}: phase {b.phase}, {b.pending} of {b.expected} arrivals and "
                f"{b.transactions} bytes pending"
            )
        warp = next(w for w in cta.warps if w.groups)
        warp.line = cta.program.blocks[warp.groups[0].block].line
        text = "every warp is blocked:\n  " + "\n  ".join(lines)
        self.checks["deadlock"] = "error"
        warp.report("deadlock", text)
