"""Asynchronous instructions: bulk and tensor copies, wgmma. Issue makes an `AsyncOp`; the engine decides when it acts.

Sections are those of the PTX ISA 9.1.
"""

from __future__ import annotations

import numpy as np

from . import formats, layouts, tensor
from .clocks import NOW
from .collectives import gate_converge
from .cta import LANES, Wait
from .formats import F32, U16, U32, U64
from .layouts import LayoutError
from .memory import MemoryFault
from .operands import address_reader, lanes_of, reader, shared_address, uniform
from .ptx import Instruction, PtxError, TensorAddress, Vector
from .synchronisation import mbarrier_at

OPCODES = ("cp", "wgmma", "tcgen05")
ACCUMULATOR_POISON = 0x7FFBAD00  # a NaN


def build(program, x: Instruction):
    op = x.parts[0]
    if op == "wgmma":
        return _build_wgmma(program, x)
    if op == "tcgen05":
        return tensor.build(program, x)
    if "commit_group" in x.parts:
        return _bulk_commit
    if "wait_group" in x.parts:
        return lambda w, R, m: _wait_done(w, m, x)
    return _build_bulk(program, x)


def gate(program, x: Instruction):
    parts = x.parts
    if parts[0] == "tcgen05":
        return tensor.gate(program, x)
    if parts[0] == "wgmma":
        if "wait_group" in parts:
            return _gate_wgmma_wait(program, x)
        return gate_converge(program, x, None)
    if "wait_group" in parts:
        return _gate_bulk_wait(program, x)
    return None


def _report_layout(w, error: LayoutError, line: int) -> None:
    w.report("descriptor", str(error), line)


# ---- mbarrier completion -------------------------------------------------------------------------


class Completion:
    """Complete-tx on an mbarrier, carrying what the operation did to later waiters."""

    def __init__(self, w, address: int, line: int, size: int):
        self.barrier = mbarrier_at(w, address, line)
        if self.barrier is not None and not self.barrier.fenced:
            w.report(
                "proxy_fence",
                f"the mbarrier at {address:#x} completes asynchronous work, but no fence.mbarrier_init or "
                "fence.proxy.async follows its mbarrier.init",
                line,
            )
        self.cta, self.size = w.cta, size
        self.agent = w.cta.clocks.agent(("mbarrier", address))
        w.cta.clocks.counter[self.agent] += 1
        self.epoch = int(w.cta.clocks.counter[self.agent])

    def complete(self, known) -> None:
        token = known.copy()
        token[NOW, self.agent] = max(token[NOW, self.agent], self.epoch)
        self.barrier.join(token)
        self.barrier.transactions -= self.size
        self.barrier.settle()
        self.cta.machine.progress += 1


# ---- bulk and tensor copies (9.7.9.25, 9.7.9.27) -------------------------------------------------


