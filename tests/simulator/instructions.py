"""The instructions that are not plain expressions: memory, atomics, warp and CTA synchronisation, conversions.

`build(program, instruction)` makes a closure `(warp, registers, mask or None)`; `gate(program, instruction)` makes the
function that says whether a group of lanes must wait before the instruction. Sections are those of the PTX ISA 9.1.
"""

from __future__ import annotations

import functools
import re
import sys

import numpy as np

from . import formats, memory
from .formats import F32, U16, U32, U64
from .machine import FULL, LANES, Converge, Mbarrier, Wait
from .memory import ALL_LANES, LOCAL_WINDOW, SHARED_WINDOW, Fault, MemoryFault
from .ptx import Address, Immediate, Instruction, PtxError, Register, Sink, Special, Symbol, Vector

I32, I64 = np.int32, np.int64
UNSIGNED = memory.UNSIGNED
SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}

SPECIALS = {
    "%ntid.x": lambda w: w.cta.block[0], "%ntid.y": lambda w: w.cta.block[1], "%ntid.z": lambda w: w.cta.block[2],
    "%ctaid.x": lambda w: w.cta.coordinates[0], "%ctaid.y": lambda w: w.cta.coordinates[1],
    "%ctaid.z": lambda w: w.cta.coordinates[2], "%nctaid.x": lambda w: w.cta.launch.grid[0],
    "%nctaid.y": lambda w: w.cta.launch.grid[1], "%nctaid.z": lambda w: w.cta.launch.grid[2],
    "%cluster_ctarank": lambda w: 0, "%cluster_nctarank": lambda w: 1, "%clock": lambda w: w.machine.instructions,
    "%clock64": lambda w: w.machine.instructions, "%globaltimer": lambda w: w.machine.instructions,
    "%smid": lambda w: w.cta.index % w.machine.num_sms, "%nsmid": lambda w: w.machine.num_sms,
    "%lanemask_lt": lambda w: (1 << np.arange(LANES)) - 1, "%lanemask_eq": lambda w: 1 << np.arange(LANES),
    "%lanemask_le": lambda w: (2 << np.arange(LANES)) - 1,
    "%lanemask_gt": lambda w: 0xFFFFFFFF & ~((2 << np.arange(LANES)) - 1),
    "%lanemask_ge": lambda w: 0xFFFFFFFF & ~((1 << np.arange(LANES)) - 1),
    # Grid workspace of a cooperative launch, as cooperative_groups reads it.
    "%envreg1": lambda w: w.cta.launch.grid_workspace >> 32,
    "%envreg2": lambda w: w.cta.launch.grid_workspace & 0xFFFFFFFF,
    "%dynamic_smem_size": lambda w: w.cta.launch.shared_bytes,
    "%total_smem_size": lambda w: w.cta.launch.shared_bytes + w.cta.program.static_shared_bytes,
}  # fmt: skip


def special_bytes(name: str) -> int:
    return 8 if name in ("%clock64", "%globaltimer") else 4


def special(w, name: str) -> np.ndarray:
    value = w.specials.get(name)
    if value is None or "clock" in name or "timer" in name:
        kind = UNSIGNED[special_bytes(name)]
        value = np.broadcast_to(np.asarray(SPECIALS[name](w)).astype(kind), (LANES,)).copy()
        w.specials[name] = value
    return value


NAMESPACE = {
    "np": np, "W": np.where, "S": special, "U8": np.uint8, "U16": U16, "U32": U32, "U64": U64, "I8": np.int8,
    "I16": np.int16, "I32": I32, "I64": I64, "F32": F32, "F64": np.float64, "fma32": formats.fma32, "ftz": formats.ftz,
    "ex2": formats.ex2, "minimum": formats.minimum, "maximum": formats.maximum,
}  # fmt: skip


def symbol_value(program, symbol: Symbol) -> int:
    if symbol.name in program.parameters:
        return program.parameters[symbol.name].offset + symbol.offset
    if symbol.name in program.symbols:
        return program.symbols[symbol.name] + symbol.offset
    raise PtxError(f"{program.name}: unknown symbol {symbol.name}")


# ---- operands ------------------------------------------------------------------------------------


def reader(program, operand, size: int):
    """Function of (warp, registers) that gives the operand's raw bits."""
    if isinstance(operand, Register):
        i = operand.index
        if operand.bytes != size and size and operand.bytes:
            kind = UNSIGNED[size]
            return lambda w, R: R[i].astype(kind)
        return lambda w, R: R[i]
    if isinstance(operand, (Immediate, Symbol)):
        value = operand.bits(size) if isinstance(operand, Immediate) else symbol_value(program, operand)
        array = np.full(LANES, bool(value)) if size == 0 else np.full(LANES, value % (1 << 8 * size), UNSIGNED[size])
        return lambda w, R: array
    if isinstance(operand, Special):
        name, kind = operand.name, UNSIGNED[size]
        if name in ("%tid.x", "%tid.y", "%tid.z", "%laneid", "%warpid"):
            return lambda w, R: w.specials[name].astype(kind)
        if name not in SPECIALS:
            raise PtxError(f"special register {name} is not modelled")
        return lambda w, R: special(w, name).astype(kind)
    if isinstance(operand, tuple) and operand[0] == "not":
        i = operand[1].index
        return lambda w, R: ~R[i]
    raise PtxError(f"operand not understood: {operand}")


def put(R: list, register, value: np.ndarray, mask) -> None:
    if isinstance(register, Sink):
        return
    i = register.index
    R[i] = value if mask is None else np.where(mask, value, R[i])


def address_reader(program, operand):
    """Function of (warp, registers) that gives 64-bit addresses (6.4.1)."""
    offset = 0
    if isinstance(operand, Address):
        offset, operand = operand.offset, operand.base
    narrow = isinstance(operand, Register) and operand.bytes == 4
    base = reader(program, operand, 4 if narrow else 8)
    delta, limit = U64(offset % (1 << 64)), U64(0xFFFFFFFF if narrow else 0xFFFFFFFFFFFFFFFF)
    if offset:
        return lambda w, R: (base(w, R).astype(U64) + delta) & limit
    return lambda w, R: base(w, R).astype(U64)


def space_of(parts: list[str]) -> str:
    for p in parts:
        if p.split("__")[0] in ("global", "shared", "local", "param", "const"):
            return p.split("__")[0]
    return "generic"


def lanes_of(mask) -> np.ndarray:
    return ALL_LANES if mask is None else np.flatnonzero(mask)


# ---- loads and stores (9.7.9.8, 9.7.9.11) --------------------------------------------------------


def _split_generic(addresses: np.ndarray):
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


def _check_written(w, region, index, element: int, addresses: np.ndarray, lanes: np.ndarray) -> None:
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
        _check_written(w, region, at, element, addresses, lanes)
        out.append(view[at])
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
        region = w.cta.shared
        memory.check_inside(addresses, size, region.size, region.name, lanes)
        if w.machine.track:
            text = w.cta.clocks.generic_read(w.index, w.cta.granules(addresses, size), w.line, size < 4)
            if text:
                w.report("race", text)
        return _load(w, region, addresses, element, count, addresses, lanes)
    if space == "local":
        region, offsets = _local(w, addresses, size, lanes)
        return _load(w, region, offsets, element, count, addresses, lanes)
    if space == "param":
        region = w.cta.launch.parameters
        memory.check_inside(addresses, size, region.size, region.name, lanes)
        return _load(w, region, addresses + U64(region.base), element, count, addresses, lanes)
    if space == "generic":
        out = None
        for name, part, chosen in _split_generic(addresses):
            values = read_memory(w, name, part, element, count, lanes if chosen is None else lanes[chosen])
            if chosen is None:
                return values
            if out is None:
                out = [np.zeros(len(addresses), UNSIGNED[element]) for _ in range(count)]
            for target, value in zip(out, values):
                target[chosen] = value
        return out
    out = None
    for region, chosen in w.machine.memory.groups(addresses, size, lanes):
        part, those = (addresses, lanes) if chosen is None else (addresses[chosen], lanes[chosen])
        if space == "const" and not region.constant:
            raise MemoryFault("out_of_bounds", f"ld.const at {int(part[0]):#x}, in {region.name}", those[0])
        values = _load(w, region, part, element, count, part, those)
        if chosen is None:
            return values
        if out is None:
            out = [np.zeros(len(addresses), UNSIGNED[element]) for _ in range(count)]
        for target, value in zip(out, values):
            target[chosen] = value
    return out


