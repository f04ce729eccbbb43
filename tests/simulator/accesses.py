"""Loads, stores, atomics and matrices through shared memory (PTX ISA 9.1)."""

from __future__ import annotations

import numpy as np

from . import formats, memory
from .arithmetic import half_function
from .clocks import GRANULE
from .cta import LANES
from .formats import U16, U32, U64
from .memory import ALL_LANES, LOCAL_WINDOW, SHARED_WINDOW, MemoryFault
from .operands import (
    SIGNED,
    UNSIGNED,
    address_reader,
    element_bytes,
    items_of,
    lanes_of,
    put,
    reader,
    shared_address,
    space_of,
    symbol_value,
    widen,
)
from .ptx import Address, Instruction, PtxError, Register, Sink, Symbol

# ---- loads and stores (9.7.9.8, 9.7.9.11) --------------------------------------------------------


def split_generic(addresses: np.ndarray):
    """(space, addresses, selection or None) of a generic access."""
    high = addresses >= U64(SHARED_WINDOW)
    if not high.any():
        yield "global", addresses, None
        return
    shared = high & (addresses < U64(LOCAL_WINDOW))
    for name, chosen, base in (
        ("global", ~high, 0),
        ("shared", shared, SHARED_WINDOW),
        ("local", high & ~shared, LOCAL_WINDOW),
    ):
        if chosen.all():
            yield name, addresses - U64(base), None
        elif chosen.any():
            yield name, addresses[chosen] - U64(base), chosen


def check_written(w, region, index, element: int, addresses: np.ndarray, lanes: np.ndarray) -> None:
    """Reports a read of never-written bytes, which may go on."""
    if not region.all_initialised:
        missing = region.never_written(index, element)
        if missing.any():
            at = int(missing.argmax())
            text = f"read of never-written memory at {int(addresses[at]):#x} ({region.name})"
            w.report_fault(MemoryFault("uninitialised", text, lanes[at]))


def _load(w, region, offsets, element: int, count: int, addresses: np.ndarray, lanes: np.ndarray) -> list[np.ndarray]:
    """`count` consecutive elements of every access, one array an element."""
    index, view = region.index(offsets, element), region.views[element]
    out = []
    for i in range(count):
        at = index + i if i else index
        check_written(w, region, at, element, addresses, lanes)
        out.append(view[at])
    return out


