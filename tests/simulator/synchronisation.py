"""Barriers, mbarriers, fences, registers, dependent grids (PTX ISA 9.1)."""

from __future__ import annotations

import numpy as np

from .clocks import join
from .collectives import converged, gate_converge
from .cta import FULL, LANES, BarrierPhase, Converge, Mbarrier, Wait
from .formats import U32, U64
from .operands import lanes_of, put, reader, shared_address, uniform
from .ptx import Address, Instruction, Register, Sink

# ---- barriers of warps and CTAs (9.7.13.1, 9.7.13.2) ---------------------------------------------


def _barrier_operands(program, x: Instruction):
    ops = list(x.operands)
    predicate = None
    if "red" in x.parts:
        ops.pop(0)
        predicate = reader(program, ops.pop(), 0)
    number = reader(program, ops[0], 4)
    count = reader(program, ops[1], 4) if len(ops) > 1 else None
    return number, count, predicate


def _barrier_values(w, R, m, number, count) -> tuple[int, int | None]:
    """Number and thread count: a warp executes a barrier as one (9.7.13.1)."""
    return uniform(w, number(w, R), m, "the number of a barrier (9.7.13.1)"), (
        uniform(w, count(w, R), m, "the thread count of a barrier (9.7.13.1)") if count else None
    )


def _barrier_arrive(w, x: Instruction, number: int, count: int | None, votes) -> tuple:
    """Adds this warp to the barrier; returns the barrier and the phase."""
    cta = w.cta
    if number > 15:
        w.report("illegal", f"barrier number {number}", x.line)
    barrier = cta.named_barrier(number)
    if count is None:
        count = LANES * len(cta.warps)
        exited = sum(v.finished for v in cta.warps)
    else:
        exited = 0
        if count % LANES or count == 0:
            w.report("barrier", f"barrier {number} with {count} threads, not a multiple of the warp size", x.line)
    if barrier.expected is not None and barrier.expected != count:
        w.report("barrier", f"barrier {number} expects {barrier.expected} threads, this warp says {count}", x.line)
    barrier.expected = count
    barrier.arrived += LANES
    if barrier.arrived > count:
        w.report("barrier", f"barrier {number}: more than {count} threads arrive", x.line)
    phase = barrier.phase
    join(phase.known, cta.clocks.release(w.index, None))
    if votes is not None:
        phase.count += int(votes.sum())
        phase.all &= bool(votes.all())
        phase.any |= bool(votes.any())
    _barrier_settle(barrier, exited)
    w.machine.progress += 1
    return barrier, phase


def _barrier_settle(barrier, exited: int) -> None:
    if barrier.arrived and barrier.arrived + exited * LANES >= barrier.expected:
        barrier.phase.complete = True
        barrier.phase = BarrierPhase(barrier.clocks)
        barrier.arrived, barrier.expected = 0, None


def gate_barrier(program, x: Instruction):
    number, count, predicate = _barrier_operands(program, x)

    def gate(w, R, m):
        if not converged(w, m):
            return Converge("the other lanes of its warp at a barrier")
        w.line = x.line
        n, c = _barrier_values(w, R, m, number, count)
        votes = predicate(w, R)[FULL if m is None else m] if predicate else None
        barrier, phase = _barrier_arrive(w, x, n, c, votes)
        w.barrier_phase = phase

        def ready():
            if count is None and barrier.phase is phase:
                _barrier_settle(barrier, sum(v.finished for v in w.cta.warps))
            return phase.complete

        return Wait(f"barrier {n}", ready) if not ready() else None

    return gate


def build_barrier(program, x: Instruction):
    """After the wait: acquires, and delivers the vote."""
    op = next((p for p in x.parts if p in ("popc", "and", "or")), None)

    def barrier_done(w, R, m):
        phase = w.barrier_phase
        w.cta.clocks.acquire(w.index, None, phase.known)
        if op == "popc":
            put(R, x.operands[0], np.full(LANES, phase.count, U32), m)
        elif op:
            put(R, x.operands[0], np.full(LANES, phase.all if op == "and" else phase.any), m)

    return barrier_done


