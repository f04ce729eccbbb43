"""Generated mutations of a kernel's PTX: every synchronisation line deleted or falsified, one at a time."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from .machine import SimulationError
from .ptx import PtxError

# Lines that are deleted, one at a time.
DELETED = re.compile(
    r"^(mbarrier\.(init|arrive|expect_tx)|fence\.|bar(rier)?\.(cta\.)?(sync|arrive)|bar\.warp\.sync|wgmma\.(fence|commit_group|wait_group)|"
    r"cp\.async\.bulk\.(commit_group|wait_group)|tcgen05\.(wait|commit|fence|relinquish|dealloc)|griddepcontrol)"
)


@dataclass
class Mutation:
    """A changed PTX text and, once run, the modes that saw it, each with its check, and those that missed it."""

    name: str
    text: str
    caught: dict[str, str] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)


def mutations(text: str) -> list[Mutation]:
    """All generated mutations of a PTX module."""
    lines = text.split("\n")
    result = []

    def add(number: int, line: str, what: str) -> None:
        changed = [*lines[:number], line, *lines[number + 1 :]]
        result.append(Mutation(f"line {number + 1}: {what}: {lines[number].strip()[:60]}", "\n".join(changed)))

    for number, line in enumerate(lines):
        code = line.strip()
        body = re.sub(r"^@!?%\w+\s+", "", code)
        if DELETED.match(body) and not _covered(lines, number):
            add(number, "", "deleted")
        if code.startswith("fence.proxy.async"):
            one = "{ .reg .pred one; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 one, lane, 0;"
            add(number, f"{one}\n@one {code} }}", "by one lane")
        waited = re.match(r"mbarrier\.try_wait\S*\s+([\w%]+),", body)
        if waited:
            add(number, f"setp.eq.u32 {waited.group(1)}, 0, 0;", "wait dropped")
            add(number, f"{code}\nsetp.eq.u32 {waited.group(1)}, 0, 0;", "tried once")
            phase = re.match(r"(mbarrier\.try_wait\S*\s+[\w%]+,\s*\[[^\]]*\],\s*)(%\w+);", body)
            if phase:
                flip = f"{{ .reg .b32 flipped; xor.b32 flipped, {phase.group(2)}, 1;\n{phase.group(1)}flipped; }}"
                add(number, flip, "parity flipped")
        expected = re.match(r"(mbarrier\.arrive\.expect_tx\S*\s+_,\s*\[[^\]]*\],\s*)(%\w+);", body)
        if expected:
            for delta in (16, -16):
                wrong = (
                    f"{{ .reg .b32 wrong; add.s32 wrong, {expected.group(2)}, {delta};\n{expected.group(1)}wrong; }}"
                )
                add(number, wrong, f"bytes {delta:+}")
        pending = re.match(r"(wgmma\.wait_group\.sync\.aligned|cp\.async\.bulk\.wait_group(?:\.read)?) (\d+);", body)
        if pending:
            add(number, f"{pending.group(1)} {int(pending.group(2)) + 1};", "one more may be pending")
        accumulate = re.match(r"(wgmma\.mma_async.*\}, )(%\w+), (%\w+), (.*)", body)
        if accumulate:
            for bits, what in ((1 << 62, "swizzle"), (1 << 16, "leading bytes"), (1 << 33, "stride")):
                if what == "leading bytes":
                    continue  # unused by a swizzled K-major operand
                wrong = f"{{ .reg .b64 wrong; xor.b64 wrong, {accumulate.group(3)}, {bits};\n"
                wrong += f"{accumulate.group(1)}{accumulate.group(2)}, wrong, {accumulate.group(4)} }}"
                add(number, wrong, f"{what} of B")
        test = re.match(r"setp\.(\w+)\.s32\s+(%\w+), (%\w+), (%?\w+);", body)
        branches = test and number + 1 < len(lines) and lines[number + 1].strip().startswith(f"@{test.group(2)} bra")
        if branches and test.group(1) == "lt" and test.group(4) == "0":
            add(number, f"setp.ne.s32 {test.group(2)}, 0, 0;", "empty slots not skipped")
        if branches and test.group(1) == "le" and test.group(4).startswith("%"):
            add(number, f"setp.eq.s32 {test.group(2)}, 0, 0;", "causal test dropped")
        if test and test.group(1) == "lt" and test.group(4) == "127":
            add(number, f"setp.ne.s32 {test.group(2)}, 0, 0;", "diagonal not seen")
        for what, changed in _tensor_faults(body):
            add(number, changed, what)
    return result


def _covered(lines: list[str], number: int) -> bool:
    """What its successor does anyway, with nothing accessed or handed over between them.

    A tcgen05.wait::ld before another one: uses wait for their loads. A bar.warp.sync before a tcgen05.alloc or a
    barrier, for which the warp converges.
    """
    if "bar.warp.sync" in lines[number]:
        after = (line for line in lines[number + 1 :] if re.search(r"tcgen05|mbarrier|cp\.|bra|\.shared\.|bar\.", line))
        return re.search(r"tcgen05\.alloc|bar\.sync", next(after, "")) is not None
    if "tcgen05.wait::ld" not in lines[number]:
        return False
    after = (line for line in lines[number + 1 :] if re.search(r"tcgen05\.(wait::ld|fence::before|dealloc)", line))
    return "wait::ld" in next(after, "")


def _tensor_faults(code: str) -> list[tuple[str, str]]:
    """(what, changed line) of the faults that only kernels with tensor memory have; `code` has no predicate."""

    def xored(register: str, bits: int, line: str) -> str:
        kind = "b64" if register.startswith("%rd") else "b32"
        return f"{{ .reg .{kind} wrong; xor.{kind} wrong, {register}, {bits};\n{line.replace(register, 'wrong')} }}"

    faults = []
    count = re.match(r"mbarrier\.init\S*\s+\[[^\]]*\],\s*(%\w+);", code)
    if count:
        for delta in (1, -1):
            line = code.replace(f", {count.group(1)};", ", wrong;")
            faults.append(
                (f"count {delta:+}", f"{{ .reg .b32 wrong; add.s32 wrong, {count.group(1)}, {delta};\n{line} }}")
            )
    mma = re.match(r"tcgen05\.mma\S*\s+\[(%r\w+)\], (\[?)(%\w+)\]?, (%rd\w+), (%r\w+),", code)
    if mma:
        target, in_tensor_memory, a, b, instruction = mma.groups()
        faults.append(("accumulator +32", xored(target, 32, code)))
        if in_tensor_memory:
            faults.append(("A +8 columns", xored(a, 8, code)))
        faults.append(("A transposed", xored(instruction, 1 << 15, code)))
        faults.append(("B transposed", xored(instruction, 1 << 16, code)))
        faults.append(("stride of B", xored(b, 1 << 38, code)))
    access = re.match(r"tcgen05\.(?:ld|st)\S*?\.b32\s*.*\[(%r\w+)(?:\s*\+\s*\d+)?\]", code)
    if access:
        varying = access.group(1)
        upper = (
            f"{{ .reg .b32 wrong; mov.u32 wrong, %laneid; shr.u32 wrong, wrong, 4; add.s32 wrong, wrong, {varying};\n"
        )
        faults.append(("address of half the lanes +1", f"{upper}{code.replace(varying, 'wrong')} }}"))
        faults.append(("column +32", xored(access.group(1), 32, code)))
        faults.append(("next lane quarter", xored(access.group(1), 32 << 16, code)))
    return faults


def score(
    found: list[Mutation],
    run: Callable[[str, str, int], bool],
    seeds: int = 2,
    modes: tuple[str, ...] = ("eager", "late", "random"),
    first_catch: bool = False,
) -> list[Mutation]:
    """Runs every mutation in every mode, or until its `first_catch`.

    `run(text, mode, seed)` says whether the results are right.
    """
    for mutation in found:
        for mode in modes:
            if first_catch and mutation.caught:
                break
            for seed in range(seeds if mode == "random" else 1):
                try:
                    verdict = None if run(mutation.text, mode, seed) else "wrong values"
                except SimulationError as error:
                    verdict = str(error).split(":")[0]
                except PtxError as error:
                    verdict = f"not translated ({error})"
                if verdict:
                    mutation.caught[mode] = verdict
                    break
            else:
                mutation.missed.append(mode)
    return found


def table(found: list[Mutation]) -> str:
    """One line a mutation: the modes that saw it, each with the check that did."""
    lines = [f"{'mutation':<92} caught by"]
    for m in found:
        verdicts = ", ".join(f"{mode}: {verdict}" for mode, verdict in m.caught.items())
        lines.append(f"{m.name:<92.92} {verdicts or '-'}")
    caught = sum(bool(m.caught) for m in found)
    hidden = sum(bool(m.caught) and "eager" in m.missed for m in found)
    lines.append(f"caught {caught} of {len(found)}; {hidden} that eager mode misses")
    return "\n".join(lines)