def _shared(w, addresses: np.ndarray, size: int, lanes: np.ndarray, record):
    """Shared memory, after the checks of an access; `record` is the clocks' method of its kind."""
    region = w.cta.shared
    memory.check_inside(addresses, size, region.size, region.name, lanes)
    if w.machine.track:
        those = lanes if size <= GRANULE else lanes.repeat(size // GRANULE)
        text = record(w.index, those, w.cta.granules(addresses, size), w.line, size < GRANULE)
        if text:
            w.report("race", text)
    return region


def _joined(pieces, accesses: int, element: int, count: int) -> list[np.ndarray]:
    """`count` values an access from pieces (values, selection of the accesses or None for all)."""
    out = None
    for values, chosen in pieces:
        if chosen is None:
            return values
        if out is None:
            out = [np.zeros(accesses, UNSIGNED[element]) for _ in range(count)]
        for target, value in zip(out, values):
            target[chosen] = value
    return out


def _local(w, addresses: np.ndarray, size: int, lanes: np.ndarray):
    """The warp's local memory and offsets in it: every lane has its own part."""
    limit = w.cta.program.local_bytes
    memory.check_inside(addresses, size, limit, "local memory", lanes)
    part = -(-limit // 16) * 16
    if w.local is None:
        data = np.full(LANES * part, memory.POISON_BYTE, np.uint8)
        w.local = memory.Region(0, data, False, "local memory of the thread")
    return w.local, addresses + (lanes * part).astype(U64)


def read_memory(
    w, space: str, addresses: np.ndarray, element: int, count: int, lanes: np.ndarray = ALL_LANES
) -> list[np.ndarray]:
    """What the `lanes` read, `count` elements each, one array an element."""
    size = element * count
    memory.check_alignment(addresses, size, lanes)
    if space == "shared":
        region = _shared(w, addresses, size, lanes, w.cta.clocks.generic_read)
        return _load(w, region, addresses, element, count, addresses, lanes)
    if space == "local":
        region, offsets = _local(w, addresses, size, lanes)
        return _load(w, region, offsets, element, count, addresses, lanes)
    if space == "param":
        region = w.cta.launch.parameters
        memory.check_inside(addresses, size, region.size, region.name, lanes)
        return _load(w, region, addresses + U64(region.base), element, count, addresses, lanes)
    if space == "generic":
        pieces = (
            (read_memory(w, name, part, element, count, lanes if chosen is None else lanes[chosen]), chosen)
            for name, part, chosen in split_generic(addresses)
        )
        return _joined(pieces, len(addresses), element, count)

    def read(region, chosen):
        part, those = (addresses, lanes) if chosen is None else (addresses[chosen], lanes[chosen])
        if space == "const" and not region.constant:
            raise MemoryFault("out_of_bounds", f"ld.const at {int(part[0]):#x}, in {region.name}", those[0])
        return _load(w, region, part, element, count, part, those), chosen

    pieces = (read(*group) for group in w.machine.memory.groups(addresses, size, lanes))
    return _joined(pieces, len(addresses), element, count)


def write_memory(
    w, space: str, addresses: np.ndarray, values: list[np.ndarray], element: int, lanes: np.ndarray = ALL_LANES
) -> None:
    size = element * len(values)
    memory.check_alignment(addresses, size, lanes)
    w.machine.progress += space != "local"
    if space == "shared":
        region = _shared(w, addresses, size, lanes, w.cta.clocks.generic_write)
        memory.store(region, addresses, values, element)
        return
    if space == "local":
        region, offsets = _local(w, addresses, size, lanes)
        memory.store(region, offsets, values, element)
        return
    if space == "generic":
        for name, part, chosen in split_generic(addresses):
            if chosen is None:
                write_memory(w, name, part, values, element, lanes)
            else:
                write_memory(w, name, part, [v[chosen] for v in values], element, lanes[chosen])
        return
    for region, chosen in w.machine.memory.groups(addresses, size, lanes):
        if chosen is None:
            memory.store(region, addresses, values, element, lanes)
        else:
            memory.store(region, addresses[chosen], [v[chosen] for v in values], element, lanes[chosen])


def build_ld(program, x: Instruction):
    parts, kind = x.parts, x.parts[-1]
    element, targets = element_bytes(kind), items_of(x.operands[0])
    space = space_of(parts)
    address = x.operands[1]
    if space == "param" and is_call_parameter(address.base):
        check_call_parameter(address)
        return lambda w, R, m: put(R, targets[0], R[address.base.index], m)
    if space == "param" and isinstance(address.base, Symbol):
        offset = symbol_value(program, address.base) + address.offset
        size = element * len(targets)
        if offset % size == 0 and 0 <= offset <= program.kernel.parameter_bytes - size:

            def ld_param(w, R, m):
                for i, target in enumerate(targets):
                    put(R, target, widen(w.cta.launch.parameter(offset + i * element, element), kind, target), m)

            return ld_param
    where = address_reader(program, address)
    count = len(targets)

    def ld(w, R, m):
        addresses = where(w, R)
        if m is None:
            for target, value in zip(targets, read_memory(w, space, addresses, element, count)):
                if type(target) is Register:
                    R[target.index] = value if target.bytes == element else widen(value, kind, target)
            return
        lanes = np.flatnonzero(m)
        for target, value in zip(targets, read_memory(w, space, addresses[lanes], element, count, lanes)):
            if type(target) is Register:
                new = R[target.index].copy()
                new[lanes] = widen(value, kind, target)
                R[target.index] = new

    return ld


def is_call_parameter(operand) -> bool:
    return isinstance(operand, Register) and not operand.name.startswith("%")


def check_call_parameter(address: Address) -> None:
    if address.offset:
        raise PtxError("a part of a call's parameter is not modelled")


def build_st(program, x: Instruction):
    parts, kind = x.parts, x.parts[-1]
    element = element_bytes(kind)
    space = space_of(parts)
    if space == "param" and is_call_parameter(x.operands[0].base):
        check_call_parameter(x.operands[0])
        source = reader(program, x.operands[1], element)
        return lambda w, R, m: put(R, x.operands[0].base, source(w, R), m)
    if space in ("param", "const"):
        raise PtxError(f"a store to .{space} is not modelled")
    where = address_reader(program, x.operands[0])
    sources = [reader(program, v, element) for v in items_of(x.operands[1])]

    def st(w, R, m):
        addresses = where(w, R)
        values = [s(w, R) for s in sources]
        if m is None:
            write_memory(w, space, addresses, values, element)
        else:
            lanes = np.flatnonzero(m)
            write_memory(w, space, addresses[lanes], [v[lanes] for v in values], element, lanes)

    return st


# ---- atomics (9.7.13.5 atom, 9.7.13.6 red) -------------------------------------------------------


def _atomic_function(op: str, kind: str, flush: bool):
    """Function (old bits, operand bits, second operand bits) -> new bits, of arrays."""
    if kind in ("f32", "f64"):
        real = np.float32 if kind == "f32" else np.float64
        raw = UNSIGNED[element_bytes(kind)]
        if flush:
            return lambda a, b, c: formats.ftz(formats.ftz(a.view(real)) + formats.ftz(b.view(real))).view(raw)
        return lambda a, b, c: (a.view(real) + b.view(real)).view(raw)
    if kind.startswith(("f16", "bf16")):
        function = half_function(op, kind)
        return lambda a, b, c: function(a, b)
    signed = SIGNED[element_bytes(kind)] if kind[0] == "s" else UNSIGNED[element_bytes(kind)]
    raw = UNSIGNED[element_bytes(kind)]
    return {
        "add": lambda a, b, c: a + b,
        "and": lambda a, b, c: a & b,
        "or": lambda a, b, c: a | b,
        "xor": lambda a, b, c: a ^ b,
        "exch": lambda a, b, c: b,
        "min": lambda a, b, c: np.minimum(a.view(signed), b.view(signed)).view(raw),
        "max": lambda a, b, c: np.maximum(a.view(signed), b.view(signed)).view(raw),
        "cas": lambda a, b, c: np.where(a == b, c, a),
        "inc": lambda a, b, c: np.where(a >= b, raw(0), a + raw(1)),
        "dec": lambda a, b, c: np.where((a == 0) | (a > b), b, a - raw(1)),
    }[op]


def build_atomic(program, x: Instruction):
    parts, kind = x.parts, x.parts[-1]
    has_result = parts[0] == "atom"
    operands = list(x.operands)
    target = operands.pop(0) if has_result else Sink()
    op = next(p for p in parts if p in ("add", "and", "or", "xor", "exch", "min", "max", "cas", "inc", "dec"))
    element, space = element_bytes(kind), space_of(parts)
    where = address_reader(program, operands[0])
    sources = [reader(program, v, element) for v in items_of(operands[1])]
    second = reader(program, operands[2], element) if op == "cas" else None
    functions = {s: _atomic_function(op, kind, kind == "f32" and s == "global") for s in ("global", "shared")}
    targets = items_of(target)

    def atomic(w, R, m):
        lanes = lanes_of(m)
        addresses = where(w, R)[lanes]
        values = [s(w, R)[lanes] for s in sources]
        third = second(w, R)[lanes] if second else values[0]
        olds = atomic_update(w, space, addresses, values, third, element, functions, lanes)
        if has_result:
            for t, old in zip(targets, olds):
                if isinstance(t, Register):
                    new = R[t.index].copy()
                    new[lanes] = old
                    R[t.index] = new

    return atomic


def atomic_update(w, space, addresses, values, third, element: int, functions: dict, lanes) -> list[np.ndarray]:
    """Applies the space's function lane by lane, in lane order; returns the old values."""
    if space == "generic":

        def update(name, part, chosen):
            those = slice(None) if chosen is None else chosen
            some = [v[those] for v in values]
            return atomic_update(w, name, part, some, third[those], element, functions, lanes[those]), chosen

        pieces = (update(*piece) for piece in split_generic(addresses))
        return _joined(pieces, len(addresses), element, len(values))
    if space not in functions:
        raise MemoryFault("out_of_bounds", f"atomic at {space} {int(addresses[0]):#x}", lanes[0])
    function = functions[space]
    memory.check_alignment(addresses, element * len(values), lanes)
    size = element * len(values)
    if space == "shared":
        pieces = [(_shared(w, addresses, size, lanes, w.cta.clocks.generic_atomic), None)]
    else:
        pieces = list(w.machine.memory.groups(addresses, size, lanes))
    olds = [np.zeros(len(addresses), UNSIGNED[element]) for _ in values]
    for region, chosen in pieces:
        if region.read_only:
            raise MemoryFault("out_of_bounds", f"atomic on read-only {region.name}", lanes[0])
        which = np.arange(len(addresses)) if chosen is None else np.flatnonzero(chosen)
        index = region.index(addresses[which], element)
        view = region.views[element]
        unique = len(np.unique(index)) == len(index)
        for i, value in enumerate(values):
            at = index + i
            check_written(w, region, at, element, addresses[which], lanes[which])
            before = view[at]
            if unique:
                olds[i][which] = before
                view[at] = function(view[at], value[which], third[which])
            else:
                for lane, position in zip(which, at):
                    old = view[position : position + 1].copy()
                    olds[i][lane] = old[0]
                    view[position] = function(old, value[lane : lane + 1], third[lane : lane + 1])[0]
            w.machine.progress += bool((view[at] != before).any())  # a failed try is none
    return olds


# ---- matrices through shared memory (9.7.14.5.15, 9.7.14.5.16) -----------------------------------


def build_matrix(program, x: Instruction):
    """ldmatrix and stmatrix m8n8.b16: lane 8i + r gives the address of row r of matrix i."""
    parts = x.parts
    count = int(next(p for p in parts if p in ("x1", "x2", "x4"))[1:])
    store, transposed = parts[0] == "stmatrix", "trans" in parts
    address, vector = (x.operands[0], x.operands[1]) if store else (x.operands[1], x.operands[0])
    where = shared_address(program, address, parts)
    items = items_of(vector)
    lane = np.arange(LANES)
    # Element h of lane l: row l/4, column 2(l%4) + h; transposed: the other way round.
    line_number, position = lane // 4, 2 * (lane % 4)

    def matrix(w, R, m):
        rows = where(w, R)[: 8 * count]
        memory.check_alignment(rows, 16)
        memory.check_inside(rows, 16, w.cta.shared.size, w.cta.shared.name)
        givers = ALL_LANES[: 8 * count]  # of the addresses: the accesses count as theirs
        if store:
            data = np.empty((count, 8, 8), U16)
            for i, item in enumerate(items):
                halves = np.ascontiguousarray(R[item.index]).view(U16).reshape(LANES, 2)
                for h in range(2):
                    if transposed:
                        data[i, position + h, line_number] = halves[:, h]
                    else:
                        data[i, line_number, position + h] = halves[:, h]
            flat = data.reshape(count * 8, 8)
            write_memory(
                w,
                "shared",
                rows,
                [np.ascontiguousarray(flat[:, 4 * i : 4 * i + 4]).view(U64)[:, 0] for i in range(2)],
                8,
                givers,
            )
            return
        values = read_memory(w, "shared", rows, 8, 2, givers)
        data = np.stack(values, 1).view(U16).reshape(count, 8, 8)
        for i, item in enumerate(items):
            halves = np.empty((LANES, 2), U16)
            for h in range(2):
                halves[:, h] = data[i, position + h, line_number] if transposed else data[i, line_number, position + h]
            put(R, item, halves.view(U32)[:, 0], m)

    return matrix
