"""PTX out of the fat binaries that nvcc embeds in a library or object."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

MAGIC = 0xBA55ED50
WRAPPER_MAGIC = 0x466243B1
_HEADER = struct.Struct("<IHHQ")
# kind, version, header bytes, payload bytes, compressed bytes, options offset, PTX version, architecture, name offset,
# name bytes, flags, (compression scheme), uncompressed bytes
_ENTRY = struct.Struct("<HHIQIIIIIIQQQ")
_PTX_ENTRY = 1
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


def ptx_entries(data: bytes) -> list[tuple[int, str]]:
    """(architecture, text) of every PTX entry of the fat binary that `data` starts with.

    Raises:
        ValueError: not a fat binary, or compressed otherwise than by zstd.
    """
    magic, _, header_bytes, size = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise ValueError(f"fat binary: expected magic {MAGIC:#x}, got {magic:#x}")
    entries, at, end = [], header_bytes, header_bytes + size
    while at < end:
        fields = _ENTRY.unpack_from(data, at)
        kind, _, entry_header, payload, compressed, _, _, arch = fields[:8]
        if kind == _PTX_ENTRY:
            body = data[at + entry_header : at + entry_header + payload]
            if body.startswith(_ZSTD_MAGIC):
                import zstandard

                body = zstandard.ZstdDecompressor().decompressobj().decompress(body[: compressed or None])
            elif not body.lstrip(b"\n\r\t ").startswith((b".version", b"//")):
                raise ValueError("fat binary: PTX is compressed by an unknown method; build with --no-compress")
            entries.append((arch, body.rstrip(b"\0").decode()))
        at += entry_header + payload
    return entries


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
