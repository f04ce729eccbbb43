"""`msa_ext demo | info`, also as `python -m msa_ext`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import __version__, demo, support


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="msa_ext", description="Training backward of MiniMax Sparse Attention.")
    parser.add_argument("--version", action="version", version=f"msa_ext {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    show = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter}
    demo_parser = commands.add_parser("demo", help="run and check a backward on a real pack", **show)
    demo_parser.add_argument("--pack", default="pack_12", help="pack whose document lengths are used")
    demo_parser.add_argument("--tokens", type=int, default=2048, help="token budget")
    demo_parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to run")
    demo_parser.add_argument("--seed", type=int, default=0, help="seed of all inputs")
    demo_parser.add_argument("--save", type=Path, default=None, help="write the gradients as safetensors")
    commands.add_parser("info", help="print versions, built architectures, devices and backends", **show)
    arguments = parser.parse_args(argv)
    if arguments.command == "info":
        print(support.info_text())
        return 0
    try:
        passed = demo.run(arguments.pack, arguments.tokens, arguments.device, arguments.seed, arguments.save)
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