def build_barrier_arrive(program, x: Instruction):
    number, count, _ = _barrier_operands(program, x)

    def arrive(w, R, m):
        _barrier_arrive(w, x, *_barrier_values(w, R, m, number, count), None)

    return arrive


# ---- the barrier of a cluster (9.7.13.3), which is of one CTA ------------------------------------


def build_cluster_barrier(program, x: Instruction):
    def arrive(w, R, m):
        if not _cluster_arrived(w):
            w.report("barrier", "a warp arrives again at barrier.cluster before the barrier completes")
        w.cluster_arrivals += 1
        clocks = w.cta.clocks
        gathering = w.cta.cluster_clocks.setdefault(w.cluster_arrivals, clocks.zero())
        if "relaxed" not in x.parts:
            join(gathering, clocks.release(w.index, None))
        w.machine.progress += 1

    def wait(w, R, m):
        if w.cluster_waits == w.cluster_arrivals:
            w.report("barrier", "barrier.cluster.wait without a barrier.cluster.arrive before it")
        else:
            w.cta.clocks.acquire(w.index, None, w.cta.cluster_clocks[w.cluster_arrivals])
        w.cluster_waits = w.cluster_arrivals

    return arrive if "arrive" in x.parts else wait


def _cluster_arrived(w) -> bool:
    """Whether every warp that has not exited has arrived as often as this one."""
    return all(v.finished or v.cluster_arrivals >= w.cluster_arrivals for v in w.cta.warps)


def gate_cluster_barrier(program, x: Instruction):
    """Both wait for the other lanes of their warp."""
    converge = gate_converge(program, x, None)

    def gate(w, R, m):
        wait = converge(w, R, m)
        if wait is None and "wait" in x.parts and not _cluster_arrived(w):
            wait = Wait("barrier.cluster", lambda: _cluster_arrived(w))
        return wait

    return gate


# ---- mbarrier (9.7.13.15) ------------------------------------------------------------------------


def mbarrier_at(w, address: int, line: int):
    barrier = w.cta.mbarriers.get(address)
    if barrier is None:
        if address % 8:
            w.report("misaligned", f"mbarrier at {address:#x}", line)
        w.report("barrier", f"the mbarrier at {address:#x} is not initialised", line)
    elif barrier.owner != w.index and not w.cta.clocks.knows(w.index, barrier.owner_lane, barrier.owner_epoch):
        w.report("race", f"the mbarrier at {address:#x} is used without an ordering after its mbarrier.init", line)
    return barrier


