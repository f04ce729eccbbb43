"""Builds msa_ext._C through CMake. MSA_BUILD_CUDA=0 makes a pure-Python install; MSA_ARCHS picks architectures."""

import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
BUILD_CUDA = os.environ.get("MSA_BUILD_CUDA", "1") != "0"


def find_nvcc() -> str:
    """nvcc on PATH, else under CUDA_HOME."""
    candidates = [shutil.which("nvcc"), os.path.join(os.environ.get("CUDA_HOME", ""), "bin", "nvcc")]
    for candidate in candidates:
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    raise RuntimeError(
        "msa_ext: no nvcc on PATH nor under CUDA_HOME "
        f"(CUDA_HOME={os.environ.get('CUDA_HOME', '')!r}). Point CUDA_HOME at a CUDA 13 toolkit "
        "(third_party/assemble_nvcc.py makes one from PyPI wheels), or set MSA_BUILD_CUDA=0 for a pure-Python "
        "install that runs on the CPU only."
    )


def unpack(script: str) -> Path:
    """The folder that a script of third_party unpacks."""
    return runpy.run_path(str(ROOT / "third_party" / f"{script}.py"))["unpack"]()


def googletest() -> Path | str:
    """Our pinned GoogleTest; "" for the installed one, which serves where it is there."""
    return "" if os.path.exists("/usr/include/gtest/gtest.h") else unpack("unpack_googletest")


def is_stale(cache: Path, nvcc: str) -> bool:
    """Whether a build folder belongs to another compiler (CMake would drop its settings) or source tree."""
    if not cache.exists():
        return False
    lines = cache.read_text().splitlines()
    return f"CMAKE_CUDA_COMPILER:STRING={nvcc}" not in lines or f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT}" not in lines


class CMakeBuild(build_ext):
    """One CMake build for the one extension; incremental in build/<interpreter tag>."""

    def run(self) -> None:
        # setuptools clears `inplace` while it builds.
        self.into_source_tree = bool(self.inplace or self.editable_mode)
        super().run()

    def build_extension(self, ext: Extension) -> None:
        import pybind11

        build = ROOT / "build" / sysconfig.get_config_var("SOABI")
        build.mkdir(parents=True, exist_ok=True)
        # A module in the source tree has no wheel beside it: it looks in this interpreter's site-packages.
        rpath = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "lib"
        nvcc = find_nvcc()
        with_tests = os.environ.get("MSA_BUILD_TESTS") == "1"
        configure = [
            "cmake",
            *(["--fresh"] if is_stale(build / "CMakeCache.txt", nvcc) else []),
            "-S", str(ROOT),
            "-B", str(build),
            "-G", "Ninja",
            # Named, for the cache may hold the one of a build environment that pip has since removed.
            f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja') or 'ninja'}",
            f"-DCMAKE_CUDA_COMPILER={nvcc}",
            f"-DCUDAToolkit_ROOT={Path(nvcc).resolve().parent.parent}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DMSA_ARCHS={os.environ.get('MSA_ARCHS', '90a,100a')}",
            f"-DMSA_CUTLASS_INCLUDE={unpack('unpack_cutlass')}",
            f"-DMSA_CUDART_RPATH={rpath if self.into_source_tree else ''}",
            f"-DMSA_BUILD_TESTS={'ON' if with_tests else 'OFF'}",
            f"-DMSA_GOOGLETEST={googletest() if with_tests else ''}",
        ]  # fmt: skip
        subprocess.run(configure, check=True)
        subprocess.run(["cmake", "--build", str(build)], check=True)
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(build / target.name, target)


setup(
    packages=find_packages(include=["msa_ext", "msa_ext.*"]),
    package_data={"msa_ext": ["packs.json", "py.typed"]},
    ext_modules=[Extension("msa_ext._C", sources=[])] if BUILD_CUDA else [],
    cmdclass={"build_ext": CMakeBuild},
)
