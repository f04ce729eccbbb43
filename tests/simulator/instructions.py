"""The instructions that are not plain expressions: which are modelled, and where.

`build(program, instruction)` makes a closure `(warp, registers, mask or None)`; `gate(program, instruction)` makes the
function that says whether a group of lanes must wait before the instruction. Sections are those of the PTX ISA 9.1.
"""

from __future__ import annotations

import re

import numpy as np

from . import accesses, arithmetic, asynchronous, calls, collectives, synchronisation
from .cta import LANES
from .formats import U64
from .memory import LOCAL_WINDOW, SHARED_WINDOW, Fault
from .operands import element_bytes, lanes_of, put, reader
from .ptx import Instruction, PtxError

# ---- small ones ----------------------------------------------------------------------------------


def _nothing(program, x: Instruction):
    return lambda w, R, m: None


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


# Of the others: what may follow the opcode.
_FORMS = {
    op: re.compile("|".join(forms))
    for op, forms in {
        "cp": (
            r"async\.bulk\.(commit_group|wait_group(\.read)?)",
            r"async\.bulk\.prefetch\.(L2\.global|tensor\.[1-5]d\.L2\.global(\.tile)?)(\.L2::cache_hint)?",
            r"async\.bulk\.(tensor\.[1-5]d\.)?shared::(cta|cluster)\.global(\.tile)?\.mbarrier::complete_tx::bytes"
            r"(\.L2::cache_hint)?",
            r"async\.bulk\.(tensor\.[1-5]d\.)?global\.shared::cta(\.tile)?\.bulk_group(\.L2::cache_hint)?",
            r"reduce\.async\.bulk\.tensor\.[1-5]d\.global\.shared::cta\.add(\.tile)?\.bulk_group(\.L2::cache_hint)?",
            r"reduce\.async\.bulk\.global\.shared::cta\.bulk_group(\.L2::cache_hint)?\.add"
            r"(\.noftz\.f16|\.noftz\.bf16|\.f32|\.[us](32|64))",
        ),
        "wgmma": (
            r"(fence|commit_group|wait_group)\.sync\.aligned",
            r"mma_async\.sync\.aligned\.m64n\d+k16\.f32\.(bf16\.bf16|f16\.f16)",
        ),
        "tcgen05": (
            r"(alloc\.cta_group::1\.sync\.aligned(\.shared::cta)?|dealloc\.cta_group::1\.sync\.aligned)\.b32",
            r"relinquish_alloc_permit\.cta_group::1\.sync\.aligned",
            r"(ld|st)\.sync\.aligned\.(32x32b|16x64b|16x128b|16x256b|16x32bx2)\.x\d+\.b32",
            r"wait::(ld|st)\.sync\.aligned", r"fence::(before|after)_thread_sync",
            r"commit\.cta_group::1\.mbarrier::arrive::one(\.shared::cluster)?\.b64", r"mma\.cta_group::1\.kind::f16",
        ),
        "mbarrier": (
            r"(init|inval)(\.shared(::cta)?)?\.b64",
            r"arrive(_drop)?(\.expect_tx|\.noComplete)?(\.(release|relaxed)\.(cta|cluster))?(\.shared(::cta|::cluster)?)?\.b64",
            r"(expect_tx|complete_tx)(\.relaxed\.(cta|cluster))?(\.shared(::cta|::cluster)?)?\.b64",
            r"(test_wait|try_wait)(\.parity)?(\.(acquire|relaxed)\.(cta|cluster))?(\.shared(::cta)?)?\.b64",
        ),
        "fence": (
            r"((sc|acq_rel|acquire|release)\.)?(cta|cluster|gpu|sys)", r"mbarrier_init\.release\.cluster",
            r"proxy\.(alias|async(\.(global|shared::(cta|cluster)))?)",
        ),
        "membar": ("cta|gl|sys",),
        "bar": (r"(cta\.)?(sync|arrive)", r"(cta\.)?red\.(popc\.u32|(and|or)\.pred)", r"warp\.sync"),
        "barrier": (
            r"(cta\.)?(sync|arrive)(\.aligned)?", r"(cta\.)?red\.(popc(\.aligned)?\.u32|(and|or)(\.aligned)?\.pred)",
            r"cluster\.(arrive(\.release|\.relaxed)?|wait(\.acquire)?)(\.aligned)?",
        ),
        "shfl": (r"sync\.(up|down|bfly|idx)\.b32",), "vote": (r"sync\.((all|any|uni)\.pred|ballot\.b32)",),
        "match": (r"(any|all)\.sync\.b(32|64)",), "elect": ("sync",), "activemask": ("b32",),
        "setmaxnreg": (r"(inc|dec)\.sync\.aligned\.u32",), "griddepcontrol": ("launch_dependents|wait",),
        "ldmatrix": (r"sync\.aligned\.m8n8\.x[124](\.trans)?(\.shared(::cta)?)?\.b16",),
        "stmatrix": (r"sync\.aligned\.m8n8\.x[124](\.trans)?(\.shared(::cta)?)?\.b16",),
    }.items()
}  # fmt: skip


