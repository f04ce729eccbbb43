"""Address spaces: host memory that a test registered, shared memory of a CTA, local memory of a warp.

Every space keeps a shadow of written bytes. For who wrote and read shared memory last see clocks.py.
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
ALL_LANES = np.arange(32)
_NEAR = 1 << 20  # bytes, of a fault next to an allocation


def _repeated(byte: int) -> dict:
    return {size: kind(int.from_bytes(bytes([byte]) * size, "little")) for size, kind in UNSIGNED.items()}


_INITIALISED, _POISON = _repeated(1), _repeated(POISON_BYTE)
_SHIFT = {1: np.uint64(0), 2: np.uint64(1), 4: np.uint64(2), 8: np.uint64(3)}


class Fault(Exception):
    """What a warp cannot go on after: reported as `check`, and the warp ends. `lane` says whose fault it is."""

    def __init__(self, check: str, text: str, lane: int | None = None):
        super().__init__(text)
        self.check, self.lane = check, lane


class MemoryFault(Fault):
    """An access outside every allocation, misaligned, or of never-written bytes."""


class Region:
    """Bytes at `base` with their shadow; between grids the host may write elements of `host_element` bytes (0: none)."""

    def __init__(self, base: int, data: np.ndarray, initialised: bool, name: str, host_element: int = 0):
        self.base, self.size, self.name, self.host_element = base, data.nbytes, name, host_element
        self.read_only = self.constant = False
        self.data = data
        self.shadow = np.full(self.size, 1 if initialised else 0, np.uint8)
        self.all_initialised = initialised
        self.views = {n: data[: self.size // n * n].view(t) for n, t in UNSIGNED.items() if base % n == 0}
        self.shadows = {n: self.shadow[: self.size // n * n].view(t) for n, t in UNSIGNED.items()}

    def mark(self, begin: int, end: int) -> None:
        if not self.all_initialised:
            self.shadow[begin:end] = 1

    def index(self, addresses: np.ndarray, element: int) -> np.ndarray:
        return ((addresses - np.uint64(self.base)) >> _SHIFT[element]).astype(np.int64)

    def never_written(self, index: np.ndarray, element: int) -> np.ndarray:
        """Which of these elements have a byte that nothing wrote."""
        return self.shadows[element][index] != _INITIALISED[element]

    def adopt_host_writes(self) -> None:
        """Marks what the host wrote: elements no kernel wrote a byte of that are not poison any more."""
        if self.all_initialised or not self.host_element:
            return
        shadow, values = self.shadows[self.host_element], self.views[self.host_element]
        shadow[(shadow == 0) & (values != _POISON[self.host_element])] = _INITIALISED[self.host_element]
        self.all_initialised = bool(self.shadow.all())


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
        self, address: int, size: int, *, initialised: bool, name: str, keep: object = None, host_element: int = 0
    ) -> Region:
        """Makes `[address, address + size)` accessible to kernels; `keep` lives as long."""
        for old in [r for r in self.regions if r.base < address + size and address < r.base + r.size]:
            self.unregister(old)
        region = Region(address, host_bytes(address, size), initialised, name, host_element)
        region.keep = keep
        at = bisect.bisect(self.bases, address)
        self.bases.insert(at, address)
        self.regions.insert(at, region)
        return region

    def unregister(self, region: Region) -> None:
        at = self.bases.index(region.base)
        del self.bases[at], self.regions[at]
        self.last = None

    def adopt_host_writes(self) -> None:
        for region in self.regions:
            region.adopt_host_writes()

    def at(self, address: int) -> Region | None:
        region = self.last
        if region is not None and region.base <= address < region.base + region.size:
            return region
        number = bisect.bisect(self.bases, address) - 1
        if number >= 0 and address < self.bases[number] + self.regions[number].size:
            self.last = self.regions[number]
            return self.last
        return None

    def find(self, address: int, size: int, lane: int | None = None) -> Region:
        region = self.at(address)
        if region is None or address + size > region.base + region.size:
            text = f"access of {size} bytes at {address:#x}, {self._nearest(address, size)}"
            raise MemoryFault("out_of_bounds", text, lane)
        return region

    def _nearest(self, address: int, size: int) -> str:
        """Where an access that is outside every allocation, or not wholly inside one, lies."""
        number = bisect.bisect(self.bases, address)
        near = [(_NEAR, "")]
        for r in self.regions[max(number - 1, 0) : number]:
            near.append((address + size - r.base - r.size, f"bytes past the end of {r.name} ({r.size} bytes)"))
        for r in self.regions[number : number + 1]:
            near.append((r.base - address, f"bytes before {r.name} ({r.size} bytes)"))
        distance, text = min(near)
        return f"{distance} {text}" if text else "outside every allocation"

    def groups(self, addresses: np.ndarray, size: int, lanes: np.ndarray = ALL_LANES):
        """Yields (region, selection of the accesses or None for all)."""
        region = self.at(int(addresses.min()))
        if region is not None and int(addresses.max()) + size <= region.base + region.size:
            yield region, None
            return
        left = np.ones(len(addresses), bool)
        while left.any():
            first = np.flatnonzero(left)[addresses[left].argmin()]
            region = self.find(int(addresses[first]), size, lanes[first])
            inside = left & (addresses < np.uint64(region.base + region.size))
            last = np.flatnonzero(inside)[addresses[inside].argmax()]
            self.find(int(addresses[last]), size, lanes[last])
            yield region, inside
            left &= ~inside

    def bytes_at(self, address: int, size: int) -> tuple[Region, int]:
        region = self.find(address, size)
        return region, address - region.base


def check_alignment(addresses: np.ndarray, size: int, lanes: np.ndarray = ALL_LANES) -> None:
    """PTX ISA 6.4.1: addresses are multiples of the access size."""
    if size > 1:
        wrong = addresses & addresses.dtype.type(size - 1)
        if wrong.any():
            at = int((wrong != 0).argmax())
            raise MemoryFault("misaligned", f"access of {size} bytes at {int(addresses[at]):#x}, misaligned", lanes[at])


def check_inside(addresses: np.ndarray, size: int, limit: int, what: str, lanes: np.ndarray = ALL_LANES) -> None:
    """Accesses within the `limit` bytes of an address space that begins at 0."""
    at = int(addresses.argmax())
    past = int(addresses[at]) + size - limit
    if past > 0:
        place = f"{past} bytes past the end of" if past <= _NEAR else "outside"
        text = f"access of {size} bytes at {int(addresses[at]):#x}, {place} {what} ({limit} bytes)"
        raise MemoryFault("out_of_bounds", text, lanes[at])


def store(
    region: Region, addresses: np.ndarray, values: list[np.ndarray], element: int, lanes: np.ndarray = ALL_LANES
) -> None:
    if region.read_only:
        text = f"write at {int(addresses[0]):#x} to read-only {region.name}"
        raise MemoryFault("out_of_bounds", text, lanes[0])
    index = region.index(addresses, element)
    view = region.views[element]
    for i, value in enumerate(values):
        at = index + i if i else index
        view[at] = value
        if not region.all_initialised:
            region.shadows[element][at] = _INITIALISED[element]