def write_memory(
    w, space: str, addresses: np.ndarray, values: list[np.ndarray], element: int, lanes: np.ndarray = ALL_LANES
) -> None:
    size = element * len(values)
    memory.check_alignment(addresses, size, lanes)
    w.machine.progress += 1
    if space == "shared":
        region = w.cta.shared
        memory.check_inside(addresses, size, region.size, region.name, lanes)
        if w.machine.track:
            text = w.cta.clocks.generic_write(w.index, w.cta.granules(addresses, size), w.line, size < 4)
            if text:
                w.report("race", text)
        memory.store(region, addresses, values, element)
        return
    if space == "local":
        region, offsets = _local(w, addresses, size, lanes)
        memory.store(region, offsets, values, element)
        return
    if space == "generic":
        for name, part, chosen in _split_generic(addresses):
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


def _items(operand) -> tuple:
    return operand.items if isinstance(operand, Vector) else (operand,)


def element_bytes(kind: str) -> int:
    return {"f16": 2, "bf16": 2, "f16x2": 4, "bf16x2": 4, "f32": 4, "f64": 8}.get(kind) or int(kind[1:]) // 8


def build_ld(program, x: Instruction):
    parts, kind = x.parts, x.parts[-1]
    element, targets = element_bytes(kind), _items(x.operands[0])
    space = space_of(parts)
    address = x.operands[1]
    if space == "param" and _is_call_parameter(address.base):
        _check_call_parameter(address)
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


def _is_call_parameter(operand) -> bool:
    return isinstance(operand, Register) and not operand.name.startswith("%")


def _check_call_parameter(address: Address) -> None:
    if address.offset:
        raise PtxError("a part of a call's parameter is not modelled")


def build_call(program, x: Instruction):
    """Of the device functions every toolkit provides; real calls are not modelled."""
    name = next((o.name for o in x.operands if isinstance(o, Symbol)), "a register")
    if name not in _FUNCTIONS:
        raise PtxError(f"{program.name}, line {x.line}: a call of {name} is not modelled")
    return _FUNCTIONS[name](program, x)


def _assertfail(program, x: Instruction):
    message, file, line = (p.index for p in x.operands[1].items[:3])

    def assertfail(w, R, m):
        lane = lanes_of(m)[0]
        where = f"{_c_string(w, int(R[file][lane]), lane)}:{int(R[line][lane])}"
        raise Fault("trap", f"assertion failed: {_c_string(w, int(R[message][lane]), lane)} ({where})", lane)

    return assertfail


def _read_generic(w, address: int, size: int, lane: int) -> np.ndarray:
    return read_memory(w, "generic", np.array([address], U64), size, 1, np.array([lane]))[0]


def _c_string(w, address: int, lane: int) -> str:
    text = bytearray()
    while byte := int(_read_generic(w, address + len(text), 1, lane)[0]):
        text.append(byte)
    return text.decode(errors="replace")


def _vprintf(program, x: Instruction):
    """printf of a format and a buffer of arguments, each aligned to its size; returns how many there were."""
    *results, _, parameters = x.operands
    form, buffer = (reader(program, p, 8) for p in parameters.items)

    def vprintf(w, R, m):
        counts = np.zeros(LANES, U32)
        for lane in lanes_of(m):
            address = int(form(w, R)[lane])
            if address == 0:
                counts[lane] = 0xFFFFFFFF
                continue
            text, counts[lane] = _format(w, x, _c_string(w, address, lane), int(buffer(w, R)[lane]), lane)
            sys.stdout.write(text)
        if results:
            put(R, results[0].items[0], counts, m)

    return vprintf


_CONVERSION = re.compile(r"%([-+ 0#]*)(\*|\d*)((?:\.(?:\*|\d*))?)(hh|h|ll|l|z)?([diuxXocspeEfFgG%])|%")