def check_qualifiers(x: Instruction) -> None:
    """Of the instructions in `_MODELLED` and `_FORMS`.

    Raises:
        PtxError: the type or a qualifier is not modelled.
    """
    op, _, form = x.opcode.partition(".")
    kinds = _MODELLED.get(op)
    if (kinds is not None and not kinds.get(x.parts[-1], frozenset()).issuperset(x.parts[1:-1])) or (
        op in _FORMS and not _FORMS[op].fullmatch(form)
    ):
        raise PtxError(f"{x.opcode} is not modelled")


_BUILDERS = {
    op: builder
    for ops, builder in (
        ("ld ldu", accesses.build_ld), ("st", accesses.build_st), ("atom red", accesses.build_atomic),
        ("ldmatrix stmatrix", accesses.build_matrix), ("call", calls.build_call),
        (" ".join(collectives.COLLECTIVES), collectives.collective), ("activemask", collectives.build_activemask),
        ("addc subc madc", arithmetic.build_carry), ("div rem", arithmetic.build_div), ("popc", arithmetic.build_popc),
        ("clz", arithmetic.build_clz), ("brev", arithmetic.build_brev), ("bfind", arithmetic.build_bfind),
        ("bfe", arithmetic.build_bfe), ("bfi", arithmetic.build_bfi), ("prmt", arithmetic.build_prmt),
        ("shf", arithmetic.build_shf), ("lop3", arithmetic.build_lop3), ("cvt", arithmetic.build_cvt),
        ("ex2 lg2 rcp rsqrt sqrt tanh sin cos", arithmetic.build_math),
        ("mbarrier", synchronisation.build_mbarrier), ("setmaxnreg", synchronisation.build_setmaxnreg),
        ("fence membar", synchronisation.build_fence), ("griddepcontrol", synchronisation.build_griddepcontrol),
        ("trap brkpt", build_trap), ("isspacep", build_isspacep), ("createpolicy", build_createpolicy),
        ("mapa", build_mapa), ("prefetch prefetchu applypriority discard nanosleep pmevent", _nothing),
    )
    for op in ops.split()
}  # fmt: skip


def build(program, x: Instruction):
    """The closure of one instruction.

    Raises:
        PtxError: it is not modelled.
    """
    op, kind = x.parts[0], x.parts[-1]
    if x.parts[:2] == ["barrier", "cluster"]:
        return synchronisation.build_cluster_barrier(program, x)
    if op in ("bar", "barrier"):
        action = next((p for p in x.parts[1:] if p in ("warp", "arrive", "sync", "red")), None)
        if action == "warp":
            return collectives.collective(program, x)
        return (
            synchronisation.build_barrier_arrive(program, x)
            if action == "arrive"
            else synchronisation.build_barrier(program, x)
        )
    if op in asynchronous.OPCODES:
        return asynchronous.build(program, x)
    if op in ("add", "sub", "mul", "fma", "mad", "min", "max", "neg", "abs"):
        if "cc" in x.parts:
            return arithmetic.build_carry(program, x)
        if kind == "f32x2":
            return arithmetic.build_f32x2(program, x)
        if kind.startswith(("f16", "bf16")):
            return arithmetic.build_half(program, x)
        if "hi" in x.parts:
            return arithmetic.build_mul_hi(program, x)
        if op in ("min", "max"):
            return arithmetic.build_minmax(program, x)
    if op not in _BUILDERS:
        raise PtxError(f"{x.opcode} is not modelled")
    return _BUILDERS[op](program, x)


def is_gated(x: Instruction) -> bool:
    """Whether a group of lanes may have to wait before the instruction, which therefore starts a block."""
    parts = x.parts
    op = parts[0]
    if op in ("bar", "barrier"):
        return True
    if op == "mbarrier":
        return parts[1] == "try_wait"
    if op == "cp":
        return "wait_group" in parts
    if op == "griddepcontrol":
        return "wait" in parts
    return op in collectives.COLLECTIVES or op in ("setmaxnreg", "wgmma", "tcgen05", "ldmatrix", "stmatrix")


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
    op = x.parts[0]
    if op in ("bar", "barrier"):
        if "warp" in x.parts:
            return collectives.gate_converge(program, x, 0)
        if "cluster" in x.parts:
            return synchronisation.gate_cluster_barrier(program, x)
        return (
            collectives.gate_converge(program, x, None)
            if "arrive" in x.parts
            else synchronisation.gate_barrier(program, x)
        )
    if op == "mbarrier":
        return synchronisation.gate_mbarrier(program, x)
    if op == "setmaxnreg":
        return synchronisation.gate_setmaxnreg(program, x)
    if op == "griddepcontrol":
        return synchronisation.gate_griddepcontrol(program, x)
    if op in asynchronous.OPCODES:
        return asynchronous.gate(program, x)
    if op in collectives.COLLECTIVES:
        return collectives.gate_converge(program, x, -1)
    return collectives.gate_converge(program, x, None)