def build_mbarrier(program, x: Instruction):
    parts = x.parts
    op = parts[1]
    if op == "init":
        where = shared_address(program, x.operands[0], parts)
        count = reader(program, x.operands[1], 4)

        def init(w, R, m):
            for lane in lanes_of(m):
                address, n = int(where(w, R)[lane]), int(count(w, R)[lane])
                if address % 8:
                    w.report("misaligned", f"mbarrier.init at {address:#x}, not a multiple of 8")
                if address + 8 > w.cta.shared.size:
                    w.report("out_of_bounds", f"mbarrier.init at {address:#x}, past shared memory")
                if not 1 <= n < 1 << 20:
                    w.report("illegal", f"mbarrier.init with {n} arrivals")
                if address in w.cta.mbarriers:
                    w.report("barrier", f"mbarrier.init of the live mbarrier at {address:#x}, without mbarrier.inval")
                barrier = w.cta.mbarriers[address] = Mbarrier(n, w.cta.clocks)
                clocks = w.cta.clocks
                barrier.owner, barrier.owner_lane = w.index, clocks.lanes(w.index).start + int(lane)
                barrier.owner_epoch = int(clocks.epoch[w.index])
                w.cta.shared.mark(address, address + 8)
                w.cta.clocks.barrier[address // 4 : address // 4 + 2] = True
            w.machine.progress += 1

        return init
    if op == "inval":
        where = shared_address(program, x.operands[0], parts)

        def inval(w, R, m):
            for lane in lanes_of(m):
                address = int(where(w, R)[lane])
                barrier = mbarrier_at(w, address, x.line)
                if barrier and barrier.transactions:
                    w.report("barrier", f"mbarrier.inval at {address:#x} with {barrier.transactions} bytes outstanding")
                w.cta.mbarriers.pop(address, None)
                w.cta.clocks.barrier[address // 4 : address // 4 + 2] = False

        return inval
    if op in ("arrive", "arrive_drop"):
        return _build_mbarrier_arrive(program, x)
    if op in ("expect_tx", "complete_tx"):
        where = shared_address(program, x.operands[0], parts)
        count = reader(program, x.operands[1], 4)
        sign = 1 if op == "expect_tx" else -1

        def expect(w, R, m):
            for lane in lanes_of(m):
                barrier = mbarrier_at(w, int(where(w, R)[lane]), x.line)
                if barrier:
                    _expect(w, barrier, sign * int(count(w, R)[lane]))
                    barrier.settle() if sign < 0 else None
            w.machine.progress += 1

        return expect
    return _build_mbarrier_wait(program, x)


def _expect(w, barrier, size: int) -> None:
    barrier.transactions += size
    if abs(barrier.transactions) >= 1 << 20:
        w.report("barrier", f"an mbarrier expects {barrier.transactions} bytes, the most is 2^20 - 1 (9.7.13.15.2)")


def _build_mbarrier_arrive(program, x: Instruction):
    parts = x.parts
    operands = list(x.operands)
    has_state = not isinstance(operands[0], Address)
    state = operands.pop(0) if has_state else Sink()
    where = shared_address(program, operands[0], parts)
    expect = "expect_tx" in parts
    extra = reader(program, operands[1], 4) if len(operands) > 1 else None
    drop = parts[1] == "arrive_drop"

    def arrive(w, R, m):
        states = np.zeros(LANES, U64)
        clocks, lanes, addresses = w.cta.clocks, lanes_of(m), where(w, R)
        together = (addresses[lanes] == addresses[lanes[0]]).all()
        token = clocks.token(w.index, w.lanes(m)) if together else None
        for lane in lanes:
            barrier = mbarrier_at(w, int(addresses[lane]), x.line)
            if barrier is None:
                continue
            states[lane] = barrier.phase
            arrivals = 1
            if extra is not None:
                if expect:
                    _expect(w, barrier, int(extra(w, R)[lane]))
                else:
                    arrivals = int(extra(w, R)[lane])
            error = barrier.arrive(arrivals)
            if error:
                w.report("barrier", f"arrival at mbarrier {int(where(w, R)[lane]):#x} {error}")
            if "noComplete" in parts and barrier.pending == 0:
                w.report("barrier", f"arrive.noComplete completes mbarrier {int(where(w, R)[lane]):#x}")
            mine = token if together else clocks.token(w.index, [lane])
            barrier.join(clocks.only_tensor(mine) if "relaxed" in parts else mine)
            if drop:
                barrier.expected -= arrivals
            barrier.settle()
        clocks.epoch[w.index] += 1
        w.machine.progress += 1
        if isinstance(state, Register):
            put(R, state, states, m)

    return arrive


def _wait_operands(program, x: Instruction):
    parts = x.parts
    where = shared_address(program, x.operands[1], parts)
    parity = "parity" in parts
    state = reader(program, x.operands[2], 4 if parity else 8)
    return where, state, parity


def _ready(w, R, lane: int, where, state, parity: bool, line: int):
    barrier = mbarrier_at(w, int(where(w, R)[lane]), line)
    if barrier is None:
        return None, True
    value = int(state(w, R)[lane])
    return barrier, barrier.completed(value & 1) if parity else barrier.phase > value


def gate_mbarrier(program, x: Instruction):
    """try_wait blocks until the phase completes; lanes of which some are ready go on.

    It may give up before, after a time the system chooses: the first time in mode late, by chance in mode random.
    """
    where, state, parity = _wait_operands(program, x)

    def gate(w, R, m):
        w.line = x.line
        lanes = lanes_of(m)
        addresses, values = where(w, R)[lanes], state(w, R)[lanes]
        if len(lanes) > 1 and (addresses == addresses[0]).all() and (values == values[0]).all():
            lanes = lanes[:1]
        pairs = [_ready(w, R, lane, where, state, parity, x.line) for lane in lanes]
        if any(done for _, done in pairs):
            w.tried = False
            return None
        machine = w.machine
        w.tried = not w.tried and (machine.mode == "late" or (machine.mode == "random" and machine.rng.random() < 0.3))
        if w.tried:
            return None
        value = int(state(w, R)[lanes[0]])
        barriers = [(b, int(state(w, R)[lane])) for (b, _), lane in zip(pairs, lanes)]
        return Wait(
            f"mbarrier {int(where(w, R)[lanes[0]]):#x} {'parity' if parity else 'phase'} {value}",
            lambda: any(b.completed(v & 1) if parity else b.phase > v for b, v in barriers),
        )

    return gate


def _build_mbarrier_wait(program, x: Instruction):
    where, state, parity = _wait_operands(program, x)
    target = x.operands[0]

    def wait(w, R, m):
        lanes = lanes_of(m)
        out = np.zeros(LANES, bool)
        addresses, values = where(w, R), state(w, R)
        if (addresses[lanes] == addresses[lanes[0]]).all() and (values[lanes] == values[lanes[0]]).all():
            barrier, done = _ready(w, R, lanes[0], where, state, parity, x.line)
            out[:] = done
            seen = [(barrier, w.lanes(m))] if done and barrier else []
        else:
            seen = []
            for lane in lanes:
                barrier, out[lane] = _ready(w, R, lane, where, state, parity, x.line)
                if out[lane] and barrier:
                    seen.append((barrier, [lane]))
        for barrier, who in seen:
            barrier.observed = barrier.phase
            relaxed = "relaxed" in x.parts
            w.cta.clocks.acquire(w.index, who, w.cta.clocks.only_tensor(barrier.done) if relaxed else barrier.done)
        put(R, target, out, m)

    return wait


# ---- registers (9.7.19.5) ------------------------------------------------------------------------


def gate_setmaxnreg(program, x: Instruction):
    wanted = x.operands[0].value
    if x.parts[1] != "inc":
        return gate_converge(program, x, None)

    def gate(w, R, m):
        if not converged(w, m):
            return Converge("the other lanes of its warp at setmaxnreg")
        need = (wanted - w.register_count) * LANES
        if w.cta.register_pool >= need:
            return None
        return Wait(f"{need} registers, {w.cta.register_pool} free", lambda: w.cta.register_pool >= need)

    return gate


def build_setmaxnreg(program, x: Instruction):
    wanted = x.operands[0].value
    increase = x.parts[1] == "inc"

    def setmaxnreg(w, R, m):
        if wanted % 8 or not 24 <= wanted <= 256:
            w.report("illegal", f"setmaxnreg {wanted}: expected a multiple of 8 in [24, 256]")
        if (wanted < w.register_count) if increase else (wanted > w.register_count):
            w.report("illegal", f"setmaxnreg.{x.parts[1]} to {wanted} with {w.register_count} registers")
        w.cta.execute_together(w, "setmaxnreg", x.line)
        w.cta.register_pool -= (wanted - w.register_count) * LANES
        w.register_count = wanted
        w.machine.progress += 1

    return setmaxnreg


def build_griddepcontrol(program, x: Instruction):
    if "wait" in x.parts:
        return lambda w, R, m: None
    return lambda w, R, m: w.cta.let_next_start()


def gate_griddepcontrol(program, x: Instruction):
    """wait: until the grid before, if this one overlaps it, and its memory operations are over (9.7.13.13)."""

    def gate(w, R, m):
        before = w.cta.launch.overlapped
        if before is None or before.done:
            return None
        return Wait("the grid before it", lambda: before.done)

    return gate


def build_fence(program, x: Instruction):
    """9.7.13.4. Generic fences need no state here: memory is sequentially consistent between warps."""
    parts = x.parts
    if "proxy" in parts and any(p.startswith("async") for p in parts) and "global" not in parts:
        return _fence_proxy
    return _fence_mbarrier_init if "mbarrier_init" in parts else lambda w, R, m: None


def _fence_proxy(w, R, m) -> None:
    w.cta.clocks.fence_proxy(w.index, w.lanes(m))
    _fence_mbarrier_init(w, R, m)


def _fence_mbarrier_init(w, R, m) -> None:
    for barrier in w.cta.mbarriers.values():
        if barrier.owner == w.index:
            barrier.fenced = True
