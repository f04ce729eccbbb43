"""Where asynchronous instructions find their elements: swizzles, tensor maps, matrix descriptors, register fragments."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

MAP_MAGIC = 0x4D535431


class LayoutError(ValueError):
    """A descriptor, box or address the ISA forbids."""


def swizzle(address: np.ndarray, width: int) -> np.ndarray:
    """XORs the 16-byte chunk number with the row number in a `width`-byte pattern (PTX ISA 5.5.7, swizzling modes)."""
    if width in (0, 16):
        return address
    mask = {32: 1, 64: 3, 128: 7}[width]
    return address ^ (((address >> 7) & mask) << 4)


# ---- tensor maps ---------------------------------------------------------------------------------

# CUtensorMapDataType -> bytes
_ELEMENT_BYTES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2, 10: 4, 11: 4, 12: 4}
_KIND = {6: "f16", 9: "bf16", 7: "f32", 10: "f32", 2: "u32", 3: "s32"}
_SWIZZLE_BYTES = {0: 0, 1: 32, 2: 64, 3: 128}
_PACK = struct.Struct("<IBBBBQ5I4x4Q5H5Bx")


@dataclass(frozen=True)
class TensorMap:
    element: int
    kind: str
    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # bytes, of dimensions 1..
    box: tuple[int, ...]
    swizzle: int

    @property
    def box_bytes(self) -> int:
        return int(np.prod(self.box)) * self.element


def encode_tensor_map(
    kind, rank, address, sizes, strides, box, element_strides, interleave, swizzle_mode, oob
) -> bytes:
    """128 opaque bytes, after the checks cuTensorMapEncodeTiled documents.

    Raises:
        LayoutError: an argument the driver refuses.
    """
    if kind not in _ELEMENT_BYTES or swizzle_mode not in _SWIZZLE_BYTES:
        raise LayoutError(f"tensor map: data type {kind} or swizzle {swizzle_mode} is not modelled")
    if interleave != 0 or oob != 0:
        raise LayoutError("tensor map: interleave and NaN fill are not modelled")
    element = _ELEMENT_BYTES[kind]
    if not 1 <= rank <= 5:
        raise LayoutError(f"tensor map: rank {rank} is not in 1..5")
    if address % 16:
        raise LayoutError(f"tensor map: address {address:#x} is not a multiple of 16")
    for i in range(rank):
        if not 1 <= sizes[i] <= 1 << 32:
            raise LayoutError(f"tensor map: size {i} = {sizes[i]} is not in 1..2^32")
        if not 1 <= box[i] <= 256:
            raise LayoutError(f"tensor map: box {i} = {box[i]} is not in 1..256")
        if not 1 <= element_strides[i] <= 8:
            raise LayoutError(f"tensor map: element stride {i} = {element_strides[i]} is not in 1..8")
        if element_strides[i] != 1:
            raise LayoutError("tensor map: element strides other than 1 are not modelled")
    for i in range(rank - 1):
        if strides[i] % 16 or strides[i] >= 1 << 40:
            raise LayoutError(f"tensor map: stride {i + 1} = {strides[i]} is not a multiple of 16 below 2^40")
    inner = box[0] * element
    if inner % 16:
        raise LayoutError(f"tensor map: the inner box has {inner} bytes, not a multiple of 16")
    width = _SWIZZLE_BYTES[swizzle_mode]
    if width and inner > width:
        raise LayoutError(f"tensor map: the inner box has {inner} bytes, more than the swizzle's {width}")
    pad = 5 - rank
    return _PACK.pack(
        MAP_MAGIC, kind, rank, swizzle_mode, 0, address, *[(x - 1) for x in sizes[:rank]], *([0] * pad),
        *strides[: rank - 1], *([0] * (pad)), *box[:rank], *([1] * pad), *([1] * 5),
    ).ljust(128, b"\0")  # fmt: skip


@lru_cache(maxsize=256)
def decode_tensor_map(raw: bytes) -> TensorMap:
    magic, kind, rank, mode, _, address, *rest = _PACK.unpack(raw[: _PACK.size])
    if magic != MAP_MAGIC:
        raise LayoutError("the tensor map operand does not point to a tensor map")
    return TensorMap(
        _ELEMENT_BYTES[kind], _KIND.get(kind, ""), address, tuple(x + 1 for x in rest[:rank]),
        tuple(rest[5 : 5 + rank - 1]), tuple(rest[9 : 9 + rank]), _SWIZZLE_BYTES[mode],
    )  # fmt: skip


@lru_cache(maxsize=64)
def _box_steps(box: tuple[int, ...]) -> list[np.ndarray]:
    """Index along every dimension of the box's elements, dimension 0 fastest."""
    grid = np.meshgrid(*[np.arange(b) for b in reversed(box)], indexing="ij")
    return [g.ravel() for g in reversed(grid)]


