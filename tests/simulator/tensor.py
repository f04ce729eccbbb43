"""tcgen05: tensor memory, its loads, stores and MMAs (PTX ISA 9.0, 9.7.16)."""

from __future__ import annotations

from .ptx import Instruction, PtxError


def build(program, x: Instruction):
    raise PtxError(f"{program.name}, line {x.line}: {x.opcode} is not modelled")


def gate(program, x: Instruction):
    return None