def _format(w, x: Instruction, form: str, buffer: int, lane: int) -> tuple[str, int]:
    """A printf's text and its number of arguments.

    Raises:
        PtxError: a conversion that is not modelled.
    """
    offset = count = 0

    def argument(size: int) -> np.ndarray:
        nonlocal offset, count
        offset = -(-offset // size) * size
        value = _read_generic(w, buffer + offset, size, lane)
        offset, count = offset + size, count + 1
        return value

    def convert(found: re.Match) -> str:
        flags, width, precision, size, kind = found.groups()
        if kind is None or (kind == "o" and "#" in flags):
            raise PtxError(f"{w.cta.program.name}, line {x.line}: the printf format {form!r} is not modelled")
        if kind == "%":
            return "%"
        width = str(argument(4).view(I32)[0]) if width == "*" else width
        precision = f".{argument(4).view(I32)[0]}" if precision == ".*" else precision
        if kind in "eEfFgG":
            value = argument(8).view(np.float64)[0]
        elif kind in "sp":
            pointer = int(argument(8)[0])
            if kind == "s":
                value = _c_string(w, pointer, lane) if pointer else "(null)"
            else:
                value, kind = hex(pointer) if pointer else "(nil)", "s"
        else:
            bits = argument(8 if size in ("l", "ll", "z") else 4)
            bits = bits.astype(UNSIGNED[{"h": 2, "hh": 1}.get(size, bits.itemsize)])
            value = int(bits.view(SIGNED[bits.itemsize])[0] if kind in "di" else bits[0])
            if kind == "c":
                value, kind = chr(value & 0xFF), "s"
        return f"%{flags}{width}{precision}{kind}" % value

    return _CONVERSION.sub(convert, form), count


_FUNCTIONS = {"__assertfail": _assertfail, "vprintf": _vprintf}


def widen(value: np.ndarray, kind: str, target) -> np.ndarray:
    """Sign- or zero-extended to the register's width."""
    size = value.dtype.itemsize
    if not isinstance(target, Register) or target.bytes == size:
        return value
    if kind[0] == "s":
        return value.view(SIGNED[size]).astype(SIGNED[target.bytes]).view(UNSIGNED[target.bytes])
    return value.astype(UNSIGNED[target.bytes])


def build_st(program, x: Instruction):
    parts, kind = x.parts, x.parts[-1]
    element = element_bytes(kind)
    space = space_of(parts)
    if space == "param" and _is_call_parameter(x.operands[0].base):
        _check_call_parameter(x.operands[0])
        source = reader(program, x.operands[1], element)
        return lambda w, R, m: put(R, x.operands[0].base, source(w, R), m)
    if space in ("param", "const"):
        raise PtxError(f"a store to .{space} is not modelled")
    where = address_reader(program, x.operands[0])
    sources = [reader(program, v, element) for v in _items(x.operands[1])]

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
        function = _half_function(op, kind)
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
    sources = [reader(program, v, element) for v in _items(operands[1])]
    second = reader(program, operands[2], element) if op == "cas" else None
    functions = {s: _atomic_function(op, kind, kind == "f32" and s == "global") for s in ("global", "shared")}
    targets = _items(target)

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
        olds = [np.zeros(len(addresses), UNSIGNED[element]) for _ in values]
        for name, part, chosen in _split_generic(addresses):
            chosen = slice(None) if chosen is None else chosen
            chosen_values = [v[chosen] for v in values]
            some = atomic_update(w, name, part, chosen_values, third[chosen], element, functions, lanes[chosen])
            for old, value in zip(olds, some):
                old[chosen] = value
        return olds
    if space not in functions:
        raise MemoryFault("out_of_bounds", f"atomic at {space} {int(addresses[0]):#x}", lanes[0])
    function = functions[space]
    memory.check_alignment(addresses, element * len(values), lanes)
    w.machine.progress += 1
    size = element * len(values)
    if space == "shared":
        region = w.cta.shared
        memory.check_inside(addresses, size, region.size, region.name, lanes)
        if w.machine.track:
            text = w.cta.clocks.generic_atomic(w.index, w.cta.granules(addresses, size), w.line, size < 4)
            if text:
                w.report("race", text)
        pieces = [(region, None)]
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
            _check_written(w, region, at, element, addresses[which], lanes[which])
            if unique:
                olds[i][which] = view[at]
                view[at] = function(view[at], value[which], third[which])
            else:
                for lane, position in zip(which, at):
                    old = view[position : position + 1].copy()
                    olds[i][lane] = old[0]
                    view[position] = function(old, value[lane : lane + 1], third[lane : lane + 1])[0]
    return olds


def collective(program, x: Instruction):
    """An instruction of _CONVERGE_MASK: lanes of different member masks are separate groups."""
    run = _COLLECTIVES[x.parts[0]](program, x)
    members = reader(program, x.operands[_CONVERGE_MASK[x.parts[0]]], 4)

    def execute(w, R, m):
        masks, active = members(w, R), FULL if m is None else m
        outside = active & (masks >> np.arange(LANES, dtype=U32) & U32(1) == 0)
        if outside.any():
            w.report("illegal", f"lane {int(np.argmax(outside))} executes {x.opcode} with a mask it is not a member of")
        found = np.unique(masks[active])
        for mask in found:
            run(w, R, m if len(found) == 1 else active & (masks == mask))

    return execute


# ---- warp instructions (9.7.9.6 shfl, 9.7.13.9 vote, 9.7.13.10 match, 9.7.13.12 redux) -----------


def build_shfl(program, x: Instruction):
    mode = x.parts[2]
    target, b, c, d = x.operands[0], x.operands[2], x.operands[3], x.operands[1]
    source, lane_operand, clamp = (reader(program, v, 4) for v in (d, b, c))
    first = target.items[0] if isinstance(target, Vector) else target
    flag = target.items[1] if isinstance(target, Vector) else Sink()
    lane = np.arange(LANES)

    def shfl(w, R, m):
        value = source(w, R)
        b_value = (lane_operand(w, R) & U32(31)).astype(np.int64)
        c_value = clamp(w, R).astype(np.int64)
        segment = c_value >> 8 & 31
        limit = c_value & 31
        max_lane = (lane & segment) | (limit & ~segment)
        min_lane = lane & segment
        if mode == "up":
            j = lane - b_value
            valid = j >= max_lane
        elif mode == "down":
            j = lane + b_value
            valid = j <= max_lane
        elif mode == "bfly":
            j = lane ^ b_value
            valid = j <= max_lane
        else:
            j = min_lane | (b_value & ~segment)
            valid = j <= max_lane
        j = np.where(valid, j, lane)
        active = FULL if m is None else m
        if not active[j[active]].all():
            w.report("illegal", "shfl reads a lane that does not take part")
        put(R, first, value[j], m)
        put(R, flag, valid, m)

    return shfl


def build_vote(program, x: Instruction):
    mode, kind = x.parts[2], x.parts[-1]
    source = reader(program, x.operands[1], 0)

    def vote(w, R, m):
        p = source(w, R)
        active = FULL if m is None else m
        if mode == "ballot":
            bits = int(np.packbits(p & active, bitorder="little").view(U32)[0])
            put(R, x.operands[0], np.full(LANES, bits, U32), m)
            return
        chosen = p[active]
        result = {"any": chosen.any(), "all": chosen.all(), "uni": chosen.all() or not chosen.any()}[mode]
        put(R, x.operands[0], np.full(LANES, bool(result)), m)

    del kind
    return vote


def build_match(program, x: Instruction):
    mode, kind = x.parts[1], x.parts[-1]
    source = reader(program, x.operands[1], element_bytes(kind))
    target = x.operands[0]

    def match(w, R, m):
        value = source(w, R)
        active = FULL if m is None else m
        if mode == "any":
            equal = (value[:, None] == value[None, :]) & active[None, :]
            bits = np.packbits(equal, axis=1, bitorder="little").view(U32)[:, 0]
            put(R, target, bits, m)
            return
        same = bool((value[active] == value[active][0]).all())
        bits = int(np.packbits(active, bitorder="little").view(U32)[0]) if same else 0
        items = _items(target)
        put(R, items[0], np.full(LANES, bits, U32), m)
        if len(items) > 1:
            put(R, items[1], np.full(LANES, same), m)

    return match


def build_redux(program, x: Instruction):
    op, kind = x.parts[2], x.parts[-1]
    source = reader(program, x.operands[1], 4)
    functions = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or}
    function = {**functions, "xor": np.bitwise_xor}[op]

    def redux(w, R, m):
        value = source(w, R)[FULL if m is None else m].view({"s32": I32, "f32": F32}.get(kind, U32))
        result = _redux_f32(value, x.parts) if kind == "f32" else function.reduce(value)
        put(R, x.operands[0], np.full(LANES, result, value.dtype).view(U32), m)

    return redux


def _redux_f32(value: np.ndarray, parts: list[str]) -> F32:
    if "abs" in parts:
        value = np.abs(value)
    nan = np.isnan(value)
    if nan.any() if "NaN" in parts else nan.all():
        return formats.CANONICAL_NAN_F32
    return functools.reduce(formats.minimum if "min" in parts else formats.maximum, value)


def build_elect(program, x: Instruction):
    """9.7.13.14 elect.sync: one lane of the mask, here the lowest."""
    items = _items(x.operands[0])

    def elect(w, R, m):
        leader = int(np.argmax(FULL if m is None else m))
        put(R, items[0], np.full(LANES, leader, U32), m)
        put(R, items[1], np.arange(LANES) == leader, m)

    return elect


def build_activemask(program, x: Instruction):
    def activemask(w, R, m):
        bits = int(np.packbits(FULL if m is None else m, bitorder="little").view(U32)[0])
        put(R, x.operands[0], np.full(LANES, bits, U32), m)

    return activemask


# ---- integer leftovers ---------------------------------------------------------------------------


def _divide(a: np.ndarray, b: np.ndarray, remainder: bool) -> np.ndarray:
    """Truncating division; by zero gives unspecified values, here all ones (9.7.1.8)."""
    safe = np.where(b == 0, a.dtype.type(1), b)
    if a.dtype.kind == "u":
        out = a % safe if remainder else a // safe
    elif remainder:
        out = np.fmod(a, safe)
    else:
        out = (a - np.fmod(a, safe)) // safe
    return np.where(b == 0, a.dtype.type(-1 if a.dtype.kind == "i" else np.iinfo(a.dtype).max), out)


