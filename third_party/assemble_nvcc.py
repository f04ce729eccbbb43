"""Assembles a CUDA compiler from PyPI wheels, for machines without a toolkit; prints its CUDA_HOME.

    python third_party/assemble_nvcc.py FOLDER
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

WHEELS = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
]


def assemble(folder: Path) -> Path:
    """Returns the toolkit's root under `folder`, fetching the wheels with pip if they are missing."""
    root = folder.resolve() / "nvidia" / "cu13"
    stamp = folder / "ASSEMBLED"
    if stamp.exists() and stamp.read_text() == "\n".join(WHEELS):
        return root
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
    subprocess.run([*pip, "--target", str(folder), *WHEELS], check=True)
    # The linker looks for lib64 and for unversioned names.
    for link, target in (("lib64", "lib"), ("lib/libcudart.so", "libcudart.so.13")):
        path = root / link
        if not path.exists():
            path.symlink_to(target)
    for program in (*(root / "bin").glob("*"), *(root / "nvvm" / "bin").glob("*")):
        if program.is_file():
            program.chmod(program.stat().st_mode | 0o111)
    stamp.write_text("\n".join(WHEELS))
    return root


if __name__ == "__main__":
    print(assemble(Path(sys.argv[1])))