def box_addresses(tensor: TensorMap, coordinates: tuple[int, ...], target: int):
    """(global byte addresses, in bounds, shared byte addresses) of the box's chunks, and their bytes.

    Chunks are 16 bytes where the inner dimension is whole, single elements otherwise.
    """
    if len(coordinates) != len(tensor.box):
        raise LayoutError(f"tensor copy of {len(coordinates)} dimensions with a map of {len(tensor.box)}")
    if target % (128 if tensor.swizzle == 0 else tensor.swizzle * 8 if tensor.swizzle == 128 else 128):
        raise LayoutError(f"tensor copy: shared address {target:#x} is misaligned for swizzle {tensor.swizzle}")
    whole = coordinates[0] >= 0 and coordinates[0] + tensor.box[0] <= tensor.sizes[0]
    per_chunk = 16 // tensor.element if whole and coordinates[0] * tensor.element % 16 == 0 else 1
    box = (tensor.box[0] // per_chunk, *tensor.box[1:])
    steps = _box_steps(box)
    x = coordinates[0] + steps[0] * per_chunk
    address = tensor.address + x * tensor.element
    inside = (x >= 0) & (x < tensor.sizes[0])
    for i in range(1, len(box)):
        x = coordinates[i] + steps[i]
        address = address + x * tensor.strides[i - 1]
        inside &= (x >= 0) & (x < tensor.sizes[i])
    chunk = per_chunk * tensor.element
    shared = swizzle(target + np.arange(len(address)) * chunk, tensor.swizzle)
    return address, inside, shared, chunk


# ---- wgmma and tcgen05 shared-memory matrix descriptors ------------------------------------------


@lru_cache(maxsize=65536)
def operand_offsets(start: int, leading: int, stride: int, width: int, mn: int, k: int, mn_major: bool) -> np.ndarray:
    """Byte address of every 16-bit element [mn, k] in shared memory (PTX ISA 9.7.15.5.1.2, 9.7.16.3).

    Swizzled K-major: atoms of 8 rows x width bytes, `stride` between them along mn. Swizzled MN-major: atoms of
    width bytes of mn x 8 k, `leading` between them along mn, `stride` along k. Without swizzle: 8 x 16-byte core
    matrices, which MN-major turns; `leading` between them along k, `stride` along mn.
    """
    i = np.arange(mn)[:, None]
    j = np.arange(k)[None, :]
    if width == 0:
        if mn_major:
            address = start + i // 8 * stride + i % 8 * 2 + j // 8 * leading + j % 8 * 16
        else:
            address = start + i // 8 * stride + i % 8 * 16 + j // 8 * leading + j % 8 * 2
    elif mn_major:
        per_atom = width // 2
        address = start + i // per_atom * leading + i % per_atom * 2 + j // 8 * stride + j % 8 * width
    else:
        address = start + i // 8 * stride + i % 8 * width + j * 2
        if k * 2 + start % width > width:
            per_atom = width // 2
            first = start % width // 2
            jj = first + j
            address = start - first * 2 + i // 8 * stride + i % 8 * width + jj // per_atom * leading + jj % per_atom * 2
    return swizzle(address, width)


def check_zero(what: str, descriptor: int, section: str, fields: tuple[tuple[int, int, str], ...]) -> None:
    """Fields (first bit, bits, name) that must be 0.

    Raises:
        LayoutError: one is not.
    """
    for first, bits, name in fields:
        value = descriptor >> first & (1 << bits) - 1
        if value:
            raise LayoutError(f"{what} {descriptor:#x}: {name} is {value}, must be 0 ({section})")


def wgmma_descriptor(descriptor: int) -> tuple[int, int, int, int]:
    """(start, leading bytes, stride bytes, swizzle width) of an sm_90 matrix descriptor (PTX ISA 9.7.15.5.1.2.2)."""
    if descriptor >> 49 & 7:
        raise LayoutError(f"wgmma descriptor {descriptor:#x}: a base offset is not modelled")
    fields = (14, 2, "bits 14-15"), (30, 2, "bits 30-31"), (46, 3, "bits 46-48"), (52, 10, "bits 52-61")
    check_zero("wgmma descriptor", descriptor, "9.7.15.5.1.2.2", fields)
    width = {0: 0, 1: 128, 2: 64, 3: 32}[descriptor >> 62 & 3]
    return (descriptor & 0x3FFF) << 4, (descriptor >> 16 & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4, width


def tcgen05_descriptor(descriptor: int) -> tuple[int, int, int, int]:
    """The same of an sm_100 descriptor for kind::f16 (PTX ISA 9.7.16.4.1): bits 46-48 are 0b001, swizzle in 61-63."""
    if descriptor >> 46 & 7 != 1:
        raise LayoutError(f"tcgen05 descriptor {descriptor:#x}: bits 46-48 must be 0b001 (9.7.16.4.1)")
    if descriptor >> 49 & 7 or descriptor >> 52 & 1:
        raise LayoutError(f"tcgen05 descriptor {descriptor:#x}: base offset and absolute mode are not modelled")
    fields = (14, 2, "bits 14-15"), (30, 2, "bits 30-31"), (53, 8, "the constant of bits 53-60")
    check_zero("tcgen05 descriptor", descriptor, "9.7.16.4.1", fields)
    mode = descriptor >> 61 & 7
    if mode == 1:  # of MN-major operands only (9.7.16.3), which other kinds than tf32 may not have in it (9.7.16.4.2)
        raise LayoutError(f"tcgen05 descriptor {descriptor:#x}: kind::f16 with 32-byte atomic swizzle (9.7.16.4.2)")
    if mode not in (0, 2, 4, 6):
        raise LayoutError(f"tcgen05 descriptor {descriptor:#x}: swizzle mode {mode}, there is none (9.7.16.4.1)")
    width = {0: 0, 2: 128, 4: 64, 6: 32}[mode]
    return (descriptor & 0x3FFF) << 4, (descriptor >> 16 & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4, width


# ---- register fragments --------------------------------------------------------------------------

_LANE = np.arange(32)


@lru_cache(maxsize=64)
def wgmma_accumulator(n: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, column) in a warp's 16 x n part of D, of register i of lane l (PTX ISA 9.7.15.5.1.1.1)."""
    i = np.arange(n // 2)[:, None]
    return _LANE // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (_LANE % 4) + i % 2


@lru_cache(maxsize=1)
def wgmma_a_fragment() -> tuple[np.ndarray, np.ndarray]:
    """(row, k) in a warp's 16 x 16 part of A of 16-bit half h of register i of lane l, arrays [4, 32, 2]."""
    i = np.arange(4)[:, None, None]
    lane = _LANE[None, :, None]
    h = np.arange(2)[None, None, :]
    return lane // 4 + 8 * (i % 2) + 0 * h, 2 * (lane % 4) + h + 8 * (i // 2)