def build_div(program, x: Instruction):
    kind = x.parts[-1]
    n = element_bytes(kind)
    a, b = reader(program, x.operands[1], n), reader(program, x.operands[2], n)
    raw = UNSIGNED[n]
    if kind in ("f32", "f64"):
        real = F32 if kind == "f32" else np.float64
        flush, approximate = "ftz" in x.parts, "approx" in x.parts

        def divide(w, R, m):
            v, u = a(w, R).view(real), b(w, R).view(real)
            if flush:
                v, u = formats.ftz(v), formats.ftz(u)
            out = v / u
            if approximate:  # 9.7.3.8: the reciprocal of a large divisor is 0
                out = np.where(np.abs(u) > F32(2.0**126), v * np.copysign(F32(0), u), out)
            put(R, x.operands[0], (formats.ftz(out) if flush else out).view(raw), m)

        return divide
    view = SIGNED[n] if kind[0] == "s" else raw
    remainder = x.parts[0] == "rem"
    return lambda w, R, m: put(
        R, x.operands[0], _divide(a(w, R).view(view), b(w, R).view(view), remainder).view(raw), m
    )


def _unary(function, n_in: int):
    def make(program, x: Instruction):
        source = reader(program, x.operands[1], n_in or element_bytes(x.parts[-1]))
        return lambda w, R, m: put(R, x.operands[0], function(source(w, R)), m)

    return make


def _popcount(v):
    return np.unpackbits(v.view(np.uint8).reshape(LANES, -1), axis=1).sum(1).astype(U32)


def _leading_zeros(v):
    bits = np.unpackbits(v.view(np.uint8).reshape(LANES, -1)[:, ::-1], axis=1)
    return np.where(bits.any(1), bits.argmax(1), bits.shape[1]).astype(U32)


def _reverse_bits(v):
    raw = v.view(np.uint8).reshape(LANES, -1)
    bits = np.unpackbits(raw, axis=1, bitorder="little")[:, ::-1]
    return np.packbits(np.ascontiguousarray(bits), axis=1, bitorder="little").view(v.dtype)[:, 0]


