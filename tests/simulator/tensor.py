"""tcgen05: tensor memory, its loads, stores and MMAs, cta_group::1 (PTX ISA 9.1, section 9.7.16).

Order across threads (9.7.16.6.3): what a warp's tensor-memory accesses did is handed over by wait::ld/st, then
fence::before_thread_sync, then an arrival, relaxed or not; and taken by a wait for it, then fence::after_thread_sync.
`commit` implies the fence before (9.7.16.6.4.2).

Order of one thread's MMAs: the ISA promises it only to a pair with the same accumulator, shape and cta_group
(9.7.16.6.2, pipelined instructions; from 9.2 on also kind); a commit comes after all of them. `mma_order="issue"` keeps them all in order, as
published kernels assume; "isa" has a queue and an asynchronous agent for each (accumulator, shape).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from . import formats, layouts
from .accesses import write_memory
from .clocks import KNOWN
from .collectives import gate_converge
from .cta import LANES, Wait
from .formats import F32, U16, U32, U64
from .layouts import LayoutError
from .memory import ALL_LANES
from .operands import lanes_of, reader, shared_address, uniform
from .ptx import Address, Immediate, Instruction, PtxError, Sink, Vector
from .synchronisation import mbarrier_at

COLUMNS, TMEM_LANES = 512, 128
HALF, HALVES = 16, 8  # lanes that an access takes or leaves together: half a warp's quarter
POISON = 0x7FFBAD01  # a NaN


class TensorMemory:
    """Values, allocations and access shadow of a CTA's SM."""

    def __init__(self, cta):
        self.cta = cta
        self.data = np.full((TMEM_LANES, COLUMNS), POISON, U32)
        self.by_column = self.data.T
        self.written = np.zeros((HALVES, COLUMNS), bool)
        self.owner = np.zeros(COLUMNS, np.int32)  # base column + 1 of the allocation, 0 = free
        self.relinquished = False
        self.last_count = COLUMNS  # of the last allocation
        clocks = cta.clocks
        self.writer = np.full((HALVES, COLUMNS), -1, np.int16)
        self.write_epoch = np.zeros((HALVES, COLUMNS), np.int32)
        self.write_line = np.zeros((HALVES, COLUMNS), np.int32)
        self.read_epoch = np.zeros((clocks.readers, HALVES, COLUMNS), np.int32)
        self.read_line = np.zeros((clocks.readers, HALVES, COLUMNS), np.int32)

    def find(self, count: int) -> int | None:
        """First column of `count` free ones, aligned to `count`."""
        for base in range(0, COLUMNS, count):
            if not self.owner[base : base + count].any():
                return base
        return None

    def check_allocated(self, w, column: int, count: int, line: int) -> bool:
        if column + count > COLUMNS or not self.owner[column : column + count].all():
            w.report("out_of_bounds", f"tensor memory columns {column} + {count} are not allocated", line)
            return False
        return True

    def access(self, w, agent: int, epoch: int, known, halves, column: int, count: int, write: bool, line: int):
        """Checks and records an access; `agent` is the warp's own asynchronous unit."""
        if not w.machine.track:
            return
        at = halves, slice(column, column + count)
        writer = self.writer[at]
        in_order = agent in w.tensor_in_order
        own = writer == agent if in_order else np.zeros_like(writer, bool)
        bad = (writer >= 0) & ~own & (known[writer] < self.write_epoch[at])
        name = self.cta.clocks.name
        where = f"tensor memory columns {column} + {count}"
        if bad.any():
            who = int(writer[bad][0])
            w.report(
                _race(w, agent, who),
                f"{'overwrites' if write else 'reads'} {where} written by {name(who)} (line "
                f"{int(self.write_line[at][bad][0])}) without wait, fences and synchronisation between them",
                line,
            )
        if write:
            used = self.cta.clocks.warps + len(self.cta.clocks._names)
            reads = self.read_epoch[(slice(0, used), *at)]
            late = reads > known[:used, None, None]
            if in_order:
                late[agent] = False
            if late.any():
                who = int(np.argmax(late.any((1, 2))))
                w.report(
                    _race(w, agent, who),
                    f"overwrites {where} that {name(who)} may still read (line "
                    f"{int(self.read_line[(who, *at)][late[who]][0])})",
                    line,
                )
            self.writer[at], self.write_epoch[at], self.write_line[at] = agent, epoch, line
            self.written[at] = True
        else:
            if not self.written[at].all():
                w.report("uninitialised", f"reads {where}, some never written", line)
            self.read_epoch[(agent, *at)] = np.maximum(self.read_epoch[(agent, *at)], epoch)
            self.read_line[(agent, *at)] = line


