"""Parser of the PTX that nvcc embeds: modules, kernels, scoped registers and labels, instructions.

Sections are those of the PTX ISA 9.1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

TYPE_BYTES = {
    **{f"{kind}{bits}": bits // 8 for kind in "bus" for bits in (8, 16, 32, 64)},
    "b128": 16, "f16": 2, "bf16": 2, "f32": 4, "f64": 8, "f16x2": 4, "bf16x2": 4, "f32x2": 8, "pred": 1,
}  # fmt: skip


class PtxError(ValueError):
    """PTX that the simulator cannot parse or does not model; names the line."""


@dataclass(frozen=True)
class Register:
    """A virtual register: its slot in the warp's register list and its bytes (0 = predicate)."""

    index: int
    bytes: int
    name: str


@dataclass(frozen=True)
class Immediate:
    """A constant: the raw bits for floats (`is_float`), a Python integer otherwise."""

    value: int
    is_float: bool = False
    bytes: int = 0


@dataclass(frozen=True)
class Symbol:
    """Address of a variable, parameter or label, plus a constant."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Address:
    """`[base + offset]`."""

    base: object
    offset: int = 0


@dataclass(frozen=True)
class Special:
    """A read-only special register such as `%tid.x`."""

    name: str


@dataclass(frozen=True)
class Vector:
    """`{a, b, ...}`."""

    items: tuple


@dataclass(frozen=True)
class TensorAddress:
    """`[map, {coordinates}]` of a tensor copy."""

    map: object
    coordinates: tuple


@dataclass(frozen=True)
class Sink:
    """The bit bucket `_`."""


@dataclass
class Instruction:
    opcode: str
    operands: list
    line: int
    predicate: Register | None = None
    negated: bool = False

    @property
    def parts(self) -> list[str]:
        return self.opcode.replace("::", "__").split(".")


@dataclass
class Variable:
    """A `.global`, `.const`, `.shared` or `.local` variable; `bytes` 0 = extern array."""

    space: str
    name: str
    bytes: int
    align: int
    initial: bytes = b""


@dataclass
class Parameter:
    name: str
    offset: int
    bytes: int


@dataclass
class Kernel:
    name: str
    parameters: list[Parameter]
    parameter_bytes: int
    max_threads: int | None
    instructions: list[Instruction]
    labels: dict[str, int]
    registers: list[Register]
    variables: list[Variable]
    line: int


@dataclass
class Module:
    target: str
    kernels: dict[str, Kernel] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)


_ENTRY = re.compile(r"\.entry\s+([\w$.]+)\s*(?:\(([^)]*)\))?([^{;]*)\{")
_VARIABLE = re.compile(
    r"\.(global|const|shared|local)\s+(?:\.align\s+(\d+)\s+)?(?:\.v([24])\s+)?\.(\w+)\s+([\w$%.]+)((?:\[\d*\])*)"
    r"(?:\s*=\s*(.*))?$",
    re.S,
)
_REGISTER = re.compile(r"\.reg\s+\.(\w+)\s+(.*)$", re.S)
_NUMBER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|\d+)U?$")


def parse(text: str) -> Module:
    """Parses a PTX module.

    Raises:
        PtxError: something outside the supported subset.
    """
    text = _clean(text)
    target = re.search(r"\.target\s+(\w+)", text)
    module = Module(target.group(1) if target else "")
    position = 0
    while True:
        entry = _ENTRY.search(text, position)
        before = text[position : entry.start() if entry else len(text)]
        for statement in before.split(";"):
            found = re.search(r"\.(global|const|shared)\s", statement)
            if found and ".func" not in statement:
                variable = _variable(statement[found.start() :].strip())
                module.variables[variable.name] = variable
        if entry is None:
            return module
        end = _matching_brace(text, entry.end() - 1)
        kernel = _kernel(entry, text[entry.end() : end], text.count("\n", 0, entry.end()) + 1)
        module.kernels[kernel.name] = kernel
        position = end + 1


def _clean(text: str) -> str:
    """Without comments, line tables and debug sections; line numbers stay."""
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), text, flags=re.S)
    lines = []
    for line in text.split("\n"):
        line = line.split("//")[0]
        start = line.lstrip()
        if start.startswith(".section"):
            break
        lines.append("" if start.startswith((".loc", ".file", ".pragma")) else line)
    return "\n".join(lines)


def _matching_brace(text: str, position: int) -> int:
    depth = 0
    for found in re.compile("[{}]").finditer(text, position):
        depth += 1 if found.group() == "{" else -1
        if depth == 0:
            return found.start()
    raise PtxError("unbalanced braces")


def _variable(statement: str) -> Variable:
    found = _VARIABLE.match(statement)
    if not found:
        raise PtxError(f"variable not understood: {statement[:120]}")
    space, align, vector, kind, name, dims, initial = found.groups()
    size = TYPE_BYTES[kind] * int(vector or 1)
    count = 1
    for dim in re.findall(r"\[(\d*)\]", dims):
        count *= int(dim) if dim else 0
    data = b""
    if initial:
        values = re.findall(r"-?(?:0[xXfFdD][0-9a-fA-F]+|\d+)", initial)
        width = TYPE_BYTES[kind]
        for value in values:
            number = int(value[2:], 16) if value[:2] in ("0f", "0F", "0d", "0D") else int(value, 0)
            data += (number % (1 << 8 * width)).to_bytes(width, "little")
    return Variable(space, name, size * count, int(align or size), data)


class _Scope:
    def __init__(self, parent: _Scope | None):
        self.parent = parent
        self.registers: dict[str, Register] = {}
        self.labels: set[str] = set()
        self.prefix = ""

    def register(self, name: str) -> Register | None:
        scope = self
        while scope is not None:
            if name in scope.registers:
                return scope.registers[name]
            scope = scope.parent
        return None


def _kernel(entry: re.Match, body: str, first_line: int) -> Kernel:
    name, parameter_text, directives = entry.groups()
    parameters, offset = [], 0
    for text in filter(None, (x.strip() for x in (parameter_text or "").split(","))):
        found = re.match(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\b.*?\s)?([\w$]+)(?:\[(\d+)\])?$", text)
        if not found:
            raise PtxError(f"line {first_line}: parameter not understood: {text}")
        align, kind, parameter, count = found.groups()
        size = TYPE_BYTES[kind]
        alignment = int(align or size)
        offset = -(-offset // alignment) * alignment
        parameters.append(Parameter(parameter, offset, size * int(count or 1)))
        offset += size * int(count or 1)
    limit = re.search(r"\.(?:maxntid|reqntid)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", directives)
    max_threads = None
    if limit:
        max_threads = 1
        for value in limit.groups():
            max_threads *= int(value or 1)
    kernel = Kernel(name, parameters, offset, max_threads, [], {}, [], [], first_line)
    _Body(kernel, body, first_line).parse()
    return kernel


class _Body:
    def __init__(self, kernel: Kernel, text: str, line: int):
        self.kernel, self.text, self.line = kernel, text, line
        self.scope = _Scope(None)
        self.scopes = 0
        self.pending: list[tuple[Instruction, str, _Scope]] = []

    def parse(self) -> None:
        text, position, start = self.text, 0, 0
        line = self.line
        finder = re.compile(r"[;{}:\n]")
        depth = 0
        statement_line = line
        for found in finder.finditer(text):
            mark = found.group()
            position = found.start()
            if mark == "\n":
                line += 1
                if not text[start:position].strip():
                    start = position + 1
                    statement_line = line
                continue
            current = text[start:position].strip()
            if mark == "{" and not current:
                self.scope = _Scope(self.scope)
                self.scopes += 1
                self.scope.prefix = f"{self.scopes}:"
            elif mark == "}" and not current and depth == 0:
                self.scope = self.scope.parent
            elif mark in "{}":
                depth += 1 if mark == "{" else -1
                continue
            elif mark == ":":
                if text[position : position + 2] == "::" or text[position - 1 : position + 1] == "::":
                    continue
                if not re.fullmatch(r"[\w$.%]+", current):
                    continue
                label = self.scope.prefix + current
                self.scope.labels.add(current)
                self.kernel.labels[label] = len(self.pending)
            else:
                self._statement(current, statement_line)
            start = position + 1
            statement_line = line
        for instruction, operands, scope in self.pending:
            instruction.operands = [self._operand(x, scope, instruction.line) for x in _split(operands)]
            self.kernel.instructions.append(instruction)

    def _statement(self, text: str, line: int) -> None:
        if not text:
            return
        if text.startswith(".reg"):
            kind, names = _REGISTER.match(text).groups()
            size = 0 if kind == "pred" else TYPE_BYTES[kind]
            for name in (x.strip() for x in names.split(",")):
                ranged = re.match(r"([\w$%]+)<(\d+)>$", name)
                many = [f"{ranged.group(1)}{i}" for i in range(int(ranged.group(2)))] if ranged else [name]
                for one in many:
                    register = Register(len(self.kernel.registers), size, one)
                    self.scope.registers[one] = register
                    self.kernel.registers.append(register)
            return
        if text.startswith((".shared", ".local", ".global", ".const")):
            self.kernel.variables.append(_variable(text))
            return
        if text.startswith("."):
            if text.startswith(".param"):  # of a call: kept as a register
                found = re.match(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(\w+)$", text)
                if not found:
                    raise PtxError(f"line {line}: not modelled: {text}")
                register = Register(len(self.kernel.registers), TYPE_BYTES[found.group(1)], found.group(2))
                self.scope.registers[register.name] = register
                self.kernel.registers.append(register)
                return
            if text.startswith((".branchtargets", ".callprototype")):
                raise PtxError(f"line {line}: not modelled: {text}")
            return
        predicate, negated = None, False
        if text.startswith("@"):
            guard, text = text[1:].split(None, 1)
            negated = guard.startswith("!")
            predicate = self.scope.register(guard.lstrip("!"))
            if predicate is None:
                raise PtxError(f"line {line}: unknown predicate {guard}")
        opcode, operands = re.match(r"([\w.:]+)(.*)$", text.strip(), re.S).groups()
        self.pending.append((Instruction(opcode.strip(), [], line, predicate, negated), operands, self.scope))

    def _operand(self, text: str, scope: _Scope, line: int):
        text = text.strip()
        if text == "_":
            return Sink()
        if text.startswith("{"):
            return Vector(tuple(self._operand(x, scope, line) for x in _split(text[1 : text.rindex("}")])))
        if text.startswith("("):
            return Vector(tuple(self._operand(x, scope, line) for x in _split(text[1 : text.rindex(")")])))
        if text.startswith("["):
            inner = text[1 : text.rindex("]")].strip()
            parts = _split(inner)
            if len(parts) == 2 and parts[1].strip().startswith("{"):
                vector = self._operand(parts[1], scope, line)
                return TensorAddress(self._operand(parts[0], scope, line), vector.items)
            base, offset = inner, 0
            split = re.match(r"^([\w$%.]+)\s*\+\s*(-?\w+)$", inner)
            if split:
                base, offset = split.group(1), int(split.group(2), 0)
            return Address(self._operand(base, scope, line), offset)
        if "|" in text:
            return Vector(tuple(self._operand(x, scope, line) for x in text.split("|")))
        negated = text.startswith("!")
        register = scope.register(text.lstrip("!"))
        if register is not None:
            return ("not", register) if negated else register
        if _NUMBER.match(text):
            return Immediate(int(text.rstrip("U"), 0))
        if re.match(r"0[fF][0-9a-fA-F]{8}$", text):
            return Immediate(int(text[2:], 16), True, 4)
        if re.match(r"0[dD][0-9a-fA-F]{16}$", text):
            return Immediate(int(text[2:], 16), True, 8)
        if text.startswith("%"):
            return Special(text)
        split = re.match(r"^([\w$.]+)\s*\+\s*(-?\d+)$", text)
        name, offset = (split.group(1), int(split.group(2))) if split else (text, 0)
        while scope is not None:
            if name in scope.labels:
                return Symbol(scope.prefix + name, offset)
            scope = scope.parent
        return Symbol(name, offset)


def _split(text: str) -> list[str]:
    """At top-level commas."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "{[(":
            depth += 1
        elif c in "}])":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    tail = text[start:]
    if tail.strip() or parts:
        parts.append(tail)
    return parts
