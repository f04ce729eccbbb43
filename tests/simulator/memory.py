"""Address spaces: host memory that a test registered, shared memory of a CTA, local memory of a warp.

Every space keeps a shadow of initialised bytes. Shared memory also keeps, per 16-byte granule, who wrote and who read
it last (see clocks.py).
"""

from __future__ import annotations

import bisect
import ctypes

import numpy as np

# Windows of the generic address space (PTX ISA 6.4.1.1); host addresses lie below both.
SHARED_WINDOW = 1 << 60
LOCAL_WINDOW = 1 << 61
POISON_BYTE = 0xCB
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_INITIALISED = {1: np.uint8(1), 2: np.uint16(0x0101), 4: np.uint32(0x01010101), 8: np.uint64(0x0101010101010101)}
_SHIFT = {1: np.uint64(0), 2: np.uint64(1), 4: np.uint64(2), 8: np.uint64(3)}


class MemoryFault(Exception):
    """An access outside every allocation, misaligned, or of never-written bytes."""

    def __init__(self, check: str, text: str):
        super().__init__(text)
        self.check = check


class Region:
    """Bytes at `base` with their shadow."""

    def __init__(self, base: int, data: np.ndarray, initialised: bool, name: str, read_only: bool = False):
        self.base, self.size, self.name, self.read_only = base, data.nbytes, name, read_only
        self.data = data
        self.shadow = np.full(self.size, 1 if initialised else 0, np.uint8)
        self.all_initialised = initialised
        self.views = {n: data[: self.size // n * n].view(t) for n, t in UNSIGNED.items() if base % n == 0}
        self.shadows = {n: self.shadow[: self.size // n * n].view(t) for n, t in UNSIGNED.items()}

    def mark(self, begin: int, end: int) -> None:
        if not self.all_initialised:
            self.shadow[begin:end] = 1

    def check_initialised(self, index: np.ndarray, element: int, address: int) -> None:
        missing = self.shadows[element][index] != _INITIALISED[element]
        if missing.any():
            # The host may have written the bytes since they were handed out with the poison pattern.
            values = self.views[element][index][missing]
            poison = UNSIGNED[element](int.from_bytes(bytes([POISON_BYTE]) * element, "little"))
            if (values == poison).any() or self.base == 0:
                at = int(np.atleast_1d(index)[np.atleast_1d(missing)][0]) * element + self.base
                raise MemoryFault("uninitialised", f"read of never-written memory at {at:#x} ({self.name})")
            self.shadows[element][index] = _INITIALISED[element]


def host_bytes(address: int, size: int) -> np.ndarray:
    """A writable view of this process's memory."""
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=np.uint8)


class GlobalMemory:
    """The registered allocations."""

    def __init__(self):
        self.bases: list[int] = []
        self.regions: list[Region] = []
        self.last: Region | None = None

    def register(
        self, address: int, size: int, *, initialised: bool, name: str, keep: object = None, read_only: bool = False
    ) -> Region:
        """Makes `[address, address + size)` accessible to kernels; `keep` lives as long."""
        for old in [r for r in self.regions if r.base < address + size and address < r.base + r.size]:
            self.unregister(old)
        region = Region(address, host_bytes(address, size), initialised, name, read_only)
        region.keep = keep
        at = bisect.bisect(self.bases, address)
        self.bases.insert(at, address)
        self.regions.insert(at, region)
        return region

    def unregister(self, region: Region) -> None:
        at = self.bases.index(region.base)
        del self.bases[at], self.regions[at]
        self.last = None

    def find(self, address: int, size: int) -> Region:
        region = self.last
        if region is not None and region.base <= address and address + size <= region.base + region.size:
            return region
        at = bisect.bisect(self.bases, address) - 1
        if at >= 0:
            region = self.regions[at]
            if address + size <= region.base + region.size:
                self.last = region
                return region
            if address < region.base + region.size:
                raise MemoryFault(
                    "out_of_bounds", f"access of {size} bytes at {address:#x} passes the end of {region.name}"
                )
        raise MemoryFault("out_of_bounds", f"access of {size} bytes at {address:#x}, outside every allocation")

    def groups(self, addresses: np.ndarray, size: int):
        """Yields (region, selection of lanes or None for all)."""
        low, high = int(addresses.min()), int(addresses.max())
        try:
            region = self.find(low, size)
            if high + size <= region.base + region.size:
                yield region, None
                return
        except MemoryFault:
            if low == high:
                raise
        left = np.ones(len(addresses), bool)
        while left.any():
            address = int(addresses[left].min())
            region = self.find(address, size)
            inside = left & (addresses < np.uint64(region.base + region.size))
            top = int(addresses[inside].max())
            if top + size > region.base + region.size:
                self.find(top, size)
            yield region, inside
            left &= ~inside

    def bytes_at(self, address: int, size: int) -> tuple[Region, int]:
        region = self.find(address, size)
        return region, address - region.base


def check_alignment(addresses: np.ndarray, size: int) -> None:
    """PTX ISA 6.4.1: addresses are multiples of the access size."""
    if size > 1:
        wrong = addresses & addresses.dtype.type(size - 1)
        if wrong.any():
            bad = int(addresses[wrong != 0][0])
            raise MemoryFault("misaligned", f"access of {size} bytes at {bad:#x}, misaligned")


def load(region: Region, addresses: np.ndarray, element: int, count: int) -> list[np.ndarray]:
    """`count` consecutive elements of every address, one array an element."""
    index = ((addresses - addresses.dtype.type(region.base)) >> addresses.dtype.type(_SHIFT[element])).astype(np.int64)
    view = region.views[element]
    out = []
    for i in range(count):
        at = index + i if i else index
        if not region.all_initialised:
            region.check_initialised(at, element, region.base)
        out.append(view[at])
    return out


def store(region: Region, addresses: np.ndarray, values: list[np.ndarray], element: int) -> None:
    if region.read_only:
        raise MemoryFault("out_of_bounds", f"write to read-only {region.name}")
    index = ((addresses - addresses.dtype.type(region.base)) >> addresses.dtype.type(_SHIFT[element])).astype(np.int64)
    view = region.views[element]
    for i, value in enumerate(values):
        at = index + i if i else index
        view[at] = value
        if not region.all_initialised:
            region.shadows[element][at] = _INITIALISED[element]
