"""Parser of the PTX that nvcc embeds: modules, kernels, scoped registers and labels, instructions.

Sections are those of the PTX ISA 9.1.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import struct
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

    def bits(self, size: int) -> int:
        """The value as one of `size` bytes: a double is converted (4.5.2)."""
        if not self.is_float or self.bytes == size:
            return self.value
        if size == 4:
            return _float_bits(struct.unpack("<d", self.value.to_bytes(8, "little"))[0], 4)
        raise PtxError(f"a float of {self.bytes} bytes as one of {size} is not modelled")


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

    @functools.cached_property
    def parts(self) -> list[str]:
        return self.opcode.replace("::", "__").split(".")


@dataclass
class Variable:
    """A `.global`, `.const`, `.shared` or `.local` variable; `bytes` 0 = extern array.

    `pointers` are the addresses of variables in its initial value, see `Pointer`.
    """

    space: str
    name: str
    bytes: int
    align: int
    initial: bytes = b""
    pointers: list[Pointer] = field(default_factory=list)


@dataclass(frozen=True)
class Pointer:
    """`bytes` of `(address of symbol + addend) >> shift` at an offset of an initial value."""

    offset: int
    bytes: int
    symbol: str
    addend: int
    shift: int


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
    block: tuple[int, ...] | None  # .reqntid
    cluster: int | None  # CTAs; None: the launch must say
    instructions: list[Instruction]
    labels: dict[str, int]
    registers: list[Register]
    variables: list[Variable]
    line: int
    branch_targets: dict[str, list[Symbol]] = field(default_factory=dict)


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
_NUMBER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9]\d*)U?$")
_FLOAT = re.compile(r"0[fF][0-9a-fA-F]{8}$|0[dD][0-9a-fA-F]{16}$")
_DECIMAL = re.compile(r"-?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?$")
_POINTER = re.compile(
    r"(?:(?P<mask>0[xX]FF(?:00)*)\s*\(\s*)?(?:generic\s*\(\s*)?(?P<symbol>[a-zA-Z_$%][\w$]*)[\s)]*"
    r"(?P<addend>[-+]\s*\w+)?[\s)]*$",
    re.I,
)
_SPECIAL = re.compile(
    r"%(?:(?:n?tid|n?ctaid|n?clusterid|cluster_n?ctaid)\.[xyz]|laneid|n?warpid|n?smid|gridid|is_explicit_cluster|"
    r"cluster_n?ctarank|lanemask_(?:eq|le|lt|ge|gt)|clock(?:_hi|64)?|pm[0-7](?:_64)?|envreg\d+|"
    r"globaltimer(?:_lo|_hi)?|reserved_smem_offset_\w+|(?:total|aggr|dynamic)_smem_size|current_graph_exec)$"
)


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
        line = text.count("\n", 0, position) + 1
        for statement in before.split(";"):
            found = re.search(r"\.(global|const|shared)\s", statement)
            if found and ".func" not in statement:
                with _located(f"line {line + statement.count(chr(10), 0, found.start())}", statement[found.start() :]):
                    variable = _variable(statement[found.start() :].strip())
                    module.variables[variable.name] = variable
            line += statement.count("\n")
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
        lines.append("" if re.match(r"\.(?:loc|file)\s", start) else line)
    return "\n".join(lines)


def _matching_brace(text: str, position: int) -> int:
    depth = 0
    for found in re.compile("[{}]").finditer(text, position):
        depth += 1 if found.group() == "{" else -1
        if depth == 0:
            return found.start()
    raise PtxError(f"line {text.count(chr(10), 0, position) + 1}: unbalanced braces")


@contextlib.contextmanager
def _located(place: str, text: str):
    """What goes wrong inside is a PtxError that names the place."""
    try:
        yield
    except (PtxError, ValueError, KeyError, AttributeError, IndexError, OverflowError) as error:
        reason = str(error) if isinstance(error, PtxError) else "not understood"
        raise PtxError(f"{place}: {reason}: {' '.join(text.split())[:120]}") from error


def _integer(text: str) -> int:
    """4.5.1."""
    digits = text.lstrip("-").rstrip("U")
    octal = len(digits) > 1 and digits.isdigit() and digits[0] == "0"
    value = int(digits, 8 if octal else 0)
    return -value if text.startswith("-") else value


def _float_bits(value: float, size: int) -> int:
    return int.from_bytes(struct.pack("<f" if size == 4 else "<d", value), "little")


def _variable(statement: str) -> Variable:
    found = _VARIABLE.match(statement)
    if not found:
        raise PtxError("a variable that is not modelled")
    space, align, vector, kind, name, extents, initial = found.groups()
    element = TYPE_BYTES[kind]
    shape = [int(extent or 0) for extent in re.findall(r"\[(\d*)\]", extents)] + ([int(vector)] if vector else [])
    values = _values(initial.strip(), shape) if initial else []
    if shape and shape[0] == 0:  # as many as there are values
        shape[0] = len(values) // math.prod(shape[1:])
    data, pointers = b"", []
    for value in values:
        if _NUMBER.match(value) and (kind[0] != "f" or value == "0"):
            number = _integer(value)
        elif _FLOAT.match(value):
            number = Immediate(int(value[2:], 16), True, (len(value) - 2) // 2).bits(element)
        elif _DECIMAL.match(value) and kind in ("f32", "f64"):
            number = _float_bits(float(value), element)
        else:
            pointers.append(_pointer(value, len(data), element))
            number = 0
        data += (number % (1 << 8 * element)).to_bytes(element, "little")
    return Variable(space, name, element * math.prod(shape), int(align or element * int(vector or 1)), data, pointers)


def _values(text: str, shape: list[int]) -> list[str]:
    """The elements of an initialiser; rows may be incomplete (5.4.4)."""
    if text.startswith("{") != bool(shape):
        raise PtxError("an initialiser of another shape than the variable")
    if not shape:
        return [text]
    size = math.prod(shape[1:])
    rows = [_values(row.strip(), shape[1:]) for row in _split(text[1 : text.rindex("}")])]
    return [value for row in rows for value in row + ["0"] * (size - len(row))]


def _pointer(text: str, offset: int, size: int) -> Pointer:
    """`symbol`, `generic(symbol)`, with an offset, or a byte of it by `mask(...)` (5.4.4).

    Global and constant variables have the same address in their state space and the generic one.
    """
    found = _POINTER.match(text)
    if not found or size != (1 if found["mask"] else 8):
        raise PtxError(f"an initial value that is not modelled, {text}")
    addend = _integer(found["addend"].replace(" ", "").lstrip("+")) if found["addend"] else 0
    return Pointer(offset, size, found["symbol"], addend, 4 * len(found["mask"][4:]) if found["mask"] else 0)


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
        if not found or found.group(2) not in TYPE_BYTES:
            raise PtxError(f"line {first_line}: parameter not understood: {text}")
        align, kind, parameter, count = found.groups()
        size = TYPE_BYTES[kind]
        alignment = int(align or size)
        offset = -(-offset // alignment) * alignment
        parameters.append(Parameter(parameter, offset, size * int(count or 1)))
        offset += size * int(count or 1)

    def extent(directive: str) -> tuple[int, ...] | None:
        found = re.search(rf"\.{directive}\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", directives)
        return tuple(int(value or 1) for value in found.groups()) if found else None

    block, largest = extent("reqntid"), extent("maxntid")
    max_threads = math.prod(block or largest) if block or largest else None
    cluster = extent("reqnctapercluster") or (None if ".explicitcluster" in directives else (1,))
    ctas = math.prod(cluster) if cluster else None
    kernel = Kernel(name, parameters, offset, max_threads, block, ctas, [], {}, [], [], first_line)
    _Body(kernel, body, first_line).parse()
    return kernel


class _Body:
    def __init__(self, kernel: Kernel, text: str, line: int):
        self.kernel, self.text, self.line = kernel, text, line
        self.scope = _Scope(None)
        self.scopes = 0
        self.pending: list[tuple[Instruction, str, _Scope]] = []
        self.label = ""
        self.branch_targets: list[tuple[str, str, int, _Scope]] = []

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
                self.label = label
            else:
                with _located(f"{self.kernel.name}, line {statement_line}", current):
                    self._statement(current, statement_line)
            start = position + 1
            statement_line = line
        for instruction, operands, scope in self.pending:
            with _located(f"{self.kernel.name}, line {instruction.line}", f"{instruction.opcode} {operands}"):
                instruction.operands = [self._operand(x, scope, instruction.line) for x in _split(operands)]
            self.kernel.instructions.append(instruction)
        for label, names, line, scope in self.branch_targets:
            with _located(f"{self.kernel.name}, line {line}", names):
                del self.kernel.labels[label]
                self.kernel.branch_targets[label] = [self._operand(x, scope, line) for x in _split(names)]

    def _statement(self, text: str, line: int) -> None:
        if not text:
            return
        if text.startswith(".reg"):
            kind, names = _REGISTER.match(text).groups()
            if kind == "b128":
                raise PtxError("a register that is not modelled")
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
            variable = _variable(text)
            if any(variable.name == v.name for v in self.kernel.variables):
                raise PtxError("a second variable of this name in a kernel is not modelled")
            self.kernel.variables.append(variable)
            return
        if text.startswith("."):
            if text.startswith(".param"):  # of a call: kept as a register
                found = re.match(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(\w+)$", text)
                if not found:
                    raise PtxError("not modelled")
                register = Register(len(self.kernel.registers), TYPE_BYTES[found.group(1)], found.group(2))
                self.scope.registers[register.name] = register
                self.kernel.registers.append(register)
                return
            if text.startswith(".branchtargets"):
                self.branch_targets.append((self.label, text.removeprefix(".branchtargets"), line, self.scope))
            elif not text.startswith(".pragma"):
                raise PtxError("not modelled")
            return
        predicate, negated = None, False
        if text.startswith("@"):
            guard, text = text[1:].split(None, 1)
            negated = guard.startswith("!")
            predicate = self.scope.register(guard.lstrip("!"))
            if predicate is None:
                raise PtxError(f"unknown predicate {guard}")
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
                base, offset = split.group(1), _integer(split.group(2))
            return Address(self._operand(base, scope, line), offset)
        if "|" in text:
            return Vector(tuple(self._operand(x, scope, line) for x in text.split("|")))
        negated = text.startswith("!")
        register = scope.register(text.lstrip("!"))
        if register is not None:
            return ("not", register) if negated else register
        if text == "WARP_SZ":
            return Immediate(32)
        if _NUMBER.match(text):
            return Immediate(_integer(text))
        if _FLOAT.match(text):
            return Immediate(int(text[2:], 16), True, (len(text) - 2) // 2)
        if _DECIMAL.match(text):
            return Immediate(_float_bits(float(text), 8), True, 8)
        if text.startswith("%"):
            if not _SPECIAL.match(text):
                raise PtxError(f"unknown register {text}")
            return Special(text)
        split = re.match(r"^([\w$.]+)\s*\+\s*(-?\d+)$", text)
        name, offset = (split.group(1), _integer(split.group(2))) if split else (text, 0)
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