def build_bfind(program, x: Instruction):
    kind = x.parts[-1]
    source = reader(program, x.operands[1], element_bytes(kind))
    bits = 8 * element_bytes(kind)

    def bfind(w, R, m):
        v = source(w, R)
        if kind[0] == "s":
            v = np.where(v.view(SIGNED[bits // 8]) < 0, ~v, v)
        zeros = _leading_zeros(v).astype(np.int64)
        found = zeros if "shiftamt" in x.parts else bits - 1 - zeros
        put(R, x.operands[0], np.where(zeros == bits, 0xFFFFFFFF, found).astype(U32), m)

    return bfind


def build_bfe(program, x: Instruction):
    """9.7.1.19."""
    kind = x.parts[-1]
    n = element_bytes(kind)
    a, b, c = reader(program, x.operands[1], n), reader(program, x.operands[2], 4), reader(program, x.operands[3], 4)

    def bfe(w, R, m):
        out = np.zeros(LANES, UNSIGNED[n])
        for i, (v, p, length) in enumerate(zip(a(w, R), b(w, R) & U32(255), c(w, R) & U32(255))):
            v, p, length, msb = int(v), int(p), int(length), 8 * n - 1
            field = (v >> p) & ((1 << length) - 1)
            if kind[0] == "s" and length:
                sign = v >> min(p + length - 1, msb) & 1
                if sign:
                    have = min(length, max(0, msb + 1 - p))
                    field |= -1 << have
            out[i] = field % (1 << 8 * n)
        put(R, x.operands[0], out, m)

    return bfe


def build_bfi(program, x: Instruction):
    """9.7.1.20: inserts `d` bits of a into b at c."""
    n = element_bytes(x.parts[-1])
    a, b = reader(program, x.operands[1], n), reader(program, x.operands[2], n)
    c, d = reader(program, x.operands[3], 4), reader(program, x.operands[4], 4)
    limit = (1 << 8 * n) - 1

    def bfi(w, R, m):
        positions, lengths = c(w, R) & U32(255), d(w, R) & U32(255)
        if (positions == positions[0]).all() and (lengths == lengths[0]).all():
            p, length = int(positions[0]), int(lengths[0])
            field = ((1 << length) - 1) << p & limit
            shifted = a(w, R) << UNSIGNED[n](p) if p < 8 * n else np.zeros(LANES, UNSIGNED[n])
            out = (shifted & UNSIGNED[n](field)) | (b(w, R) & UNSIGNED[n](limit ^ field))
        else:
            out = np.zeros(LANES, UNSIGNED[n])
            for i in range(LANES):
                p, length = int(positions[i]), int(lengths[i])
                field = ((1 << length) - 1) << p & limit
                out[i] = (int(a(w, R)[i]) << p & field) | (int(b(w, R)[i]) & (limit ^ field))
        put(R, x.operands[0], out, m)

    return bfi


# Source byte of byte i of the result, by the two low bits of the selector.
_PRMT_MODES = {
    "f4e": lambda c, i: c + i, "b4e": lambda c, i: c - i, "rc8": lambda c, i: c, "ecl": np.maximum, "ecr": np.minimum,
    "rc16": lambda c, i: 2 * (c & 1) + (i & 1),
}  # fmt: skip


def build_prmt(program, x: Instruction):
    """9.7.9.7."""
    mode = _PRMT_MODES[x.parts[2]] if len(x.parts) > 2 else None
    a, b, c = (reader(program, v, 4) for v in x.operands[1:4])

    def prmt(w, R, m):
        pool = np.stack([a(w, R), b(w, R)], 1).view(np.uint8).reshape(LANES, 8)
        selector = c(w, R)
        out = np.zeros((LANES, 4), np.uint8)
        for i in range(4):
            s = (selector >> U32(4 * i)) & U32(15) if mode is None else mode((selector & U32(3)).astype(np.int64), i)
            value = pool[np.arange(LANES), (s & 7).astype(np.int64)]
            out[:, i] = np.where(s & 8, np.where(value & 128, 255, 0), value) if mode is None else value
        put(R, x.operands[0], out.view(U32)[:, 0], m)

    return prmt


def build_shf(program, x: Instruction):
    """9.7.8.7 funnel shift."""
    left, clamp = x.parts[1] == "l", "clamp" in x.parts
    a, b, c = (reader(program, v, 4) for v in x.operands[1:4])

    def shf(w, R, m):
        n = c(w, R)
        n = np.minimum(n, U32(32)) if clamp else n & U32(31)
        both = b(w, R).astype(U64) << U64(32) | a(w, R)
        n = n.astype(U64)
        out = ((both << n) >> U64(32)) if left else both >> n
        put(R, x.operands[0], (out & U64(0xFFFFFFFF)).astype(U32), m)

    return shf


def build_lop3(program, x: Instruction):
    """9.7.8.6."""
    targets = _items(x.operands[0])
    predicate = reader(program, x.operands[5], 0) if len(targets) > 1 else None
    a, b, c = (reader(program, v, 4) for v in x.operands[1:4])
    table = x.operands[4].value

    def lop3(w, R, m):
        va, vb, vc = a(w, R), b(w, R), c(w, R)
        out = np.zeros(LANES, U32)
        for i in range(8):
            if table >> i & 1:
                out |= (va if i & 4 else ~va) & (vb if i & 2 else ~vb) & (vc if i & 1 else ~vc)
        put(R, targets[0], out, m)
        if predicate:
            p = predicate(w, R)
            put(R, targets[1], (out != 0) & p if "and" in x.parts else (out != 0) | p, m)

    return lop3


def _high_product(a: np.ndarray, b: np.ndarray, kind: str) -> np.ndarray:
    n = element_bytes(kind)
    view = SIGNED[n] if kind[0] == "s" else UNSIGNED[n]
    return np.array(
        [(int(p) * int(q) >> 8 * n) % (1 << 8 * n) for p, q in zip(a.view(view), b.view(view))], UNSIGNED[n]
    )


def build_mul_hi(program, x: Instruction):
    kind = x.parts[-1]
    sources = [reader(program, v, element_bytes(kind)) for v in x.operands[1:]]

    def mul_hi(w, R, m):
        v = [s(w, R) for s in sources]
        out = _high_product(v[0], v[1], kind)
        put(R, x.operands[0], out + v[2] if len(v) > 2 else out, m)

    return mul_hi


def build_carry(program, x: Instruction):
    """9.7.2: add.cc, addc, sub.cc, subc, mad.cc, madc; CC.CF is the register after the last."""
    op, kind = x.parts[0], x.parts[-1]
    raw = UNSIGNED[element_bytes(kind)]
    sources = [reader(program, v, element_bytes(kind)) for v in x.operands[1:]]

    def carry(w, R, m):
        a, b, *c = (s(w, R) for s in sources)
        if c:
            a, b = _high_product(a, b, kind) if "hi" in x.parts else a * b, c[0]
        carried = R[-1].astype(raw) if op[-1] == "c" else raw(0)
        if op.startswith("sub"):
            first = a - b
            out, carries = first - carried, (a < b) | (first < carried)
        else:
            first = a + b
            out = first + carried
            carries = (first < a) | (out < first)
        put(R, x.operands[0], out, m)
        if "cc" in x.parts:
            R[-1] = carries if m is None else np.where(m, carries, R[-1])

    return carry


# ---- floating point ------------------------------------------------------------------------------


def build_f32x2(program, x: Instruction):
    """9.7.3: add, mul, fma of packed pairs, each half rounded once."""
    op = x.parts[0]
    sources = [reader(program, v, 8) for v in x.operands[1:]]

    def f32x2(w, R, m):
        v = [np.ascontiguousarray(s(w, R)).view(F32) for s in sources]
        if "ftz" in x.parts:
            v = [formats.ftz(u) for u in v]
        out = {"add": lambda: v[0] + v[1], "sub": lambda: v[0] - v[1], "mul": lambda: v[0] * v[1]}
        result = formats.fma32(v[0], v[1], v[2]) if op == "fma" else out[op]()
        if "ftz" in x.parts:
            result = formats.ftz(result)
        put(R, x.operands[0], np.ascontiguousarray(result).view(U64), m)

    return f32x2


def build_half(program, x: Instruction):
    """9.7.4: add, sub, mul, fma, min, max, neg, abs of f16, bf16 and their pairs."""
    sources = [reader(program, v, element_bytes(x.parts[-1])) for v in x.operands[1:]]
    function = _half_function(x.parts[0], x.parts[-1], "NaN" in x.parts, "relu" in x.parts)
    return lambda w, R, m: put(R, x.operands[0], function(*(s(w, R) for s in sources)), m)


def _half_function(op: str, kind: str, nan: bool = False, relu: bool = False):
    """Function of raw bits, rounded once; `nan`: min and max propagate NaN."""
    base = kind.removesuffix("x2")

    def half(*bits):
        if op == "neg":
            return bits[0] ^ U16(0x8000)
        if op == "abs":
            return bits[0] & U16(0x7FFF)
        v = [formats.to_f64(b, base) for b in bits]
        if op == "fma":
            out = formats.add_odd(v[0] * v[1], v[2])
        elif op in ("min", "max"):
            out = (formats.minimum if op == "min" else formats.maximum)(*v)
            if nan:
                out = np.where(np.isnan(v[0]) | np.isnan(v[1]), np.nan, out)
        else:
            out = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[op](*v)
        return formats.narrow(formats.relu(out) if relu else out, base)

    return half if base == kind else functools.partial(formats.pair_map, half)


def build_math(program, x: Instruction):
    op = x.parts[0]
    flush = "ftz" in x.parts
    source = reader(program, x.operands[1], 4)
    function = {
        "ex2": formats.ex2, "lg2": formats.lg2, "rcp": formats.rcp, "rsqrt": formats.rsqrt, "sqrt": np.sqrt,
        "tanh": np.tanh, "sin": np.sin, "cos": np.cos,
    }[op]  # fmt: skip

    def math(w, R, m):
        v = source(w, R).view(F32)
        v = function(formats.ftz(v) if flush else v).astype(F32)
        put(R, x.operands[0], (formats.ftz(v) if flush else v).view(U32), m)

    return math


def build_minmax(program, x: Instruction):
    """min/max.f32 with .NaN or three inputs (9.7.3.11, 9.7.3.12)."""
    sources = [reader(program, v, 4) for v in x.operands[1:]]
    function = formats.minimum if x.parts[0] == "min" else formats.maximum

    def minmax(w, R, m):
        v = [s(w, R).view(F32) for s in sources]
        if "ftz" in x.parts:
            v = [formats.ftz(u) for u in v]
        out = functools.reduce(function, v)
        if "NaN" in x.parts:
            out = np.where(np.isnan(v).any(0), formats.CANONICAL_NAN_F32, out)
        put(R, x.operands[0], out.view(U32), m)

    return minmax


_FLOATS = ("f16", "bf16", "f32", "f64")
_INTEGRAL = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def build_cvt(program, x: Instruction):
    """9.7.9.21. Integer to integer without .sat is inlined."""
    *qualifiers, to, source_kind = x.parts[1:]
    base, target = to.removesuffix("x2"), x.operands[0]
    rounding = next((q for q in qualifiers if q in _INTEGRAL or q in ("rz", "rm", "rp")), "rn")
    flush, saturate, relu = "ftz" in qualifiers, "sat" in qualifiers, "relu" in qualifiers
    known = {"rn", "ftz", "sat", rounding}
    if base != to or relu:
        known = {"rn", "rz", "relu"} if source_kind == "f32" else set()
    elif base == "f64":
        known -= {"rz", "rm", "rp"}
    truncates = source_kind in _FLOATS and base not in _FLOATS
    if not known.issuperset(qualifiers) or (truncates and rounding not in _INTEGRAL):
        raise PtxError(f"{x.opcode} is not modelled")
    n, source_bytes = element_bytes(base), element_bytes(source_kind)
    sources = [reader(program, v, source_bytes) for v in x.operands[1:]]
    view = SIGNED[source_bytes] if source_kind[0] == "s" else UNSIGNED[source_bytes]
    limits = np.iinfo(SIGNED[n] if to[0] == "s" else UNSIGNED[n])
    nan = 1 << 8 * n - 1 if source_kind == "f64" or n == 8 else 0
    plain = source_kind == "f32" and {"rn", "relu"}.issuperset(qualifiers)
    nearest = {"f16": formats.f32_to_f16, "bf16": formats.f32_to_bf16}.get(base) if plain else None

    def clamp(v: np.ndarray) -> np.ndarray:
        clamped = [min(max(int(u), int(limits.min)), int(limits.max)) if u == u else nan for u in v]
        return np.array([u % (1 << 8 * n) for u in clamped], UNSIGNED[n])

    def convert(bits: np.ndarray) -> np.ndarray:
        if nearest:
            return nearest(formats.relu(bits.view(F32)) if relu else bits.view(F32))
        if source_kind in _FLOATS:
            v = formats.to_f64(bits, source_kind)
            v = formats.ftz(v) if flush and source_kind == "f32" else v
            v = _INTEGRAL[rounding](v) if rounding in _INTEGRAL else v
        else:
            v = bits.view(view)
        if base not in _FLOATS:
            return clamp(np.clip(v, -1e30, 1e30) if truncates else v)
        if source_kind not in _FLOATS:
            v = v.astype(np.float64) if base == "f64" else formats.integer_to_f64(v)
        v = np.where(v > 0, np.minimum(v, 1), 0.0) if saturate else v
        out = formats.narrow(formats.relu(v) if relu else v, base, "rn" if rounding in _INTEGRAL else rounding)
        return formats.ftz(out.view(F32)).view(U32) if flush and base == "f32" else out

    if base == to:
        return lambda w, R, m: put(R, target, widen(convert(sources[0](w, R)), to, target), m)

    def cvt_pair(w, R, m):
        high, low = (convert(s(w, R)) for s in sources)
        put(R, target, high.astype(U32) << U32(16) | low, m)

    return cvt_pair


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


def _barrier_arrive(w, x: Instruction, number: int, count: int | None, votes, needs_all: bool):
    """Adds this warp to the barrier; returns (barrier, generation)."""
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
        w.report(
            "barrier",
            f"barrier {number} expects {barrier.expected} threads, this warp says {count}",
            x.line,
        )
    barrier.expected = count
    barrier.arrived += LANES
    if barrier.arrived > count:
        w.report("barrier", f"barrier {number}: more than {count} threads arrive", x.line)
    token = cta.clocks.release(w.index)
    for mine, other in zip(barrier.gathering, token):
        np.maximum(mine, other, out=mine)
    if votes is not None:
        barrier.votes = [
            barrier.votes[0] + int(votes.sum()),
            barrier.votes[1] and bool(votes.all()),
            barrier.votes[2] or bool(votes.any()),
        ]
    generation = barrier.generation
    _barrier_settle(barrier, exited)
    w.machine.progress += 1
    return barrier, generation


def _barrier_settle(barrier, exited: int) -> None:
    if barrier.expected is not None and barrier.arrived and barrier.arrived + exited * LANES >= barrier.expected:
        barrier.generation += 1
        barrier.done = barrier.gathering
        barrier.gathering = barrier.clocks.zero()
        barrier.result, barrier.votes = tuple(barrier.votes), [0, True, False]
        barrier.arrived, barrier.expected = 0, None


def gate_barrier(program, x: Instruction):
    number, count, predicate = _barrier_operands(program, x)
    all_threads = count is None

    def gate(w, R, m):
        if not _converged(w, m):
            return Converge("the other lanes of its warp at a barrier")
        n = int(number(w, R)[lanes_of(m)[0]])
        c = int(count(w, R)[lanes_of(m)[0]]) if count else None
        votes = predicate(w, R)[FULL if m is None else m] if predicate else None
        barrier, generation = _barrier_arrive(w, x, n, c, votes, True)

        def ready():
            if barrier.generation == generation and all_threads:
                _barrier_settle(barrier, sum(v.finished for v in w.cta.warps))
            return barrier.generation > generation

        w.pending_barrier = barrier
        return Wait(f"barrier {n}", ready) if not ready() else None

    return gate


def build_barrier(program, x: Instruction):
    """After the wait: acquires, and delivers the vote."""
    number, _, _ = _barrier_operands(program, x)
    op = next((p for p in x.parts if p in ("popc", "and", "or")), None)

    def barrier_done(w, R, m):
        barrier = w.cta.named_barrier(int(number(w, R)[lanes_of(m)[0]]))
        w.cta.clocks.acquire(w.index, barrier.done)
        if op == "popc":
            put(R, x.operands[0], np.full(LANES, barrier.result[0], U32), m)
        elif op:
            put(R, x.operands[0], np.full(LANES, barrier.result[1 if op == "and" else 2]), m)

    return barrier_done


def build_barrier_arrive(program, x: Instruction):
    number, count, _ = _barrier_operands(program, x)

    def arrive(w, R, m):
        lane = lanes_of(m)[0]
        _barrier_arrive(w, x, int(number(w, R)[lane]), int(count(w, R)[lane]), None, False)

    return arrive


def _converged(w, m) -> bool:
    return m is None or not (w.alive & ~m).any()


def gate_converge(program, x: Instruction, mask_operand: int | None):
    """The lanes of the instruction's member mask must execute it together."""
    members = reader(program, x.operands[mask_operand], 4) if mask_operand is not None else None

    def gate(w, R, m):
        if m is None:
            return None
        if members is None:
            needed = FULL
        else:
            bits = int(np.bitwise_or.reduce(members(w, R)[m]))
            needed = (bits >> np.arange(LANES) & 1).astype(bool)
        if (needed & w.alive & ~m).any():
            return Converge("the other lanes of its member mask")
        return None

    return gate


# ---- the barrier of a cluster (9.7.13.3), which is of one CTA ------------------------------------


def build_cluster_barrier(program, x: Instruction):
    def arrive(w, R, m):
        if not _cluster_arrived(w):
            w.report("barrier", "a warp arrives again at barrier.cluster before the barrier completes")
        w.cluster_arrivals += 1
        clocks = w.cta.clocks
        gathering = w.cta.cluster_clocks.setdefault(w.cluster_arrivals, clocks.zero())
        if "relaxed" not in x.parts:
            for mine, other in zip(gathering, clocks.release(w.index)):
                np.maximum(mine, other, out=mine)
        w.machine.progress += 1

    def wait(w, R, m):
        if w.cluster_waits == w.cluster_arrivals:
            w.report("barrier", "barrier.cluster.wait without a barrier.cluster.arrive before it")
        else:
            w.cta.clocks.acquire(w.index, w.cta.cluster_clocks[w.cluster_arrivals])
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
    elif barrier.owner != w.index and w.cta.clocks.now[w.index, barrier.owner] < barrier.owner_epoch:
        w.report("race", f"the mbarrier at {address:#x} is used without an ordering after its mbarrier.init", line)
    return barrier


def _shared_address(program, operand, parts: list[str]):
    space = space_of(parts)
    where = address_reader(program, operand)
    if space == "shared":
        return where
    return lambda w, R: where(w, R) - U64(SHARED_WINDOW)


def build_mbarrier(program, x: Instruction):
    parts = x.parts
    op = parts[1]
    if op == "init":
        where = _shared_address(program, x.operands[0], parts)
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
                barrier.owner, barrier.owner_epoch = w.index, int(w.cta.clocks.now[w.index, w.index])
                w.cta.shared.mark(address, address + 8)
                w.cta.clocks.barrier[address // 4 : address // 4 + 2] = True
            w.machine.progress += 1

        return init
    if op == "inval":
        where = _shared_address(program, x.operands[0], parts)

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
        where = _shared_address(program, x.operands[0], parts)
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
    if op in ("try_wait", "test_wait"):
        return _build_mbarrier_wait(program, x)
    raise PtxError(f"{x.opcode} is not modelled")


def _expect(w, barrier, size: int) -> None:
    barrier.transactions += size
    if abs(barrier.transactions) >= 1 << 20:
        w.report("barrier", f"an mbarrier expects {barrier.transactions} bytes, the most is 2^20 - 1 (9.7.13.15.2)")


def _build_mbarrier_arrive(program, x: Instruction):
    parts = x.parts
    operands = list(x.operands)
    has_state = not isinstance(operands[0], Address)
    state = operands.pop(0) if has_state else Sink()
    where = _shared_address(program, operands[0], parts)
    expect = "expect_tx" in parts
    extra = reader(program, operands[1], 4) if len(operands) > 1 else None
    drop = parts[1] == "arrive_drop"

    def arrive(w, R, m):
        states = np.zeros(LANES, U64)
        token = w.cta.clocks.release(w.index)
        if "relaxed" in parts:  # orders nothing but what the tcgen05 fences add (9.7.16.6.3)
            token = (*w.cta.clocks.zero()[:2], token[2])
        for lane in lanes_of(m):
            barrier = mbarrier_at(w, int(where(w, R)[lane]), x.line)
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
            barrier.join(token)
            if drop:
                barrier.expected -= arrivals
            barrier.settle()
        w.machine.progress += 1
        if isinstance(state, Register):
            put(R, state, states, m)

    return arrive


def _wait_operands(program, x: Instruction):
    parts = x.parts
    where = _shared_address(program, x.operands[1], parts)
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

    It may give up before, after a time the system chooses: every other time in mode late, by chance in mode random.
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
            seen = [barrier] if done and barrier else []
        else:
            seen = []
            for lane in lanes:
                barrier, out[lane] = _ready(w, R, lane, where, state, parity, x.line)
                if out[lane] and barrier:
                    seen.append(barrier)
        for barrier in seen:
            barrier.observed = barrier.phase
            known = barrier.done
            if "relaxed" in x.parts:
                known = (*w.cta.clocks.zero()[:2], known[2])
            w.cta.clocks.acquire(w.index, known)
        put(R, target, out, m)

    return wait


# ---- registers (9.7.19.5) ------------------------------------------------------------------------


def gate_setmaxnreg(program, x: Instruction):
    wanted = x.operands[0].value
    if x.parts[1] != "inc":
        return gate_converge(program, x, None)

    def gate(w, R, m):
        if not _converged(w, m):
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


# ---- matrices through shared memory (9.7.14.5.15, 9.7.14.5.16) -----------------------------------


def build_matrix(program, x: Instruction):
    """ldmatrix and stmatrix m8n8.b16: lane 8i + r gives the address of row r of matrix i."""
    parts = x.parts
    if "m8n8" not in parts or parts[-1] != "b16":
        raise PtxError(f"{x.opcode} is not modelled")
    count = int(next(p for p in parts if p in ("x1", "x2", "x4"))[1:])
    store, transposed = parts[0] == "stmatrix", "trans" in parts
    address, vector = (x.operands[0], x.operands[1]) if store else (x.operands[1], x.operands[0])
    where = _shared_address(program, address, parts)
    items = _items(vector)
    lane = np.arange(LANES)
    # Element h of lane l: row l/4, column 2(l%4) + h; transposed: the other way round.
    line_number, position = lane // 4, 2 * (lane % 4)

    def matrix(w, R, m):
        rows = where(w, R)[: 8 * count]
        memory.check_alignment(rows, 16)
        memory.check_inside(rows, 16, w.cta.shared.size, w.cta.shared.name)
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
            )
            return
        values = read_memory(w, "shared", rows, 8, 2)
        data = np.stack(values, 1).view(U16).reshape(count, 8, 8)
        for i, item in enumerate(items):
            halves = np.empty((LANES, 2), U16)
            for h in range(2):
                halves[:, h] = data[i, position + h, line_number] if transposed else data[i, line_number, position + h]
            put(R, item, halves.view(U32)[:, 0], m)

    return matrix


# ---- the rest ------------------------------------------------------------------------------------


def _nothing(program, x: Instruction):
    return lambda w, R, m: None


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
    w.cta.clocks.fence_proxy(w.index)
    _fence_mbarrier_init(w, R, m)


def _fence_mbarrier_init(w, R, m) -> None:
    for barrier in w.cta.mbarriers.values():
        if barrier.owner == w.index:
            barrier.fenced = True


def build_trap(program, x: Instruction):
    def trap(w, R, m):
        raise Fault("trap", f"the kernel executes {x.opcode}", lanes_of(m)[0])

    return trap


def build_isspacep(program, x: Instruction):
    """9.7.9.19: the window of the parameters lies in that of global memory."""
    space = x.parts[1].split("__")[0]
    source = reader(program, x.operands[1], 8)

    def isspacep(w, R, m):
        a = source(w, R)
        if space == "param":
            region = w.cta.launch.parameters
            inside = (a >= U64(region.base)) & (a < U64(region.base + region.size))
        else:
            regions = [w.machine.memory.at(int(address)) for address in a]
            constant = np.array([region is not None and region.constant for region in regions])
            shared, local = (a >= U64(SHARED_WINDOW)) & (a < U64(LOCAL_WINDOW)), a >= U64(LOCAL_WINDOW)
            windows = {"const": constant, "shared": shared, "local": local, "global": ~(constant | shared | local)}
            inside = windows[space]
        put(R, x.operands[0], inside, m)

    return isspacep


def build_brx(program, x: Instruction, fall: int):
    """9.7.12.4: function of (warp, registers, lanes that branch) that gives every lane's next block."""
    targets = np.array([program.target(label) for label in program.kernel.branch_targets[x.operands[1].name]])
    index = reader(program, x.operands[0], 4)

    def brx(w, R, m):
        lanes = lanes_of(m)
        chosen = index(w, R)[lanes].astype(np.int64)
        if (chosen >= len(targets)).any():
            at = int(chosen.argmax())
            raise Fault("illegal", f"brx.idx with index {chosen[at]}, there are {len(targets)} targets", lanes[at])
        if "uni" in x.parts and len(np.unique(chosen)) > 1:
            w.report("illegal", "a brx.idx.uni of lanes with different indices")
        blocks = np.full(LANES, fall)
        blocks[lanes] = targets[chosen]
        return blocks

    return brx


def build_createpolicy(program, x: Instruction):
    return lambda w, R, m: put(R, x.operands[0], np.full(LANES, 1 << 60, U64), m)


def build_mapa(program, x: Instruction):
    source = reader(program, x.operands[1], element_bytes(x.parts[-1]))
    return lambda w, R, m: put(R, x.operands[0], source(w, R), m)


_INTEGERS = "u16 u32 u64 s16 s32 s64"
_HALVES = "f16 f16x2 bf16 bf16x2"
_COMPARISONS = "eq ne lt le gt ge and or xor"
_ATOMIC = "relaxed acquire release acq_rel cta cluster gpu sys global shared shared__cta shared__cluster L2__cache_hint"
_ACCESS = (
    "weak volatile relaxed acquire release mmio cta cluster gpu sys global const local param param__entry param__func shared "
    "shared__cta shared__cluster ca cg cs lu cv wb wt nc v2 v4 v8 L1__evict_normal L1__evict_unchanged L1__evict_first "
    "L1__evict_last L1__no_allocate L2__evict_normal L2__evict_first L2__evict_last L2__cache_hint L2__64B L2__128B L2__256B"
)
# Of the arithmetic instructions, ld and st: opcodes, types, and the qualifiers between them that are modelled.
_MODELLED: dict[str, dict[str, set[str]]] = {}
for _ops, _kinds, _qualifiers in (
    ("add sub", _INTEGERS, "cc"), ("addc subc", "u32 u64 s32 s64", "cc"), ("mul", _INTEGERS, "lo hi"),
    ("mul mad", "u16 u32 s16 s32", "lo hi wide"), ("mad", _INTEGERS, "lo hi cc"), ("madc", "u32 u64 s32 s64", "lo hi cc"),
    ("add sub mul fma", "f32 f32x2", "rn ftz"), ("mad", "f32", "rn ftz"), ("add sub mul", "f64", "rn"),
    ("add sub mul", _HALVES, "rn"), ("fma", _HALVES, "rn relu"), ("div rem", _INTEGERS, ""),
    ("div", "f32", "rn approx full ftz"), ("div", "f64", "rn"), ("neg abs", "s16 s32 s64 f64 " + _HALVES, ""),
    ("neg abs", "f32", "ftz"), ("min max", _INTEGERS + " f64", ""), ("min max", "f32", "ftz NaN"),
    ("min max", _HALVES, "NaN"), ("ex2 lg2 rsqrt sin cos", "f32", "approx ftz"), ("rcp sqrt", "f32", "approx rn ftz"),
    ("tanh", "f32", "approx"), ("and or xor not", "b16 b32 b64 pred", ""), ("shl shr", "b16 b32 b64 " + _INTEGERS, ""),
    ("shf", "b32", "l r wrap clamp"), ("lop3", "b32", "and or"), ("popc clz brev bfi", "b32 b64", ""),
    ("bfe", "u32 u64 s32 s64", ""), ("bfind", "u32 u64 s32 s64", "shiftamt"),
    ("selp", "b16 b32 b64 f32 f64 " + _INTEGERS, ""), ("mov", "b16 b32 b64 f32 f64 pred " + _INTEGERS, ""),
    ("setp", "b16 b32 b64", "eq ne and or xor"), ("setp", "s16 s32 s64", _COMPARISONS),
    ("setp", "u16 u32 u64", _COMPARISONS + " lo ls hi hs"),
    ("setp", "f32 f64", _COMPARISONS + " equ neu ltu leu gtu geu num nan"), ("setp", "f32", "ftz"),
    ("redux", "u32 s32", "sync add min max"), ("redux", "b32", "sync and or xor"),
    ("redux", "f32", "sync min max abs NaN"), ("atom red", "b32 b64", "and or xor exch cas " + _ATOMIC),
    ("atom", "b16", "cas " + _ATOMIC), ("atom red", "u32 u64 s32 s64", "add min max " + _ATOMIC),
    ("atom red", "u32", "inc dec"), ("atom red", "f64", "add " + _ATOMIC), ("atom red", "f32", "add v2 v4 " + _ATOMIC),
    ("atom red", _HALVES, "add min max noftz v2 v4 v8 " + _ATOMIC),
    ("ld ldu st", "b8 b16 b32 b64 u8 s8 f32 f64 " + _INTEGERS, _ACCESS),
):  # fmt: skip
    for _op in _ops.split():
        for _kind in _kinds.split():
            _MODELLED.setdefault(_op, {}).setdefault(_kind, set()).update(_qualifiers.split())


def check_qualifiers(program, x: Instruction) -> None:
    """Of the instructions in `_MODELLED`.

    Raises:
        PtxError: the type or a qualifier is not modelled.
    """
    kinds = _MODELLED.get(x.parts[0])
    if kinds is not None and not kinds.get(x.parts[-1], frozenset()).issuperset(x.parts[1:-1]):
        raise PtxError(f"{program.name}, line {x.line}: {x.opcode} is not modelled")


_BUILDERS = {
    "ld": build_ld, "ldu": build_ld, "st": build_st, "atom": build_atomic, "red": build_atomic, "shfl": collective,
    "vote": collective, "match": collective, "redux": collective, "elect": collective, "activemask": build_activemask,
    "addc": build_carry, "subc": build_carry, "madc": build_carry, "div": build_div, "rem": build_div, "popc": _unary(_popcount, 0),
    "clz": _unary(_leading_zeros, 0), "brev": _unary(_reverse_bits, 0), "bfind": build_bfind, "bfe": build_bfe,
    "bfi": build_bfi, "prmt": build_prmt, "shf": build_shf, "lop3": build_lop3, "ex2": build_math, "lg2": build_math,
    "rcp": build_math, "rsqrt": build_math, "sqrt": build_math, "tanh": build_math, "sin": build_math,
    "cos": build_math, "cvt": build_cvt, "mbarrier": build_mbarrier, "setmaxnreg": build_setmaxnreg,
    "stmatrix": build_matrix, "ldmatrix": build_matrix, "fence": build_fence, "membar": build_fence,
    "trap": build_trap, "call": build_call, "brkpt": build_trap, "isspacep": build_isspacep, "createpolicy": build_createpolicy,
    "mapa": build_mapa, "prefetch": _nothing, "prefetchu": _nothing, "applypriority": _nothing, "discard": _nothing,
    "nanosleep": _nothing, "griddepcontrol": build_griddepcontrol, "pmevent": _nothing,
}  # fmt: skip


def build(program, x: Instruction):
    """The closure of one instruction.

    Raises:
        PtxError: it is not modelled.
    """
    from . import asynchronous

    op, kind = x.parts[0], x.parts[-1]
    if x.parts[:2] == ["barrier", "cluster"]:
        return build_cluster_barrier(program, x)
    if op in ("bar", "barrier"):
        action = next((p for p in x.parts[1:] if p in ("warp", "arrive", "sync", "red")), None)
        if action == "warp":
            return _nothing(program, x)
        return build_barrier_arrive(program, x) if action == "arrive" else build_barrier(program, x)
    if op in asynchronous.OPCODES:
        return asynchronous.build(program, x)
    if op in ("add", "sub", "mul", "fma", "mad", "min", "max", "neg", "abs"):
        if "cc" in x.parts:
            return build_carry(program, x)
        if kind == "f32x2":
            return build_f32x2(program, x)
        if kind.startswith(("f16", "bf16")):
            return build_half(program, x)
        if "hi" in x.parts:
            return build_mul_hi(program, x)
        if op in ("min", "max"):
            return build_minmax(program, x)
    if op not in _BUILDERS:
        raise PtxError(f"{program.name}, line {x.line}: {x.opcode} is not modelled")
    return _BUILDERS[op](program, x)


_CONVERGE_MASK = {"shfl": -1, "vote": -1, "match": -1, "redux": -1, "elect": -1}
_COLLECTIVES = {
    "shfl": build_shfl, "vote": build_vote, "match": build_match, "redux": build_redux, "elect": build_elect,
}  # fmt: skip


def is_gated(x: Instruction) -> bool:
    """Whether a group of lanes may have to wait before the instruction, which therefore starts a block."""
    parts = x.parts
    op = parts[0]
    if op in ("bar", "barrier"):
        return True
    if op == "mbarrier":
        return parts[1] == "try_wait"
    if op == "cp":
        return "wait_group" in parts or "wait_all" in parts
    if op == "griddepcontrol":
        return "wait" in parts
    return op in ("shfl", "vote", "match", "redux", "elect", "setmaxnreg", "wgmma", "tcgen05", "ldmatrix", "stmatrix")


def gate(program, x: Instruction):
    inner = _gate(program, x)
    if x.predicate is None or inner is None:
        return inner
    i, negated = x.predicate.index, x.negated

    def predicated(w, R, m):
        mask = ~R[i] if negated else R[i]
        mask = mask if m is None else mask & m
        if not mask.any():
            return None
        return inner(w, R, None if mask.all() else mask)

    return predicated


def _gate(program, x: Instruction):
    from . import asynchronous

    op = x.parts[0]
    if op in ("bar", "barrier"):
        if "warp" in x.parts:
            return gate_converge(program, x, 0)
        if "cluster" in x.parts:
            return gate_cluster_barrier(program, x)
        return gate_converge(program, x, None) if "arrive" in x.parts else gate_barrier(program, x)
    if op == "mbarrier":
        return gate_mbarrier(program, x)
    if op == "setmaxnreg":
        return gate_setmaxnreg(program, x)
    if op == "griddepcontrol":
        return gate_griddepcontrol(program, x)
    if op in asynchronous.OPCODES:
        return asynchronous.gate(program, x)
    if op in _CONVERGE_MASK:
        return gate_converge(program, x, _CONVERGE_MASK[op])
    return gate_converge(program, x, None)
