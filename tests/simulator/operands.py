"""Operands: what an instruction reads and writes. Sections are those of the PTX ISA 9.1."""

from __future__ import annotations

import numpy as np

from . import formats, memory
from .cta import LANES
from .formats import F32, U16, U32, U64
from .memory import ALL_LANES, SHARED_WINDOW
from .ptx import Address, Immediate, PtxError, Register, Sink, Special, Symbol, Vector

I32, I64 = np.int32, np.int64
UNSIGNED = memory.UNSIGNED
SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}

SPECIALS = {
    **dict.fromkeys(("%tid.x", "%tid.y", "%tid.z", "%laneid", "%warpid")),  # a warp knows them from the start
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


def uniform(w, values: np.ndarray, mask, what: str) -> int:
    """The value of an operand that every lane must give alike; reported as illegal where they differ."""
    values = values if mask is None else values[mask]
    if (values != values[0]).any():
        w.report("illegal", f"{what} differs between the lanes of a warp")
    return int(values[0])


def items_of(operand) -> tuple:
    return operand.items if isinstance(operand, Vector) else (operand,)


def element_bytes(kind: str) -> int:
    return {"f16": 2, "bf16": 2, "f16x2": 4, "bf16x2": 4, "f32": 4, "f64": 8}.get(kind) or int(kind[1:]) // 8


def widen(value: np.ndarray, kind: str, target) -> np.ndarray:
    """Sign- or zero-extended to the register's width."""
    size = value.dtype.itemsize
    if not isinstance(target, Register) or target.bytes == size:
        return value
    if kind[0] == "s":
        return value.view(SIGNED[size]).astype(SIGNED[target.bytes]).view(UNSIGNED[target.bytes])
    return value.astype(UNSIGNED[target.bytes])


def shared_address(program, operand, parts: list[str]):
    space = space_of(parts)
    where = address_reader(program, operand)
    if space == "shared":
        return where
    return lambda w, R: where(w, R) - U64(SHARED_WINDOW)
