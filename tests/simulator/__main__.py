"""`python -m simulator run|list|profile FILE`: kernels of a PTX file or shared library."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from . import Simulator, fatbin, ptx
from .simulator import DEVICES


def texts(path: Path) -> list[tuple[str, str]]:
    """(label, PTX) of a PTX file or of every fat binary of a library."""
    if path.suffix == ".ptx":
        return [(path.name, path.read_text())]
    found = []
    for number, data in enumerate(fatbin.in_file(path)):
        found += [(f"{path.name} #{number} sm_{arch}", text) for arch, text in fatbin.ptx_entries(data)]
    if not found:
        raise SystemExit(f"simulator: no PTX in {path}")
    return found


def list_kernels(path: Path) -> None:
    for label, text in texts(path):
        for kernel in ptx.parse(text).kernels.values():
            print(f"{label}: {kernel.name} ({len(kernel.instructions)} instructions, {kernel.parameter_bytes} B)")


def run(arguments: argparse.Namespace) -> None:
    device = Simulator(arguments.device, mode=arguments.mode, seed=arguments.seed)
    wanted = [t for _, t in texts(arguments.file) if any(arguments.kernel in k for k in ptx.parse(t).kernels)]
    if not wanted:
        raise SystemExit(f"simulator: no kernel {arguments.kernel!r} in {arguments.file}")
    wanted.sort(key=lambda t: f"sm_{device.major * 10 + device.minor}" not in t)
    values, arrays = [], []
    for text in arguments.argument:
        kind, _, value = text.partition(":")
        if kind in ("zeros", "random"):
            array = np.zeros(int(value), np.float32)
            if kind == "random":
                array[:] = np.random.default_rng(arguments.seed).standard_normal(len(array))
            arrays.append(device.array(array))
            values.append(arrays[-1])
        elif kind in ("int", "float"):
            values.append(int(value, 0) if kind == "int" else float(value))
        else:
            raise SystemExit(f"simulator: argument {text!r}: expected zeros:N, random:N, int:X or float:X")
    with device.profiled() as profile:
        device.launch(
            wanted[0], arguments.kernel, arguments.grid, arguments.block, *values, shared_bytes=arguments.shared
        )
    if arguments.action == "profile":
        print_profile(profile.table())
    else:
        for i, array in enumerate(arrays):
            print(f"array {i}: {np.array2string(array, threshold=16)}")
    for report in device.reports:
        print(report)


def print_profile(table: Counter) -> None:
    """Executed warp instructions by opcode, one column a warp."""
    warps = sorted({warp for _, warp, _ in table})
    opcodes = Counter()
    for (_, _, opcode), count in table.items():
        opcodes[opcode] += count
    print(f"{'opcode':<64} {'all':>9} " + " ".join(f"{f'warp {w}':>8}" for w in warps))
    for opcode, total in opcodes.most_common():
        cells = (sum(c for (_, w, o), c in table.items() if w == warp and o == opcode) for warp in warps)
        print(f"{opcode:<64.64} {total:>9} " + " ".join(f"{c:>8}" for c in cells))
    print(f"{'total':<64} {opcodes.total():>9}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m simulator", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("list", help="kernels of a file").add_argument("file", type=Path)
    for name, text in (("run", "run a kernel"), ("profile", "run a kernel and count its warp instructions")):
        action = actions.add_parser(name, help=text)
        action.add_argument("file", type=Path)
        action.add_argument("kernel", help="name or a part of it")
        action.add_argument("argument", nargs="*", help="zeros:N, random:N (float32 arrays), int:X, float:X")
        action.add_argument("--grid", type=int, default=1)
        action.add_argument("--block", type=int, default=128)
        action.add_argument("--shared", type=int, default=0, help="dynamic shared memory, bytes")
        action.add_argument("--device", choices=list(DEVICES), default="b200")
        action.add_argument("--mode", choices=("eager", "late", "random"), default="late")
        action.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.action == "list":
        list_kernels(arguments.file)
    else:
        run(arguments)


if __name__ == "__main__":
    sys.exit(main())