def tensor_memory(cta) -> TensorMemory:
    if cta.tensor is None:
        cta.tensor = TensorMemory(cta)
    return cta.tensor


def _race(w, agent: int, other: int) -> str:
    """The check that two unordered accesses fail: two MMAs of a warp are in order but for mma_order="isa"."""
    return "mma_order" if agent in w.tensor_in_order and other in w.tensor_in_order else "race"


def _next(w, what: str, pipeline: tuple = ()) -> tuple[int, int]:
    """(agent, epoch) of the warp's next asynchronous operation of a kind; MMAs of a `pipeline` execute in order."""
    clocks = w.cta.clocks
    agent = clocks.agent((f"tcgen05.{what} of warp", w.index, *pipeline))
    clocks.counter[agent] += 1
    if what == "mma":
        w.tensor_in_order.add(agent)
    return agent, int(clocks.counter[agent])


# ---- dispatch ------------------------------------------------------------------------------------


def build(program, x: Instruction):
    action = x.parts[1]
    makers = {
        "alloc": _build_alloc,
        "dealloc": _build_dealloc,
        "relinquish_alloc_permit": lambda program, x: _relinquish,
        "ld": _build_transfer,
        "st": _build_transfer,
        "mma": _build_mma,
        "commit": _build_commit,
    }
    if action == "wait__ld":
        return lambda w, R, m: _waited(w, "ld")
    if action == "wait__st":
        return lambda w, R, m: _waited(w, "st")
    if action == "fence__before_thread_sync":
        return lambda w, R, m: w.cta.clocks.tensor_release(w.index, w.lanes(m))
    if action == "fence__after_thread_sync":
        return lambda w, R, m: w.cta.clocks.tensor_acquire(w.index, w.lanes(m))
    return makers[action](program, x)


def gate(program, x: Instruction):
    action = x.parts[1]
    if action in ("mma", "commit") or action.startswith("fence"):
        return None
    converge = gate_converge(program, x, None)
    if action.startswith("wait__"):
        kind = action[6:]

        def wait_gate(w, R, m):
            wait = converge(w, R, m)
            if wait is not None:
                return wait
            if all(op.done for op in w.tensor_ops[kind]):
                return None
            return Wait(f"its tcgen05.{kind}", lambda: all(op.done for op in w.tensor_ops[kind]))

        return wait_gate
    if action == "alloc":
        count = reader(program, x.operands[1], 4)

        def alloc_gate(w, R, m):
            wait = converge(w, R, m)
            if wait is not None:
                return wait
            n = int(count(w, R)[0])
            if n < 32 or n > COLUMNS or n & (n - 1):
                return None
            memory = tensor_memory(w.cta)
            if memory.find(n) is not None:
                return None
            return Wait(f"{n} columns of tensor memory", lambda: memory.find(n) is not None)

        return alloc_gate
    return converge


# ---- allocation (9.7.16.7.1) ---------------------------------------------------------------------


def _build_alloc(program, x: Instruction):
    where = shared_address(program, x.operands[0], x.parts)
    count = reader(program, x.operands[1], 4)

    def alloc(w, R, m):
        n = uniform(w, count(w, R), m, "the number of columns of tcgen05.alloc (9.7.16.7.1)")
        target = uniform(w, where(w, R), m, "the address of tcgen05.alloc (9.7.16.7.1)")
        memory = tensor_memory(w.cta)
        if n < 32 or n > COLUMNS or n & (n - 1):
            w.report("illegal", f"tcgen05.alloc of {n} columns: expected a power of two in [32, 512]")
            return
        if memory.relinquished:
            w.report("illegal", "tcgen05.alloc after relinquish_alloc_permit")
        if n > memory.last_count:
            w.report("illegal", f"tcgen05.alloc of {n} columns after one of {memory.last_count}: may not increase")
        memory.last_count = n
        base = memory.find(n)
        memory.owner[base : base + n] = base + 1
        write_memory(w, "shared", np.array([target], U64), [np.array([base], U32)], 4, ALL_LANES[:1])

    return alloc


