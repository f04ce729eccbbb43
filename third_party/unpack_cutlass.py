"""Unpacks the pinned CUTLASS headers into third_party/cutlass; does nothing when they are there.

    python third_party/unpack_cutlass.py
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "nvidia-cutlass"
VERSION = "4.2.0.0"
SHA256 = "f9599ada45c7bcb6bf53f7d3f0a7d154183e53451c01bfa59eecd37dd4a693f6"
SOURCE = "cutlass_library/source/include/"
TARGET = Path(__file__).parent / "cutlass"
STAMP = TARGET / "UNPACKED"


def unpack() -> Path:
    """Returns the include directory, fetching the wheel with pip if it is missing."""
    include = TARGET / "include"
    if STAMP.exists() and STAMP.read_text() == SHA256:
        return include
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*pip, "--dest", folder, f"{PACKAGE}=={VERSION}"], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if digest != SHA256:
            raise RuntimeError(f"{wheel.name}: expected sha256 {SHA256}, got {digest}")
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.startswith(SOURCE) and not name.endswith("/"):
                    _write(include / name[len(SOURCE) :], archive.read(name))
                elif ".dist-info/" in name and "LICENSE" in name.upper():
                    _write(TARGET / Path(name).name, archive.read(name))
    STAMP.write_text(SHA256)
    return include


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


if __name__ == "__main__":
    print(unpack())
