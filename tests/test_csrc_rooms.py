"""Who includes whom in csrc: the table of csrc/README.md."""

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).parent.parent / "csrc"
NEUTRAL = {"delta", "task_build", "postprocess"}
MAIN = {f"{arch}/{leaf.name}" for arch in ("simple", "sm90", "sm100") for leaf in (CSRC / arch).iterdir()}
KERNELS = NEUTRAL | MAIN
BASE = {"topology.h", "params.h"}
MAY_INCLUDE = {
    "topology.h": set(),
    "params.h": {"topology.h"},
    "device": BASE,
    "host": BASE,
    **{room: BASE | {"device", "host"} for room in KERNELS},
    "pipeline": BASE | {"host"} | KERNELS,
    "bindings.cpp": BASE | {"host", "pipeline"},
}
SOURCES = sorted(path.relative_to(CSRC) for path in CSRC.rglob("*") if path.suffix in (".h", ".cuh", ".cu", ".cpp"))


def room_of(path: Path) -> str:
    """`sm90/backward` of the main kernels, else the folder; the file itself at the top."""
    return next((room for room in MAIN if path.as_posix().startswith(room + "/")), path.parts[0])


def includes(source: Path) -> list[Path]:
    return [Path(x) for x in re.findall(r'^#include "(.+)"', (CSRC / source).read_text(), re.MULTILINE)]


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_arrows_point_up(source):
    room = room_of(source)
    for included in includes(source):
        assert (CSRC / included).is_file(), f"{included}: expected a path from csrc/"
        other = room_of(included)
        assert other == room or other in MAY_INCLUDE[room], f"{source} includes {included}"
        # Another room's kernels are reached through their launch.h, and host code includes no device code.
        if other != room and other in KERNELS:
            assert included.name == "launch.h"
        if source.suffix in (".h", ".cpp"):
            assert included.suffix == ".h"


@pytest.mark.parametrize("leaf", sorted(room for room in MAIN if not room.startswith("simple")))
def test_leaf_shape(leaf):
    assert {path.name for path in (CSRC / leaf).iterdir()} == {
        "config.cuh",
        "kernel.cuh",
        "launch.cu",
        "launch.h",
        "NOTES.md",
    }
