"""Builds and loads shim.c, the `libcudart.so.13` that records kernels and hands launches to Python."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")
LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint), ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t,
    ctypes.c_void_p, ctypes.c_int, ctypes.c_int,
)  # fmt: skip
MEMSET = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p)
STREAM = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
ENCODE = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p,
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int,
)  # fmt: skip
STREAM_RECORD, STREAM_WAIT, STREAM_SYNCHRONIZE = range(3)
FATBIN = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_long)
FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_long, ctypes.c_void_p, ctypes.c_char_p)
VARIABLE = ctypes.CFUNCTYPE(None, ctypes.c_long, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)


def cache_directory() -> Path:
    """Where compiled shims and micro kernels are kept."""
    base = os.environ.get("MSA_SIMULATOR_CACHE") or Path(tempfile.gettempdir()) / f"msa-simulator-{os.getuid()}"
    path = Path(base)
    path.mkdir(parents=True, exist_ok=True)
    return path


def cuda_home() -> Path:
    """The toolkit of the nvcc on PATH or in CUDA_HOME."""
    for candidate in (os.environ.get("CUDA_HOME"), "/usr/local/cuda-13.0", "/usr/local/cuda"):
        if candidate and (Path(candidate) / "include" / "cuda_runtime_api.h").exists():
            return Path(candidate)
    nvcc = shutil.which("nvcc")
    if nvcc:
        root = Path(nvcc).resolve().parent.parent
        if (root / "include" / "cuda_runtime_api.h").exists():
            return root
    raise RuntimeError("simulator: no CUDA headers found; set CUDA_HOME")


@cache
def load() -> ctypes.CDLL:
    """The shim, loaded under the soname of the CUDA runtime.

    Raises:
        RuntimeError: a real libcudart is in this process, or gcc fails.
    """
    key = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    library = cache_directory() / key / "libcudart.so.13"
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcudart" in line}
    if mapped - {str(library)}:
        raise RuntimeError(
            f"simulator: {', '.join(sorted(mapped))} is already loaded; use the simulator in a fresh process, before "
            "msa_ext._C"
        )
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
        versions = library.parent / "versions"
        versions.write_text("libcudart.so.13 { global: *; };\n")
        new = library.with_suffix(f".{os.getpid()}")
        command = [
            "gcc", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-o", str(new), str(SOURCE),
            f"-I{cuda_home() / 'include'}", "-Wl,-soname,libcudart.so.13", f"-Wl,--version-script={versions}",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"simulator: gcc failed on shim.c:\n{done.stderr}")
        os.replace(new, library)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