def _build_bulk(program, x: Instruction):
    parts = x.parts
    reduce = parts[1] == "reduce"
    if "prefetch" in parts:
        return lambda w, R, m: None
    is_tensor = "tensor" in parts
    spaces = [p.split("__")[0] for p in parts if p.split("__")[0] in ("shared", "global")]
    to_shared = spaces[0] == "shared"
    operands = list(x.operands)
    if to_shared:
        target = shared_address(program, operands[0], ["", "shared"])
        barrier = shared_address(program, operands[2 if is_tensor else 3], ["", "shared"])
    kind = parts[-1]
    if is_tensor:
        where = next(o for o in operands if isinstance(o, TensorAddress))
        map_address = reader(program, where.map, 8)
        coordinates = [reader(program, c, 4) for c in where.coordinates]
        if f"{len(coordinates)}d" not in parts:
            raise PtxError(f"{x.opcode} with {len(coordinates)} coordinates")
        shared_side = None if to_shared else shared_address(program, operands[1], ["", "shared"])

        def tensor_copy(w, R, m):
            for lane in lanes_of(m):
                at = tuple(int(c(w, R)[lane].view(np.int32)) for c in coordinates)
                try:
                    tensor_map = _load_map(w, int(map_address(w, R)[lane]), x)
                    if to_shared:
                        _tensor_load(w, x, lane, tensor_map, at, int(target(w, R)[lane]), int(barrier(w, R)[lane]))
                    else:
                        how = tensor_map.kind if reduce else None
                        _tensor_store(w, x, lane, tensor_map, at, int(shared_side(w, R)[lane]), how)
                except LayoutError as error:
                    _report_layout(w, error, x.line)

        return tensor_copy
    size_of = reader(program, operands[2], 4)
    if to_shared:
        source = address_reader(program, operands[1])

        def bulk_load(w, R, m):
            for lane in lanes_of(m):
                _bulk_load(
                    w, x, lane, int(target(w, R)[lane]), int(source(w, R)[lane]), int(size_of(w, R)[lane]),
                    int(barrier(w, R)[lane]),
                )  # fmt: skip

        return bulk_load
    target_global = address_reader(program, operands[0])
    source_shared = shared_address(program, operands[1], ["", "shared"])

    def bulk_store(w, R, m):
        for lane in lanes_of(m):
            _bulk_store(
                w, x, lane, int(target_global(w, R)[lane]), int(source_shared(w, R)[lane]),
                int(size_of(w, R)[lane]), kind if reduce else None,
            )  # fmt: skip

    return bulk_store


def _load_map(w, address: int, x: Instruction) -> layouts.TensorMap:
    """The map (9.7.9.27.1.2) is read from global or parameter memory; the driver API aligns it to 64 bytes."""
    if address % 64:
        w.report("misaligned", f"tensor map at {address:#x}, not a multiple of 64", x.line)
    region, offset = w.machine.memory.bytes_at(address, 128)
    return layouts.decode_tensor_map(region.data[offset : offset + 128].tobytes())


def _granules(begin: int, size: int) -> np.ndarray:
    return np.arange(begin >> 2, (begin + size + 3) >> 2)


def _check_shared(w, address: int, size: int, align: int, line: int) -> None:
    if address % align:
        w.report("misaligned", f"shared address {address:#x} is not a multiple of {align}", line)
    if address + size > w.cta.shared.size:
        raise MemoryFault("out_of_bounds", f"asynchronous access of shared {address:#x} + {size} bytes")