def _build_dealloc(program, x: Instruction):
    address, count = reader(program, x.operands[0], 4), reader(program, x.operands[1], 4)

    def dealloc(w, R, m):
        base = uniform(w, address(w, R), m, "the address of tcgen05.dealloc (9.7.16.7.1)") & 0xFFFF
        n = uniform(w, count(w, R), m, "the number of columns of tcgen05.dealloc (9.7.16.7.1)")
        memory = tensor_memory(w.cta)
        if base + n > COLUMNS or not (memory.owner[base : base + n] == base + 1).all():
            w.report("illegal", f"tcgen05.dealloc of columns {base} + {n}, which are not one allocation")
            return
        for op in w.cta.in_flight:
            if not op.done and op.text.startswith("tcgen05"):
                w.report("race", f"tcgen05.dealloc while {op.text} of warp {op.warp} (line {op.line}) is in flight")
        agent, epoch = _next(w, "dealloc")
        known = w.cta.clocks.known(w.index, None)[KNOWN]
        memory.access(w, agent, epoch, known, slice(0, HALVES), base, n, True, w.line)
        memory.owner[base : base + n] = 0
        memory.data[:, base : base + n] = POISON
        memory.written[:, base : base + n] = False
        memory.writer[:, base : base + n] = -1
        memory.read_epoch[:, :, base : base + n] = 0
        w.machine.progress += 1

    return dealloc


def _relinquish(w, R, m) -> None:
    tensor_memory(w.cta).relinquished = True


# ---- loads and stores (9.7.16.8) -----------------------------------------------------------------


@dataclass(frozen=True)
class Fragment:
    """What the registers of a warp's ld or st hold: register i of thread t is [lanes[i, t], columns[i, t]]."""

    registers: int
    halves: int  # of 16 lanes
    spans: tuple[tuple[int, int], ...]  # (first column, columns)
    columns: np.ndarray | None = None  # None: 32x32b, register i of thread t is [t, i]
    lanes: np.ndarray | None = None

    def at(self, lane: int, column: int) -> tuple:
        """Index into `TensorMemory.by_column`, for an array [registers, 32]."""
        if self.columns is None:
            return slice(column, column + self.registers), slice(lane, lane + LANES)
        return column + self.columns, lane + self.lanes


