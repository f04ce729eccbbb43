"""Warp instructions, and the gate of those that lanes execute together (PTX ISA 9.1)."""

from __future__ import annotations

import functools

import numpy as np

from . import formats
from .cta import FULL, LANES, Converge
from .formats import F32, U32
from .operands import I32, element_bytes, items_of, put, reader
from .ptx import Instruction, Sink, Vector


def collective(program, x: Instruction):
    """An instruction of COLLECTIVES: lanes of different member masks, the last operand, are separate groups."""
    run = COLLECTIVES[x.parts[0]](program, x)
    members = reader(program, x.operands[-1], 4)

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
    mode = x.parts[2]
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
        items = items_of(target)
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
    items = items_of(x.operands[0])

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


def build_warp_sync(program, x: Instruction):
    """9.7.13.2 bar.warp.sync: orders memory among the threads that take part; the other instructions here do not."""
    return lambda w, R, m: w.cta.clocks.synchronise(w.index, w.lanes(m))


def converged(w, m) -> bool:
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


COLLECTIVES = {
    "shfl": build_shfl, "vote": build_vote, "match": build_match, "redux": build_redux, "elect": build_elect,
    "bar": build_warp_sync,
}  # fmt: skip
