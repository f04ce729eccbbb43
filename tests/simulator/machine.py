"""The machine: the asynchronous engine with its adversary, launches, the scheduler."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from . import memory
from .cta import AsyncOp, Cta, Report, Warp

MODES = ("eager", "late", "random")
MMA_ORDERS = ("issue", "isa")
REGISTER_FILE = 65536
MAX_GRID, MAX_BLOCK = ((1 << 31) - 1, 65535, 65535), (1024, 1024, 64)
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


class Engine:
    """Asynchronous operations in flight, in queues that keep their order."""

    def __init__(self, mode: str, rng: random.Random):
        self.mode, self.rng = mode, rng
        self.queues: dict[object, deque[AsyncOp]] = {}
        self.steps = 0
        # Of mode random, for a whole run: how fast it is against the warps; whether what is issued last is done first, which
        # leaves prefetches for the last moment.
        self.pace = rng.choice((0.02, 0.3))
        self.newest_first = rng.random() < 0.5

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
        """Runs one stage: of the oldest queue (late), of the newest or of any (random)."""
        if not self.queues:
            return False
        keys = list(self.queues)
        self._advance(keys[0] if self.mode == "late" else keys[-1] if self.newest_first else self.rng.choice(keys))
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

    def follows(self, other: Launch) -> bool:
        """Whether it overlaps the other grid, or one that does."""
        before = self.overlapped
        return before is not None and (before is other or before.follows(other))

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
    """Executes launches. `num_sms` SMs; as many CTAs resident as threads, registers and shared memory allow."""

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
            if name == "deadlock" and severity != "error":
                raise ValueError("checks: nothing can follow a deadlock, expected severity 'error'")
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
            SimulationError: a launch the driver would refuse.
        """
        program = launch.program
        for what, values, limits in (("grid", launch.grid, MAX_GRID), ("block", launch.block, MAX_BLOCK)):
            if not all(1 <= value <= limit for value, limit in zip(values, limits)):
                raise SimulationError(f"{program.name}: a {what} of {values}, expected 1 to {limits}")
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
        self.idle_rounds, self.last_progress = 0, -1

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

        A grid that overlaps this one, or one that does, takes no room: on the chip it starts when all CTAs of this one have.
        """
        others = sum(len(x.resident) / x.limit for x in self.active if x is not launch and not x.follows(launch))
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
                if self.mode == "random" and engine.queues and rng.random() < engine.pace:
                    engine.step()
            if not any(w.groups for w in cta.warps):
                self._exit(cta)
                launch.resident.remove(cta)
                self.progress += 1
        if not launch.resident and launch.started == launch.ctas:
            engine.drain(launch)
            launch.done = ran = True
            launch.overlapped = None
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
        warp.report("deadlock", text)