@lru_cache(maxsize=256)
def fragment(shape: str, number: int, split: int = 0) -> Fragment:
    """The figures of 9.7.16.2.3.1, matrix fragments; `split` is the column offset of the second half of 16x32bx2.

    Raises:
        LayoutError: a shape or .num the ISA does not have.
    """
    most = {"32x32b": 128, "16x64b": 128, "16x128b": 64, "16x256b": 32, "16x32bx2": 128}.get(shape, 0)
    if number < 1 or number > most or number & (number - 1):
        raise LayoutError(f"tensor memory access {shape}.x{number}")
    if shape == "32x32b":
        return Fragment(number, 2, ((0, number),))
    t = np.arange(LANES)
    if shape == "16x32bx2":
        columns = np.arange(number)[:, None] + t // 16 * split
        return Fragment(number, 1, ((0, number), (split, number)), columns, 0 * columns + t % 16)
    wide = int(shape[3:-1]) // 32  # columns of one repetition
    count = number * wide // 2
    i = np.arange(count)[:, None]
    if shape == "16x64b":
        columns, lanes = 2 * i + t // 2 % 2, t // 4 + 8 * (t % 2) + 0 * i
    elif shape == "16x128b":
        columns, lanes = 4 * (i // 2) + t % 4, t // 4 + 8 * (i % 2)
    else:
        columns, lanes = 8 * (i // 4) + 2 * (t % 4) + i % 2, t // 4 + 8 * (i // 2 % 2)
    return Fragment(count, 1, ((0, number * wide),), columns, lanes)


def _place(w, address: int, part: Fragment, line: int) -> tuple[int, int] | None:
    """(lane, column) of an access: warp i of a warpgroup reaches lanes 32i .. 32i+31 (9.7.16.8.1)."""
    lane, column = address >> 16, address & 0xFFFF
    first = 32 * (w.index % 4)
    if lane not in range(first, first + 32, HALF * part.halves):
        w.report("illegal", f"warp {w.index} accesses tensor memory lane {lane}, its quarter starts at {first}", line)
        return None
    memory = tensor_memory(w.cta)
    allocated = all(memory.check_allocated(w, column + begin, count, line) for begin, count in part.spans)
    return (lane, column) if allocated else None


def _build_transfer(program, x: Instruction):
    """tcgen05.ld and tcgen05.st."""
    kind, operands = x.parts[1], list(x.operands)
    shape = next((p for p in x.parts if p.startswith(("16x", "32x"))), "")
    number = next((int(p[1:]) for p in x.parts if p.startswith("x") and p[1:].isdigit()), 0)
    split = operands.pop(2 if kind == "ld" else 1).value if shape == "16x32bx2" else 0
    vector, place_operand = operands if kind == "ld" else reversed(operands)
    items = vector.items if isinstance(vector, Vector) else (vector,)
    try:
        part = fragment(shape, number, split)
    except LayoutError as error:
        raise PtxError(str(error)) from error
    if len(items) != part.registers:
        raise PtxError(f"{len(items)} registers, {part.registers} for {shape}.x{number}")
    address, offset = reader(program, place_operand.base, 4), place_operand.offset
    sources = [reader(program, v, 4) for v in items] if kind == "st" else None
    bit, section = program.load_bits.get(id(x), 0), "9.7.16.8.3" if kind == "ld" else "9.7.16.8.4"
    same_registers = 0  # bits of the loads into them
    for r in items if kind == "ld" else ():
        same_registers |= 0 if isinstance(r, Sink) else program.load_registers[r.index]

    def transfer(w, R, m):
        if not w.alive.all():
            w.report("illegal", f"tcgen05.{kind} in a warp with exited lanes ({section})", x.line)
        at = uniform(w, address(w, R), m, f"the address of tcgen05.{kind} ({section})")
        place = _place(w, at + offset, part, x.line)
        if place is None:
            return
        lane, column = place
        memory = tensor_memory(w.cta)
        agent, epoch = _next(w, kind)
        known, half = w.cta.clocks.known(w.index, None)[KNOWN], lane // HALF
        for begin, count in part.spans:
            halves = slice(half, half + part.halves)
            memory.access(w, agent, epoch, known, halves, column + begin, count, kind == "st", x.line)
        at = part.at(lane, column)
        if kind == "st":
            values = np.stack([s(w, R) for s in sources])

            def act():
                memory.by_column[at] = values
        else:
            block = np.full((part.registers, LANES), POISON, U32)
            for i, register in enumerate(items):
                if not isinstance(register, Sink):
                    R[register.index] = block[i]

            def act():
                block[:] = memory.by_column[at]

        op = w.issue((f"tcgen05.{kind}", w), f"tcgen05.{kind}", x.line, [act])
        op.agent, op.epoch = agent, epoch
        w.tensor_ops[kind].append(op)
        if kind == "ld":
            if w.loading & same_registers:
                w.report("race", "tcgen05.ld into the registers of an earlier one without tcgen05.wait::ld")
            op.bit = bit
            w.loading |= bit

    return transfer


def _waited(w, kind: str) -> None:
    known = w.cta.clocks.waited[w.index]
    for op in w.tensor_ops[kind]:
        known[op.agent] = max(known[op.agent], op.epoch)
    w.tensor_ops[kind].clear()
    if kind == "ld":
        w.loading = 0


# ---- MMA (9.7.16.10) -----------------------------------------------------------------------------


# What an MMA of kind::f16 that is neither sparse nor .ws leaves 0: (first bit, bits, field).
_ZERO_FIELDS = (
    (0, 2, "the sparsity selector"), (2, 1, "sparsity"), (3, 1, "saturation"), (6, 1, "reserved bit 6"),
    (23, 1, "reserved bit 23"), (29, 1, "reserved bit 29"), (30, 2, "the maximum shift of .ws"),
)  # fmt: skip


def decode_instruction(descriptor: int, a_tensor: bool) -> tuple[int, int, str, str, bool, bool, bool]:
    """(M, N, A kind, B kind, A transposed, B transposed, negated) of a kind::f16 descriptor (9.7.16.4.2).

    Args:
        a_tensor: A is in tensor memory.

    Raises:
        LayoutError: a field that must be 0, an F16 accumulator, an operand format or shape there is not.
    """
    layouts.check_zero("instruction descriptor", descriptor, "9.7.16.4.2", _ZERO_FIELDS)
    if descriptor >> 4 & 3 != 1:
        raise LayoutError(f"instruction descriptor {descriptor:#x}: only F32 accumulators are modelled")
    kinds = {0: "f16", 1: "bf16"}
    a, b = descriptor >> 7 & 7, descriptor >> 10 & 7
    if a not in kinds or b not in kinds:
        raise LayoutError(f"instruction descriptor {descriptor:#x}: operand formats {a} and {b} (9.7.16.4.2)")
    n, m = (descriptor >> 17 & 0x3F) << 3, (descriptor >> 24 & 0x1F) << 4
    if m not in (64, 128):
        raise LayoutError(f"instruction descriptor {descriptor:#x}: M = {m}, expected 64 or 128")
    step = m // 8  # for M = 128 the ISA's table has steps of 8 too, CUTLASS asks for 16
    if n % step or not step <= n <= 256:
        raise LayoutError(f"instruction descriptor {descriptor:#x}: N = {n} is not a multiple of {step} up to 256")
    if a_tensor and descriptor >> 15 & 1:
        raise LayoutError(
            f"instruction descriptor {descriptor:#x}: transpose A (bit 15, 9.7.16.4.2) is set, but A in tensor memory "
            "is K-major"
        )
    negated = bool(descriptor >> 13 & 1) != bool(descriptor >> 14 & 1)
    return m, n, kinds[a], kinds[b], bool(descriptor >> 15 & 1), bool(descriptor >> 16 & 1), negated


_OPERANDS: dict[tuple, tuple] = {}


def _operand(w, descriptor: int, mn: int, mn_major: bool):
    """(16-bit element numbers [mn, 16], granules) of a shared-memory operand."""
    key = descriptor, mn, mn_major
    found = _OPERANDS.get(key)
    if found is None:
        start, leading, stride, width = layouts.tcgen05_descriptor(descriptor)
        address = layouts.operand_offsets(start, leading, stride, width, mn, 16, mn_major)
        found = _OPERANDS[key] = address // 2, np.unique(address >> 2), int(address.max()) + 2
    if found[2] > w.cta.shared.size:
        raise LayoutError(f"tcgen05 descriptor {descriptor:#x} reaches shared byte {found[2]:#x}, past the allocation")
    return found[0], found[1]


def _build_mma(program, x: Instruction):
    ops = list(x.operands)
    d_address = reader(program, ops[0].base, 4)
    d_offset = ops[0].offset
    a_tensor = isinstance(ops[1], Address)
    a_source = reader(program, ops[1].base if a_tensor else ops[1], 4 if a_tensor else 8)
    a_offset = ops[1].offset if a_tensor else 0
    b_source, i_source = reader(program, ops[2], 8), reader(program, ops[3], 4)
    rest = ops[4:]
    disabled = [reader(program, v, 4) for v in rest.pop(0).items] if isinstance(rest[0], Vector) else None
    if disabled is not None and len(disabled) != TMEM_LANES // 32:
        raise PtxError(f"{len(disabled)} registers of disable-output-lane, 4 for cta_group::1 (9.7.16.10.9.1)")
    accumulate = reader(program, rest.pop(0), 0)
    if rest and not (isinstance(rest[0], Immediate) and rest[0].value == 0):
        raise PtxError("scale-input-d is not modelled")

    def mma(w, R, m):
        lane = int(lanes_of(m)[0])
        if m is None or m.sum() != 1:
            w.report("illegal", "tcgen05.mma executed by more than one thread")
        memory, clocks = tensor_memory(w.cta), w.cta.clocks
        try:
            rows, n, kind_a, kind_b, a_mn, b_mn, negated = decode_instruction(int(i_source(w, R)[lane]), a_tensor)
            b_offsets, granules = _operand(w, int(b_source(w, R)[lane]), n, b_mn)
            if not a_tensor:
                a_offsets, a_granules = _operand(w, int(a_source(w, R)[lane]), rows, a_mn)
                granules = np.concatenate([a_granules, granules])
        except LayoutError as error:
            w.report("descriptor", str(error), x.line)
            return
        d = (int(d_address(w, R)[lane]) + d_offset) & 0xFFFFFFFF
        first, column = d >> 16, d & 0xFFFF
        if first not in ((0,) if rows == 128 else (0, HALF)):
            w.report("illegal", f"tcgen05.mma with M = {rows}: accumulator at lane {first}", x.line)
            return
        if not memory.check_allocated(w, column, n, x.line):
            return
        # M = 64 takes half of every quarter's lanes (9.7.16.10.5, layouts D and F).
        halves = slice(0, HALVES) if rows == 128 else slice(first // HALF, HALVES, 2)
        adds = bool(accumulate(w, R)[lane])
        agent, epoch = _next(w, "mma", (rows, n, d) if w.machine.mma_order == "isa" else ())
        table = clocks.known(w.index, [lane])
        known = table[KNOWN]
        if a_tensor:
            a_place = (int(a_source(w, R)[lane]) + a_offset) & 0xFFFFFFFF
            a_column = a_place & 0xFFFF
            if a_place >> 16 != first:
                w.report("illegal", f"tcgen05.mma: A at lane {a_place >> 16}, the accumulator at lane {first}", x.line)
            if not memory.check_allocated(w, a_column, 8, x.line):
                return
            memory.access(w, agent, epoch, known, halves, a_column, 8, False, x.line)
        if adds:
            memory.access(w, agent, epoch, known, halves, column, n, False, x.line)
        memory.access(w, agent, epoch, known, halves, column, n, True, x.line)
        if w.machine.track:
            found = clocks.async_read(table, agent, epoch, granules, x.line)
            if found:
                w.report(found[0], f"tcgen05.mma: {found[1]}", x.line)
        off = None
        if disabled is not None:
            words = np.array([int(v(w, R)[lane]) for v in disabled], U32)
            off = np.unpackbits(words.view(np.uint8), bitorder="little").astype(bool)
            off = off.reshape(HALVES, HALF)[halves].reshape(rows, 1)
        wide = {"bf16": formats.bf16_to_f32, "f16": formats.f16_to_f32}

        def act():
            shared = w.cta.shared
            view = shared.views[2]
            if not (shared.shadows[4][granules] == 0x01010101).all():
                w.report("uninitialised", "tcgen05.mma reads never-written shared memory", x.line)
            b = wide[kind_b](view[b_offsets].ravel()).reshape(b_offsets.shape)
            lanes = memory.data if rows == 128 else memory.data.reshape(HALVES, HALF, COLUMNS)[halves]
            if a_tensor:
                packed = np.ascontiguousarray(lanes[..., a_column : a_column + 8]).view(U16)
                a = wide[kind_a](packed.ravel()).reshape(rows, 16)
            else:
                a = wide[kind_a](view[a_offsets].ravel()).reshape(a_offsets.shape)
            product = a.astype(np.float64) @ b.astype(np.float64).T
            target = lanes[..., column : column + n]
            if negated:
                product = -product
            if adds:
                product += np.ascontiguousarray(target).view(F32).reshape(rows, n)
            result = product.astype(F32).view(U32)
            if off is not None:
                result = np.where(off, np.ascontiguousarray(target).reshape(rows, n), result)
            target[:] = result.reshape(target.shape)

        op = w.issue(("tcgen05.mma", w, agent), "tcgen05.mma", x.line, [act])
        op.agent, op.epoch = agent, epoch
        op.known = known
        w.tensor_last[agent] = op

    return mma


def _build_commit(program, x: Instruction):
    """Arrives when the thread's earlier MMAs have completed; implies fence::before_thread_sync (9.7.16.12.1, 9.7.16.6.4.2)."""
    where = shared_address(program, x.operands[0], ["", "shared"])

    def commit(w, R, m):
        lane = int(lanes_of(m)[0])
        if m is None or m.sum() != 1:
            w.report("illegal", "tcgen05.commit executed by more than one thread")
        address = int(where(w, R)[lane])
        barrier = mbarrier_at(w, address, x.line)
        if barrier is None:
            return
        if not barrier.fenced:
            w.report(
                "proxy_fence", f"tcgen05.commit to the mbarrier at {address:#x}, initialised without a fence", x.line
            )
        clocks = w.cta.clocks
        token = clocks.token(w.index, [lane])
        earlier = list(w.tensor_last.values())
        for op in earlier:
            np.maximum(token[2], op.known, out=token[2])  # what the MMA was ordered after came before it
            for part in (token[0], token[2]):
                part[op.agent] = max(part[op.agent], op.epoch)

        def act():
            for op in earlier:
                w.machine.engine.finish(("tcgen05.mma", w, op.agent), op)
            error = barrier.arrive(1)
            if error:
                w.report("barrier", f"tcgen05.commit arrives at mbarrier {address:#x} {error}", x.line)
            barrier.join(token)
            barrier.settle()
            w.machine.progress += 1

        w.issue(("tcgen05.commit", w), "tcgen05.commit", x.line, [act])

    return commit
