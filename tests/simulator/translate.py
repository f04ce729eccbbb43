"""PTX kernels to Python: one function a basic block, over 32-lane arrays of raw register bits.

Registers are immutable arrays (`uint16/32/64` or `bool`), so `mov` shares them and a masked write makes a new one.
Cheap instructions become expressions in the function's text; the others become closures it calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np

from . import instructions, memory, operands
from .ptx import (
    TYPE_BYTES,
    Address,
    Immediate,
    Instruction,
    Kernel,
    Module,
    PtxError,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
)

LANES = 32
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SETP = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "lo": "<",
    "ls": "<=",
    "hi": ">",
    "hs": ">=",
}
_UNORDERED = {"equ": "==", "neu": "!=", "ltu": "<", "leu": "<=", "gtu": ">", "geu": ">="}
_VIEWS = {"s8": "I8", "s16": "I16", "s32": "I32", "s64": "I64", "f32": "F32", "f64": "F64"}


_NO_DESTINATION = ("st", "red", "brx", "tcgen05", "stmatrix", "cp", "bar", "barrier", "bra", "mbarrier", "prefetch")


def _registers(operands: list) -> Iterator[Register]:
    for operand in operands:
        for r in operand.items if isinstance(operand, Vector) else (operand,):
            r = r.base if isinstance(r, Address) else r
            if isinstance(r, Register):
                yield r


def _bits(table: dict[int, int], operands: list) -> int:
    """Of all registers among the operands."""
    bits = 0
    for r in _registers(operands):
        bits |= table.get(r.index, 0)
    return bits


@contextlib.contextmanager
def _located(kernel: str, x: Instruction):
    """What goes wrong inside is a PtxError that names the kernel and the line."""
    try:
        yield
    except PtxError as error:
        raise PtxError(f"{kernel}, line {x.line}: {error}") from error
    except (KeyError, AttributeError, IndexError, ValueError, TypeError, OverflowError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise PtxError(f"{kernel}, line {x.line}: {x.opcode} is not modelled ({reason})") from error


def type_bytes(kind: str) -> int:
    """Bytes of a register of this type; 0 for a predicate."""
    return 0 if kind == "pred" else TYPE_BYTES[kind]


class Block:
    """A basic block: `run(warp, registers, mask)` returns the next block, -1 = exit, (taken, target, fall-through), or an
    array of every lane's next block (brx.idx).
    """

    def __init__(self, kernel: str, line: int, opcodes: tuple[str, ...]):
        self.kernel, self.line, self.opcodes, self.size = kernel, line, opcodes, len(opcodes)
        self.gate = None
        self._full = self._masked = None

    def run(self, warp, registers, mask):
        if mask is None:
            if self._full is None:
                self._full = self._compile(False)
            return self._full(warp, registers, None)
        if self._masked is None:
            self._masked = self._compile(True)
        return self._masked(warp, registers, mask)


class Program:
    """A translated kernel; `addresses` gives the host address of every module variable."""

    def __init__(self, module: Module, kernel: Kernel, addresses: dict[str, int]):
        self.module, self.kernel, self.name = module, kernel, kernel.name
        if kernel.cluster != 1:
            raise PtxError(f"{self.name}, line {kernel.line}: a cluster of several CTAs is not modelled")
        self.parameters = {p.name: p for p in kernel.parameters}
        self.symbols: dict[str, int] = dict(addresses)
        offset = 0
        shared = [v for v in [*module.variables.values(), *kernel.variables] if v.space == "shared"]
        used = {
            x.name if isinstance(x, Symbol) else x.base.name
            for i in kernel.instructions
            for x in i.operands
            if isinstance(x, Symbol) or (isinstance(x, Address) and isinstance(x.base, Symbol))
        }
        for variable in sorted(shared, key=lambda v: v.bytes == 0):
            if variable.name not in used:
                continue
            offset = -(-offset // variable.align) * variable.align
            self.symbols[variable.name] = offset
            offset += variable.bytes
        self.static_shared_bytes = offset
        local = 0
        for variable in kernel.variables:
            if variable.space == "local":
                local = -(-local // variable.align) * variable.align
                self.symbols[variable.name] = local
                local += variable.bytes
        self.local_bytes = local
        self.lets_next_start = any("launch_dependents" in x.parts for x in kernel.instructions)
        poison = {0: np.zeros(LANES, bool)}
        for size, kind in UNSIGNED.items():
            poison[size] = np.full(LANES, int.from_bytes(b"\xcb" * size, "little"), kind)
        self.initial_registers = [poison[r.bytes] for r in kernel.registers] + [poison[0]]  # the last: CC.CF
        self._find_asynchronous_registers()
        self.blocks: list[Block] = []
        self._translate()

    def _find_asynchronous_registers(self) -> None:
        """Registers that asynchronous instructions read or write after they were issued, as bits."""
        self.wgmma_registers: dict[int, int] = {}  # accumulators and fragments of A: a bit a register
        self.load_registers: dict[int, int] = {}  # destinations of tcgen05.ld: a bit an instruction
        self.load_bits: dict[int, int] = {}  # by the instruction's id
        for x in self.kernel.instructions:
            if x.parts[:2] == ["wgmma", "mma_async"]:
                for r in _registers(x.operands[:2]):
                    self.wgmma_registers.setdefault(r.index, 1 << len(self.wgmma_registers))
            if x.parts[:2] == ["tcgen05", "ld"]:
                bit = self.load_bits[id(x)] = 1 << len(self.load_bits)
                for r in _registers(x.operands[:1]):
                    self.load_registers[r.index] = self.load_registers.get(r.index, 0) | bit

    # ---- control-flow graph

    def _translate(self) -> None:
        code = self.kernel.instructions
        starts = {0, *self.kernel.labels.values()}
        for i, instruction in enumerate(code):
            op = instruction.parts[0]
            if op in ("bra", "ret", "exit", "brx", "trap") or (op == "setmaxnreg"):
                starts.add(i + 1)
            if instructions.is_gated(instruction):
                starts.add(i)
        ordered = sorted(s for s in starts if s <= len(code))
        number = {s: n for n, s in enumerate(ordered)}
        self.block_of = number
        for n, start in enumerate(ordered):
            end = ordered[n + 1] if n + 1 < len(ordered) else len(code)
            part = code[start:end]
            line = part[0].line if part else self.kernel.line
            block = Block(self.name, line, tuple(i.opcode for i in part) or ("exit",))
            if part and instructions.is_gated(part[0]):
                with _located(self.name, part[0]):
                    block.gate = instructions.gate(self, part[0])
            block._compile = lambda masked, part=part, n=n: _Emitter(self, part, n, masked).compile()
            self.blocks.append(block)

    def target(self, operand) -> int:
        if not isinstance(operand, Symbol) or operand.name not in self.kernel.labels:
            raise PtxError(f"unknown branch target {operand}")
        return self.block_of[self.kernel.labels[operand.name]]


class _Emitter:
    def __init__(self, program: Program, part: list[Instruction], number: int, masked: bool):
        self.program, self.part, self.number, self.masked = program, part, number, masked
        self.lines: list[str] = []
        self.names = dict(operands.NAMESPACE)
        self.constants: dict[tuple, str] = {}

    def compile(self):
        last = self.number + 1 if self.number + 1 < len(self.program.blocks) else -1
        ended = False
        first = self.part[0].parts if self.part else []
        begin = 1 if first[:1] == ["wgmma"] or (first[:1] == ["tcgen05"] and first[1] != "st") else 0
        if begin:  # what it reads itself
            self.access_loads(
                _bits(self.program.load_registers, self.part[0].operands[first[1] == "ld" :]), 0, self.part[0].line
            )
        for i, instruction in enumerate(self.part):
            if i == begin:
                self.access_asynchronous_registers(self.part[i:])
            ended = self.instruction(instruction)
        if not ended:
            self.lines.append(f"return {last}")
        text = "def block(w, R, m):\n" + "\n".join("    " + x for x in self.lines)
        exec(compile(text, f"<{self.program.name[:60]} block {self.number}>", "exec"), self.names)
        return self.names["block"]

    def access_loads(self, used: int, overwritten: int, line: int) -> None:
        if used | overwritten:
            self.lines.append(f"if w.loading & {used | overwritten}: w.access_loads({used}, {overwritten}, {line})")

    def access_asynchronous_registers(self, part: list[Instruction]) -> None:
        """Tells the warp which registers of asynchronous instructions the rest of the block accesses."""
        touched = used = overwritten = 0
        for x in part:
            sources = 0 if x.parts[0] in _NO_DESTINATION else 1  # where they begin
            touched |= _bits(self.program.wgmma_registers, x.operands)
            used |= _bits(self.program.load_registers, x.operands[sources:]) & ~overwritten
            overwritten |= _bits(self.program.load_registers, x.operands[:sources]) & ~used
        if touched:
            self.lines.append(f"w.touch_wgmma({touched}, {part[0].line})")
        self.access_loads(used, overwritten, part[0].line)

    # ---- operands

    def constant(self, value: int, size: int) -> str:
        key = (value, size)
        if key not in self.constants:
            name = f"K{len(self.constants)}"
            if size == 0:
                array = np.full(LANES, bool(value))
            else:
                array = np.full(LANES, value % (1 << 8 * size), UNSIGNED[size])
            self.constants[key] = name
            self.names[name] = array
        return self.constants[key]

    def source(self, operand, size: int) -> str:
        if isinstance(operand, Register):
            if operand.bytes != size and size and operand.bytes:
                return f"R[{operand.index}].astype(U{8 * size})"
            return f"R[{operand.index}]"
        if isinstance(operand, Immediate):
            return self.constant(operand.bits(size), size)
        if isinstance(operand, Special):
            return self.special(operand.name, size)
        if isinstance(operand, Symbol):
            return self.constant(operands.symbol_value(self.program, operand), size)
        if isinstance(operand, tuple) and operand[0] == "not":
            return f"(~R[{operand[1].index}])"
        raise PtxError(f"operand not understood: {operand}")

    def typed(self, operand, kind: str) -> str:
        text = self.source(operand, type_bytes(kind))
        return f"{text}.view({_VIEWS[kind]})" if kind in _VIEWS else text

    def special(self, name: str, size: int) -> str:
        narrowed = "" if size == operands.special_bytes(name) else f".astype(U{8 * size})"
        if name in operands.SPECIALS:
            return f"S(w, {name!r}){narrowed}"
        raise PtxError(f"special register {name} is not modelled")

    # ---- emission

    def put(self, register, value: str, mask: str | None) -> None:
        if isinstance(register, Sink):
            return
        if mask is None:
            self.lines.append(f"R[{register.index}] = {value}")
        else:
            self.lines.append(f"R[{register.index}] = W({mask}, {value}, R[{register.index}])")

    def instruction(self, x: Instruction) -> bool:
        """Emits one instruction; True if it ends the block."""
        with _located(self.program.name, x):
            return self._instruction(x)

    def _instruction(self, x: Instruction) -> bool:
        parts = x.parts
        op = parts[0]
        instructions.check_qualifiers(x)
        mask = active = "m" if self.masked else None
        if x.predicate is not None:
            condition = f"{'~' if x.negated else ''}R[{x.predicate.index}]"
            active = f"{condition} & m" if self.masked else condition
            if op in ("bra", "brx") and "uni" in parts:
                self.lines.append(f"w.check_uniform({condition}, m, {x.line})")
        if op == "bra":
            target = self.program.target(x.operands[0])
            if x.predicate is None:
                self.lines.append(f"return {target}")
                return True
            self.lines.append(f"return ({active}, {target}, {self.number + 1})")
            return True
        if op == "brx":
            self.names["brx"] = instructions.build_brx(self.program, x, self.number + 1)
            self.lines.append(f"w.line = {x.line}; return brx(w, R, {active})")
            return True
        if op in ("ret", "exit"):
            if x.predicate is None:
                self.lines.append("return -1")
                return True
            self.lines.append(f"return ({active}, -1, {self.number + 1})")
            return True
        if x.predicate is not None:
            self.lines.append(f"q = {active}")
            mask = "q"
        if self.inline(x, parts, mask):
            return False
        closure = instructions.build(self.program, x)
        name = f"H{len(self.names)}"
        self.names[name] = closure
        call = f"w.line = {x.line}; {name}(w, R, {mask or 'None'})"
        self.lines.append(f"if q.any(): {call}" if mask == "q" else call)
        return False

    def inline(self, x: Instruction, parts: list[str], mask: str | None) -> bool:
        op, kind, o = parts[0], parts[-1], x.operands
        if op == "mov":
            return self._mov(o, kind, mask)
        if op in ("add", "sub", "mul", "mad", "fma", "min", "max") and not kind.startswith(("f16", "bf16")):
            return self._arithmetic(o, op, parts, kind, mask)
        if op in ("and", "or", "xor"):
            sign = {"and": "&", "or": "|", "xor": "^"}[op]
            n = type_bytes(kind)
            self.put(o[0], f"{self.source(o[1], n)} {sign} {self.source(o[2], n)}", mask)
            return True
        if op == "not":
            self.put(o[0], f"~{self.source(o[1], type_bytes(kind))}", mask)
            return True
        if op == "neg" and kind in ("s16", "s32", "s64"):
            n = type_bytes(kind)
            self.put(o[0], f"{self.constant(0, n)} - {self.source(o[1], n)}", mask)
            return True
        if op in ("neg", "abs") and kind in ("f32", "f64"):
            n = type_bytes(kind)
            value, sign = self.source(o[1], n), 1 << 8 * n - 1
            if "ftz" in parts:
                value = f"ftz({self.typed(o[1], kind)}).view(U32)"
            self.put(o[0], f"{value} {'^' if op == 'neg' else '&'} {self.constant(sign - (op == 'abs'), n)}", mask)
            return True
        if op == "abs" and kind[0] == "s":
            self.put(o[0], f"np.abs({self.typed(o[1], kind)}).view(U{8 * type_bytes(kind)})", mask)
            return True
        if op == "copysign" and kind in ("f32", "f64"):  # the sign of the first, the rest of the second
            n = type_bytes(kind)
            sign, rest = 1 << 8 * n - 1, (1 << 8 * n - 1) - 1
            a = f"{self.source(o[1], n)} & {self.constant(sign, n)}"
            self.put(o[0], f"({a}) | ({self.source(o[2], n)} & {self.constant(rest, n)})", mask)
            return True
        if op in ("shl", "shr"):
            return self._shift(o, op, kind, mask)
        if op == "setp":
            return self._setp(o, parts, kind, mask)
        if op == "selp":
            n = type_bytes(kind)
            self.put(o[0], f"W({self.source(o[3], 0)}, {self.source(o[1], n)}, {self.source(o[2], n)})", mask)
            return True
        if op == "cvta":
            return self._cvta(o, parts, mask)
        if op == "cvt" and len(parts) == 3 and all(p[0] in "sub" and p[1:].isdigit() for p in parts[1:]):
            to, source = parts[1], parts[2]
            value = self.typed(o[1], source)
            n = type_bytes(to)
            if type_bytes(source) == n:
                value = self.source(o[1], n)
            else:
                value = f"{value}.astype({'I' if source[0] == 's' and n > type_bytes(source) else 'U'}{8 * n})"
                value += f".view(U{8 * n})"
            if isinstance(o[0], Register) and o[0].bytes != n:  # e.g. cvt.u8 to a 16-bit register: extended
                signed = "I" if to[0] == "s" else "U"
                value = f"({value}).view({signed}{8 * n}).astype({signed}{8 * o[0].bytes}).view(U{8 * o[0].bytes})"
            self.put(o[0], value, mask)
            return True
        if op == "ex2" and kind == "f32":
            flush = "ftz" in parts
            value = f"ex2({'ftz(' if flush else ''}{self.typed(o[1], 'f32')}{')' if flush else ''})"
            self.put(o[0], f"{f'ftz({value})' if flush else value}.view(U32)", mask)
            return True
        return False

    def _mov(self, o, kind: str, mask) -> bool:
        size = type_bytes(kind)
        if isinstance(o[1], Vector):
            part = size // len(o[1].items)
            shift, bits = 8 * part, 8 * size
            terms = [
                f"({self.source(v, part)}.astype(U{bits}) << U{bits}({i * shift}))"
                if i
                else f"{self.source(v, part)}.astype(U{bits})"
                for i, v in enumerate(o[1].items)
            ]
            self.put(o[0], " | ".join(terms), mask)
            return True
        if isinstance(o[0], Vector):
            part = size // len(o[0].items)
            text = self.source(o[1], size)
            self.lines.append(f"t = {text}")
            for i, v in enumerate(o[0].items):
                self.put(v, f"(t >> U{8 * size}({8 * part * i})).astype(U{8 * part})", mask)
            return True
        self.put(o[0], self.source(o[1], size), mask)
        return True

    def _arithmetic(self, o, op: str, parts: list[str], kind: str, mask) -> bool:
        n = type_bytes(kind)
        if kind in ("f32", "f64"):
            flush = "ftz" in parts
            a = [self.typed(v, kind) for v in o[1:]]
            if flush:
                a = [f"ftz({v})" for v in a]
            if op in ("fma", "mad"):
                value = f"fma32({a[0]}, {a[1]}, {a[2]})"
            elif op in ("min", "max"):
                if len(o) != 3 or "NaN" in parts:
                    return False
                value = f"{op}imum({a[0]}, {a[1]})"
            else:
                value = f"({a[0]} {dict(add='+', sub='-', mul='*')[op]} {a[1]})"
            if flush:
                value = f"ftz({value})"
            self.put(o[0], f"{value}.view(U{8 * n})", mask)
            return True
        if kind == "f32x2":
            return False
        if "cc" in parts or "hi" in parts:
            return False
        if op in ("min", "max"):
            self.put(o[0], f"np.{op}imum({self.typed(o[1], kind)}, {self.typed(o[2], kind)}).view(U{8 * n})", mask)
            return True
        if "wide" in parts:
            signed = "I" if kind[0] == "s" else "U"
            value = f"({self.typed(o[1], kind)}.astype({signed}{16 * n}) * {self.typed(o[2], kind)})"
            value += f".view(U{16 * n})"
            if op == "mad":
                value += f" + {self.source(o[3], 2 * n)}"
            self.put(o[0], value, mask)
            return True
        a, b = self.source(o[1], n), self.source(o[2], n)
        value = f"{a} {dict(add='+', sub='-', mul='*', mad='*')[op]} {b}"
        if op == "mad":
            value += f" + {self.source(o[3], n)}"
        self.put(o[0], value, mask)
        return True

    def _shift(self, o, op: str, kind: str, mask) -> bool:
        """Amounts past the width give 0 or the sign (PTX ISA 9.7.8)."""
        n = type_bytes(kind)
        sign = "<<" if op == "shl" else ">>"
        value = self.typed(o[1], kind)
        signed = "I" if kind[0] == "s" else "U"
        if isinstance(o[2], Immediate):
            amount = o[2].value % (1 << 32)
            if amount >= 8 * n:
                if signed == "U":
                    self.put(o[0], self.constant(0, n), mask)
                    return True
                amount = 8 * n - 1
            self.put(o[0], f"({value} {sign} {signed}{8 * n}({amount})).view(U{8 * n})", mask)
            return True
        self.lines.append(f"t = {self.source(o[2], 4)}")
        limit = f"np.minimum(t, U32({8 * n - 1})).astype({signed}{8 * n})"
        shifted = f"({value} {sign} {limit}).view(U{8 * n})"
        if signed == "U":
            shifted = f"W(t < U32({8 * n}), {shifted}, {self.constant(0, n)})"
        self.put(o[0], shifted, mask)
        return True

    def _setp(self, o, parts: list[str], kind: str, mask) -> bool:
        """setp.cmp[.bool][.ftz].type p[|q], a, b[, c]."""
        comparison = parts[1]
        flush = "ftz" in parts
        if kind.startswith(("f16", "bf16")):
            return False
        a, b = self.typed(o[1], kind), self.typed(o[2], kind)
        if flush:
            a, b = f"ftz({a})", f"ftz({b})"
        if comparison in _UNORDERED:
            value = f"(({a} {_UNORDERED[comparison]} {b}) | ({a} != {a}) | ({b} != {b}))"
        elif comparison == "num":
            value = f"(({a} == {a}) & ({b} == {b}))"
        elif comparison == "nan":
            value = f"(({a} != {a}) | ({b} != {b}))"
        elif comparison == "ne" and kind[0] == "f":
            value = f"(({a} != {b}) & ({a} == {a}) & ({b} == {b}))"
        else:
            value = f"({a} {_SETP[comparison]} {b})"
        combine = next((p for p in parts[2:] if p in ("and", "or", "xor")), None)
        targets = o[0].items if isinstance(o[0], Vector) else (o[0],)
        self.lines.append(f"t = {value}")
        c = f" {dict(zip(('and', 'or', 'xor'), '&|^'))[combine]} {self.source(o[3], 0)}" if combine else ""
        if len(targets) > 1:
            self.lines.append(f"u = ~t{c}")
        self.put(targets[0], f"t{c}", mask)
        if len(targets) > 1:
            self.put(targets[1], "u", mask)
        return True

    def _cvta(self, o, parts: list[str], mask) -> bool:
        space, sign = (parts[2], "-") if "to" in parts else (parts[1], "+")
        space, value = space.split("__")[0], self.source(o[1], 8)
        if parts[-1] != "u64":
            raise PtxError(f"{'.'.join(parts)} is not modelled")
        if space == "param":
            value = f"{value} {sign} w.cta.launch.parameter_base"
        elif space in ("shared", "local"):
            window = memory.SHARED_WINDOW if space == "shared" else memory.LOCAL_WINDOW
            value = f"{value} {sign} {self.constant(window, 8)}"
        elif space not in ("global", "const"):
            raise PtxError(f"cvta.{space} is not modelled")
        self.put(o[0], value, mask)
        return True