def _check_written(w, line: int, region, offsets, chunk: int, element: int) -> None:
    """Reports a read of never-written bytes in the `chunk` bytes at each offset; `element` bytes are judged together."""
    if region.all_initialised:
        return
    index = (np.reshape(offsets, (-1, 1)) // element + np.arange(chunk // element)).ravel()
    missing = region.never_written(index, element)
    if missing.any():
        at = int(index[missing.argmax()]) * element + region.base
        w.report("uninitialised", f"read of never-written memory at {at:#x} ({region.name})", line)


def _guarded(w, line: int, stage):
    """Runs a stage later, with faults reported where the operation was issued."""

    def run():
        try:
            stage()
        except MemoryFault as fault:
            w.report(fault.check, str(fault), line)

    return run


def _load(w, x, lane: int, text: str, target: int, size: int, barrier: int, fill) -> None:
    """A copy to shared memory that completes on an mbarrier: `fill` moves the bytes, later."""
    completion = Completion(w, barrier, x.line, size)
    if completion.barrier is None:
        return
    clocks = w.cta.clocks
    known = clocks.token(w.index, [lane])
    if w.machine.track:
        granules = _granules(target, size)
        found = clocks.async_write(known, completion.agent, completion.epoch, granules, x.line)
        if found:
            w.report(found[0], f"asynchronous copy: {found[1]}", x.line)

    def act():
        fill()
        w.cta.shared.mark(target, target + size)
        completion.complete(known)

    w.issue(None, text, x.line, [_guarded(w, x.line, act)])


def _tensor_load(w, x, lane: int, tensor_map, at, target: int, barrier: int) -> None:
    _check_shared(w, target, tensor_map.box_bytes, 128, x.line)
    address, inside, shared, chunk = layouts.box_addresses(tensor_map, at, target)

    def fill():
        values = np.zeros((len(address), chunk), np.uint8)
        if inside.any():
            wanted = address[inside]
            source = w.machine.memory.find(int(wanted.min()), int(wanted.max()) + chunk - int(wanted.min()))
            offsets = wanted - source.base
            if chunk == 16 and source.base % 16 == 0:
                view = source.data[: source.size // 16 * 16].reshape(-1, 16)
                values[inside] = view[offsets // 16]
                _check_written(w, x.line, source, offsets, 16, 4)
            else:
                index = offsets[:, None] + np.arange(chunk)
                values[inside] = source.data[index]
                _check_written(w, x.line, source, offsets, chunk, 1)
        data = w.cta.shared.data
        if chunk == 16:
            data[: data.nbytes // 16 * 16].reshape(-1, 16)[shared // 16] = values
        else:
            data[shared[:, None] + np.arange(chunk)] = values

    _load(w, x, lane, "a tensor copy to shared memory", target, tensor_map.box_bytes, barrier, fill)


def _bulk_load(w, x, lane: int, target: int, source: int, size: int, barrier: int) -> None:
    if size % 16 or source % 16:
        w.report("misaligned", f"bulk copy of {size} bytes from {source:#x}: multiples of 16 are needed", x.line)
    _check_shared(w, target, size, 16, x.line)

    def fill():
        region, offset = w.machine.memory.bytes_at(source, size)
        _check_written(w, x.line, region, offset, size, 4)
        w.cta.shared.data[target : target + size] = region.data[offset : offset + size]

    _load(w, x, lane, "a bulk copy to shared memory", target, size, barrier, fill)


def _read_shared(w, lanes, granules: np.ndarray, agent_key, line: int, what: str) -> tuple[int, int]:
    """Checks an asynchronous read of some lanes, None for all, and records it; (agent, epoch)."""
    clocks = w.cta.clocks
    agent = clocks.agent(agent_key)
    clocks.counter[agent] += 1
    epoch = int(clocks.counter[agent])
    if w.machine.track:
        found = clocks.async_read(clocks.token(w.index, lanes), agent, epoch, granules, line)
        if found:
            w.report(found[0], f"{what}: {found[1]}", line)
    return agent, epoch


def _take_shared(w, begin: int, size: int, line: int, what: str) -> np.ndarray:
    region = w.cta.shared
    if not region.shadow[begin : begin + size].all():
        w.report("uninitialised", f"{what} reads never-written shared memory in {begin:#x} + {size} bytes", line)
    return region.data[begin : begin + size].copy()


def _store(w, x, lane: int, source: int, size: int, text: str, read, write) -> None:
    """A copy or reduction of a bulk group: `read` takes from shared memory, `write` goes to global memory, both later."""
    agent, epoch = _read_shared(
        w, [lane], _granules(source, size), ("bulk of warp and lane", w.index, lane), x.line, text
    )
    op = w.issue(None, text, x.line, [_guarded(w, x.line, read), _guarded(w, x.line, write)])
    op.agent, op.epoch = agent, epoch
    w.bulk_open.setdefault(lane, []).append(op)


def _bulk_store(w, x, lane: int, target: int, source: int, size: int, kind: str | None) -> None:
    if size % 16 or target % 16:
        w.report("misaligned", f"bulk copy of {size} bytes to {target:#x}: multiples of 16 are needed", x.line)
    _check_shared(w, source, size, 16, x.line)
    text = "a bulk reduction from shared memory" if kind else "a bulk copy from shared memory"
    held = {}

    def read():
        held["data"] = _take_shared(w, source, size, x.line, text)

    def write():
        region, offset = w.machine.memory.bytes_at(target, size)
        if region.read_only:
            raise MemoryFault("out_of_bounds", f"bulk store to read-only {region.name}")
        if kind is None:
            region.data[offset : offset + size] = held["data"]
        else:
            _check_written(w, x.line, region, offset, size, 4)
            _add_bytes(region.data[offset : offset + size], held["data"], kind)
        region.mark(offset, offset + size)
        w.machine.progress += 1

    _store(w, x, lane, source, size, text, read, write)


def _add_bytes(target: np.ndarray, data: np.ndarray, kind: str) -> None:
    """target += data, element by element (9.7.9.25.4.2)."""
    if kind == "f32":
        target.view(F32)[:] = target.view(F32) + data.view(F32)
    elif kind in ("bf16", "f16"):
        target.view(U16)[:] = formats.add16(target.view(U16), data.view(U16), kind)
    elif kind in ("u32", "s32"):
        target.view(U32)[:] += data.view(U32)
    elif kind in ("u64", "s64"):
        target.view(U64)[:] += data.view(U64)
    else:
        raise PtxError(f"bulk reduction of {kind} is not modelled")


def _tensor_store(w, x, lane: int, tensor_map, at, source: int, kind: str | None) -> None:
    size = tensor_map.box_bytes
    _check_shared(w, source, size, 128, x.line)
    address, inside, shared, chunk = layouts.box_addresses(tensor_map, at, source)
    text = "a tensor reduction from shared memory" if kind else "a tensor store from shared memory"
    held = {}

    def read():
        _take_shared(w, source, size, x.line, text)
        held["data"] = w.cta.shared.data[shared[:, None] + np.arange(chunk)]

    def write():
        wanted = address[inside]
        if len(wanted) == 0:
            return
        region = w.machine.memory.find(int(wanted.min()), int(wanted.max()) + chunk - int(wanted.min()))
        if region.read_only:
            raise MemoryFault("out_of_bounds", f"tensor store to read-only {region.name}")
        index = (wanted - region.base)[:, None] + np.arange(chunk)
        values = held["data"][inside]
        if kind is not None:
            _check_written(w, x.line, region, wanted - region.base, chunk, 1)
            old = np.ascontiguousarray(region.data[index])
            _add_bytes(old.reshape(-1), np.ascontiguousarray(values).reshape(-1), kind)
            values = old
        region.data[index] = values
        if not region.all_initialised:
            region.shadow[index] = 1
        w.machine.progress += 1

    _store(w, x, lane, source, size, text, read, write)


def _bulk_commit(w, R, m) -> None:
    """cp.async.bulk.commit_group: a group of each executing thread (9.7.9.27.2.1)."""
    for lane in lanes_of(m):
        lane = int(lane)
        w.bulk_groups.setdefault(lane, []).append(w.bulk_open.pop(lane, []))


def _gate_bulk_wait(program, x: Instruction):
    pending = x.operands[0].value
    stages = 1 if "read" in x.parts else 2

    def outstanding(w, lanes):
        for lane in lanes:
            groups = w.bulk_groups.get(int(lane), [])
            for group in groups[: max(0, len(groups) - pending)]:
                for op in group:
                    if op.finished < stages:
                        return True
        return False

    def gate(w, R, m):
        lanes = lanes_of(m)
        if not outstanding(w, lanes):
            return None
        return Wait(f"bulk groups, {pending} may be pending", lambda: not outstanding(w, lanes))

    return gate


def _wait_done(w, m, x: Instruction) -> None:
    """A lane has seen its groups' reads: their epochs are known to it (9.7.9.27.2.2)."""
    pending = x.operands[0].value
    clocks = w.cta.clocks
    for lane in lanes_of(m):
        groups = w.bulk_groups.get(int(lane), [])
        done = groups[: max(0, len(groups) - pending)]
        for group in done:
            for op in group:
                clocks.learn(w.index, [lane], NOW, op.agent, op.epoch)
        if all(op.done for g in done for op in g):
            w.bulk_groups[int(lane)] = groups[len(done) :]


# ---- wgmma (9.7.15) ------------------------------------------------------------------------------


def _build_wgmma(program, x: Instruction):
    parts = x.parts
    if parts[1] == "fence":
        return _wgmma_fence
    if parts[1] == "commit_group":
        return _wgmma_commit
    if parts[1] == "wait_group":
        return lambda w, R, m: _wgmma_waited(w, x.operands[0].value)
    shape = next(p for p in parts if p.startswith("m64n"))
    n = int(shape[4:].split("k")[0])
    kinds = parts[-3:]
    wide = formats.bf16_to_f32 if kinds[1] == "bf16" else formats.f16_to_f32
    d = [r.index for r in x.operands[0].items]
    if n % 8 or not 8 <= n <= 256 or len(d) != n // 2:
        raise PtxError(f"{len(d)} accumulators for n = {n}, expected n / 2 for a multiple of 8 up to 256 (9.7.15.2)")
    a_registers = isinstance(x.operands[1], Vector)
    a_indices = [r.index for r in x.operands[1].items] if a_registers else None
    a_descriptor = None if a_registers else reader(program, x.operands[1], 8)
    b_descriptor = reader(program, x.operands[2], 8)
    scale_d = reader(program, x.operands[3], 0)
    rest = [o.value for o in x.operands[4:]]
    scales, transposes = rest[:2], rest[2:]
    if len(transposes) != (1 if a_registers else 2) or {*scales} - {1, -1} or {*transposes} - {0, 1}:
        raise PtxError(
            f"{x.opcode} with scales {scales} and transpositions {transposes}, expected 1 or -1 of A and B; 0 or 1 of "
            "matrices in shared memory (9.7.15.5.2)"
        )
    negate_a, negate_b = scales
    transposed_a, transposed_b = bool(transposes[0]) and not a_registers, bool(transposes[-1])
    rows, columns = layouts.wgmma_accumulator(n)
    a_rows, a_columns = layouts.wgmma_a_fragment()
    registers = sum(program.wgmma_registers[i] for i in {*d, *(a_indices or [])})

    def mma(w, R, m):
        if m is not None:
            w.report("illegal", "wgmma in a diverged warp")
        accumulate = bool(uniform(w, scale_d(w, R), m, "scale-d of wgmma"))
        _check_fenced(w, R, (a_indices or []) + (d if accumulate else []), d, registers)
        b_at = uniform(w, b_descriptor(w, R), m, "descriptor B of wgmma")
        a_at = None if a_registers else uniform(w, a_descriptor(w, R), m, "descriptor A of wgmma")
        w.cta.execute_together(w, "wgmma", (x.line, a_at, b_at, accumulate))
        try:
            b_offsets, b_granules = _operand(b_at, n, 16, transposed_b, None, w)
            if a_registers:
                a_offsets = None
                fragment = [R[i] for i in a_indices]
                granules = b_granules
            else:
                a_offsets, a_granules = _operand(a_at, 64, 16, transposed_a, w.index % 4, w)
                granules = np.concatenate([a_granules, b_granules])
        except LayoutError as error:
            _report_layout(w, error, x.line)
            return
        agent, epoch = _read_shared(w, None, granules, ("wgmma of warp", w.index), x.line, "wgmma")
        old = _accumulator(w, R, d) if accumulate else None
        block = np.full((n // 2, LANES), ACCUMULATOR_POISON, U32)
        for i, register in enumerate(d):
            R[register] = block[i]
        w.fragments[d[0]] = (tuple(d), block)

        def act():
            shared = w.cta.shared
            view = shared.views[2]
            if not (shared.shadows[4][granules] == 0x01010101).all():
                w.report("uninitialised", "wgmma reads never-written shared memory", x.line)
            b = wide(view[b_offsets].ravel()).reshape(b_offsets.shape)
            if a_registers:
                a = np.empty((16, 16), F32)
                halves = np.stack(fragment).view(U16).reshape(4, LANES, 2)
                a[a_rows, a_columns] = wide(halves.ravel()).reshape(4, LANES, 2)
            else:
                a = wide(view[a_offsets].ravel()).reshape(a_offsets.shape)
            product = a.astype(np.float64) @ b.astype(np.float64).T
            if (negate_a == -1) != (negate_b == -1):
                product = -product
            result = product[rows, columns]
            if old is not None:
                result = result + old.view(F32)
            block[:] = result.astype(F32).view(U32)

        op = w.issue(("wgmma", w), "a wgmma", x.line, [_guarded(w, x.line, act)])
        op.agent, op.epoch, op.registers = agent, epoch, registers
        w.wgmma_open.append(op)

    return mma


def _accumulator(w, R: list, indices: list[int]) -> np.ndarray:
    """[registers, 32] of the accumulator: the block itself where the registers are still its rows."""
    known = w.fragments.get(indices[0])
    if known is not None and known[1].shape[0] == len(indices):
        block = known[1]
        if all(R[i].base is block for i in indices):
            return block
    return np.stack([R[i] for i in indices])


_OPERANDS: dict[tuple, tuple] = {}


def _operand(descriptor: int, mn: int, k: int, mn_major: bool, quarter: int | None, w):
    """(16-bit element numbers, granules) of an operand, or of the 16 rows of a warp of the warpgroup."""
    key = (descriptor, mn, k, mn_major, quarter)
    found = _OPERANDS.get(key)
    if found is None:
        start, leading, stride, width = layouts.wgmma_descriptor(descriptor)
        address = layouts.operand_offsets(start, leading, stride, width, mn, k, mn_major)
        if quarter is not None:
            address = address[16 * quarter : 16 * quarter + 16]
        found = _OPERANDS[key] = (address // 2, np.unique(address >> 2), int(address.max()) + 2)
    offsets, granules, end = found
    if end > w.cta.shared.size:
        raise LayoutError(f"wgmma descriptor {descriptor:#x} reaches shared byte {end:#x}, past the allocation")
    return offsets, granules


def _wgmma_fence(w, R, m) -> None:
    w.wgmma_fenced = list(R)  # registers are immutable arrays: a changed one is another object
    w.wgmma_touched = 0


def _check_fenced(w, R: list, read: list[int], accumulators: list[int], registers: int) -> None:
    """9.7.15.7.1: a fence after the last access to A's and the accumulator's registers, other than by wgmma itself.

    Values tell a write from elsewhere that reached a register through moves.
    """
    if w.wgmma_fenced is None:
        w.report("race", "wgmma without wgmma.fence before it")
        return
    if w.wgmma_touched & registers:
        w.report("race", "wgmma of registers accessed after the last wgmma.fence")
        return
    shape, block = w.fragments.get(accumulators[0], ((), None))
    for i in read:
        same = block is not None and shape == tuple(accumulators) and R[i].base is block  # of the wgmma before
        if R[i] is not w.wgmma_fenced[i] and not same:
            name = w.cta.program.kernel.registers[i].name
            w.report("race", f"wgmma reads {name}, written after the last wgmma.fence")
            return


def _wgmma_commit(w, R, m) -> None:
    w.wgmma_groups.append(w.wgmma_open)
    w.wgmma_open = []


def _gate_wgmma_wait(program, x: Instruction):
    pending = x.operands[0].value
    converge = gate_converge(program, x, None)

    def outstanding(w):
        groups = w.wgmma_groups
        return any(not op.done for g in groups[: max(0, len(groups) - pending)] for op in g)

    def gate(w, R, m):
        wait = converge(w, R, m)
        if wait is not None or not outstanding(w):
            return wait
        return Wait(f"wgmma groups, {pending} may be pending", lambda: not outstanding(w))

    return gate


def _wgmma_waited(w, pending: int) -> None:
    groups = w.wgmma_groups
    done = groups[: max(0, len(groups) - pending)]
    for group in done:
        for op in group:
            w.cta.clocks.learn(w.index, None, NOW, op.agent, op.epoch)
    w.wgmma_groups = groups[len(done) :]
