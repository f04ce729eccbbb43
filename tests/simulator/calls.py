"""The device functions that every toolkit provides: __assertfail and vprintf."""

from __future__ import annotations

import re
import sys

import numpy as np

from .accesses import read_memory
from .cta import LANES
from .formats import U32, U64
from .memory import Fault
from .operands import I32, SIGNED, UNSIGNED, lanes_of, put, reader
from .ptx import Instruction, PtxError, Symbol


def build_call(program, x: Instruction):
    """Of the device functions every toolkit provides; real calls are not modelled."""
    name = next((o.name for o in x.operands if isinstance(o, Symbol)), "a register")
    if name not in _FUNCTIONS:
        raise PtxError(f"a call of {name} is not modelled")
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
        if precision == ".*":
            number = int(argument(4).view(I32)[0])
            precision = f".{number}" if number >= 0 else ""
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
