"""PTX and register counts out of the fat binaries that nvcc embeds in a library or object."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from pathlib import Path

MAGIC = 0xBA55ED50
WRAPPER_MAGIC = 0x466243B1
_HEADER = struct.Struct("<IHHQ")
# kind, version, header bytes, payload bytes, compressed bytes, options offset, PTX version, architecture, name offset,
# name bytes, flags, (compression scheme), uncompressed bytes
_ENTRY = struct.Struct("<HHIQIIIIIIQQQ")
PTX_ENTRY, CUBIN_ENTRY = 1, 2
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


_ELF_SECTION = struct.Struct("<IIQQQQIIQQ")  # name, type, flags, address, offset, size, link, ...
_ELF_SYMBOL = struct.Struct("<IBBHQQ")  # name, ...
_REGISTER_COUNT = 0x2F  # EIATTR_REGCOUNT


def entries(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(kind, architecture, decompressed payload) of every entry of the fat binary that `data` starts with.

    Raises:
        ValueError: not a fat binary.
    """
    magic, _, header_bytes, size = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise ValueError(f"fat binary: expected magic {MAGIC:#x}, got {magic:#x}")
    at, end = header_bytes, header_bytes + size
    while at < end:
        fields = _ENTRY.unpack_from(data, at)
        kind, _, entry_header, payload, compressed, _, _, arch = fields[:8]
        body = data[at + entry_header : at + entry_header + payload]
        if body.startswith(_ZSTD_MAGIC):
            import zstandard

            body = zstandard.ZstdDecompressor().decompressobj().decompress(body[: compressed or None])
        yield kind, arch, body
        at += entry_header + payload


def ptx_entries(data: bytes) -> list[tuple[int, str]]:
    """(architecture, text) of every PTX entry of the fat binary that `data` starts with.

    Raises:
        ValueError: not a fat binary, or compressed otherwise than by zstd.
    """
    texts = []
    for kind, arch, body in entries(data):
        if kind != PTX_ENTRY:
            continue
        if not body.lstrip(b"\n\r\t ").startswith((b".version", b"//")):
            raise ValueError("fat binary: PTX is compressed by an unknown method; build with --no-compress")
        texts.append((arch, body.rstrip(b"\0").decode()))
    return texts


def register_counts(data: bytes) -> dict[tuple[int, str], int]:
    """Registers a thread starts with, by (architecture, kernel), of the fat binary's cubins.

    Raises:
        ValueError: a cubin that is not ELF, such as one compressed otherwise than by zstd.
    """
    counts = {}
    for kind, arch, body in entries(data):
        if kind == CUBIN_ENTRY:
            counts.update({(arch, name): count for name, count in _cubin_registers(body).items()})
    return counts


def _cubin_registers(elf: bytes) -> dict[str, int]:
    """By kernel, from the attributes in .nv.info: format, attribute, payload bytes, then (symbol, count)."""
    if not elf.startswith(b"\x7fELF"):
        raise ValueError("fat binary: a cubin is not ELF; build with --no-compress")
    (table,) = struct.unpack_from("<Q", elf, 40)
    entry_bytes, number, names_index = struct.unpack_from("<HHH", elf, 58)
    sections = [_ELF_SECTION.unpack_from(elf, table + i * entry_bytes) for i in range(number)]

    def text(strings: tuple, offset: int) -> str:
        begin = strings[4] + offset
        return elf[begin : elf.index(b"\0", begin)].decode()

    by_name = {text(sections[names_index], section[0]): section for section in sections}
    if ".nv.info" not in by_name:
        return {}
    symbols, info = by_name[".symtab"], by_name[".nv.info"]
    counts, at, end = {}, info[4], info[4] + info[5]
    while at < end:
        form, attribute, size = struct.unpack_from("<BBH", elf, at)
        if attribute == _REGISTER_COUNT:
            symbol, count = struct.unpack_from("<II", elf, at + 4)
            name = _ELF_SYMBOL.unpack_from(elf, symbols[4] + symbol * _ELF_SYMBOL.size)[0]
            counts[text(sections[symbols[6]], name)] = count
        at += 4 + (size if form == 4 else 0)  # the other formats keep their value in the size field
    return counts


def from_memory(wrapper: int) -> bytes:
    """The fat binary a registration wrapper in this process points to."""
    magic, _, address, _ = struct.unpack("<IIQQ", ctypes.string_at(wrapper, 24))
    if magic != WRAPPER_MAGIC:
        raise ValueError(f"fat binary wrapper: expected magic {WRAPPER_MAGIC:#x}, got {magic:#x}")
    header = ctypes.string_at(address, _HEADER.size)
    _, _, header_bytes, size = _HEADER.unpack(header)
    return ctypes.string_at(address, header_bytes + size)


def in_file(path: Path) -> list[bytes]:
    """Every fat binary of a library or object file."""
    data = path.read_bytes()
    found, at = [], data.find(struct.pack("<I", MAGIC))
    while at >= 0:
        _, version, header_bytes, size = _HEADER.unpack_from(data, at)
        if at % 8 == 0 and version == 1 and header_bytes == _HEADER.size and at + header_bytes + size <= len(data):
            found.append(data[at : at + header_bytes + size])
        at = data.find(struct.pack("<I", MAGIC), at + 4)
    return found
