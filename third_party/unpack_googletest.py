"""Unpacks the pinned GoogleTest sources into third_party/googletest; does nothing when they are there.

    python third_party/unpack_googletest.py

They are Debian's source package for users, fetched by apt-get as any user and installed nowhere.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

PACKAGE = "googletest"
VERSION = "1.12.1-0.2"
DEBIAN = "http://deb.debian.org/debian bookworm"
SHA256 = "927be72067517da503b6538026d451455c9e860f5dbfe237f792543db7d5a928"
TARGET = Path(__file__).parent.resolve() / "googletest"
STAMP = TARGET / "UNPACKED"


def unpack() -> Path:
    """Returns the source directory, fetching the package if it is missing."""
    if STAMP.exists() and STAMP.read_text() == SHA256:
        return TARGET
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        package = _fetch(folder)
        digest = hashlib.sha256(package.read_bytes()).hexdigest()
        if digest != SHA256:
            raise RuntimeError(f"{package.name}: expected sha256 {SHA256}, got {digest}")
        subprocess.run(["dpkg-deb", "-x", package, folder / "root"], check=True)
        shutil.rmtree(TARGET, ignore_errors=True)
        shutil.copytree(folder / "root/usr/src/googletest", TARGET)
        shutil.copy(folder / "root/usr/share/doc/googletest/copyright", TARGET / "LICENSE")
    STAMP.write_text(SHA256)
    return TARGET


def _fetch(folder: Path) -> Path:
    """Downloads the package: by the machine's package lists, by fresh ones of our own, or from Debian itself."""
    (folder / "lists/partial").mkdir(parents=True)
    (folder / "debian.list").write_text(f"deb [trusted=yes] {DEBIAN} main\n")  # the sha256 is what we trust
    (folder / "parts").mkdir()
    own_lists = ["-o", f"Dir::State::Lists={folder / 'lists'}", "-o", "APT::Sandbox::User="]
    debian = ["-o", f"Dir::Etc::SourceList={folder / 'debian.list'}", "-o", f"Dir::Etc::SourceParts={folder / 'parts'}"]
    download = ["download", f"{PACKAGE}={VERSION}"]
    tries = (
        ([], [download]),
        (own_lists, [["update"], download]),
        (own_lists + debian, [["update"], download]),
    )
    log = ""
    for options, steps in tries:
        for step in steps:
            try:
                done = subprocess.run(["apt-get", *options, "-qq", *step], cwd=folder, capture_output=True, text=True)
            except FileNotFoundError as error:
                raise RuntimeError(_advice(str(error))) from None
            log += done.stderr
        for package in folder.glob("*.deb"):
            return package
    raise RuntimeError(_advice(log))


def _advice(reason: str) -> str:
    return (
        f"GoogleTest: expected to fetch {PACKAGE} {VERSION}, got\n{reason.strip()}\n"
        "Install GoogleTest from your system's packages (libgtest-dev, gtest-devel), or set MSA_BUILD_TESTS=0 to "
        "leave the C++ checks out."
    )


if __name__ == "__main__":
    print(unpack())
