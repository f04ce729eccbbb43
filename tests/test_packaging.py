"""What the build promises: architectures, the run-time library, the pinned headers, and clear failures."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import setuptools
from simulator import fatbin

from msa_ext import _runtime

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def extension():
    try:
        return _runtime.extension()
    except RuntimeError as error:
        pytest.skip(f"pure-Python install: {error}")


def test_every_architecture_has_sass_and_ptx(extension):
    binaries = fatbin.in_file(Path(extension.__file__))
    entries = {(kind, arch) for binary in binaries for kind, arch, _ in fatbin.entries(binary)}
    numbers = {int(arch.rstrip("af")) for arch in extension.built_archs()}
    assert numbers and entries == {
        (kind, number) for kind in (fatbin.PTX_ENTRY, fatbin.CUBIN_ENTRY) for number in numbers
    }


def test_cudart_comes_from_the_wheel(extension):
    """Without a toolkit in the library path the wheel's libcudart is the one found."""
    pytest.importorskip("nvidia")
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('msa_ext._C', {extension.__file__!r})\n"
        "module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)\n"
        "print([line.split()[-1] for line in open('/proc/self/maps') if 'libcudart' in line][0])\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "/nvidia/cu13/lib/libcudart.so.13" in done.stdout


def test_unpacking_cutlass_again_needs_no_network():
    if not (ROOT / "third_party/cutlass/UNPACKED").exists():
        pytest.skip("the headers are not unpacked: a pure-Python install")
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "https_proxy": "http://127.0.0.1:9"}
    script = ROOT / "third_party/unpack_cutlass.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.strip()) / "cute" / "layout.hpp").exists()
    assert list((ROOT / "third_party/cutlass").glob("LICENSE*"))


def test_unpacking_googletest_again_needs_no_network():
    if not (ROOT / "third_party/googletest/UNPACKED").exists():
        pytest.skip("not unpacked: GoogleTest is installed, or the C++ tests are left out")
    done = subprocess.run(
        [sys.executable, ROOT / "third_party/unpack_googletest.py"], capture_output=True, text=True, env={"PATH": ""}
    )
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.strip()) / "googletest/include/gtest/gtest.h").exists()
    assert (ROOT / "third_party/googletest/LICENSE").exists()


@pytest.mark.parametrize(
    "apt_get, message",
    [
        (None, "MSA_BUILD_TESTS=0"),
        ("echo no such package >&2; exit 100", "no such package"),
        ('case "$*" in *download*) echo other > googletest.deb;; esac', "expected sha256 927be720"),
        # The machine's own lists are empty, ours are fetched.
        (
            'case "$*" in *Lists*download*) echo other > googletest.deb;; *Lists*update*) ;; *) exit 100;; esac',
            "sha256",
        ),
    ],
    ids=["no_apt", "no_package", "other_package", "own_lists"],
)
def test_googletest_that_cannot_be_fetched_is_a_clear_error(tmp_path, apt_get, message):
    script = shutil.copy(ROOT / "third_party/unpack_googletest.py", tmp_path)
    if apt_get is not None:
        (tmp_path / "apt-get").write_text(f"#!/bin/sh\n{apt_get}\n")
        (tmp_path / "apt-get").chmod(0o755)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env={"PATH": str(tmp_path)})
    assert done.returncode != 0 and message in done.stderr
    assert not (tmp_path / "googletest").exists()


def _setup(*arguments) -> None:
    command = [sys.executable, "setup.py", "--quiet", *arguments]
    environment = {**os.environ, "MSA_BUILD_CUDA": "0"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr


def test_the_source_distribution_carries_every_source_and_test(tmp_path):
    _setup("egg_info", "--egg-base", tmp_path)
    shipped = set((tmp_path / "msa_ext.egg-info/SOURCES.txt").read_text().splitlines())
    folders = [ROOT / name for name in ("benchmarks", "csrc", "msa_ext", "tests", "third_party/licenses")]
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    wanted = {str(file.relative_to(ROOT)) for file in files if file.suffix not in (".pyc", ".so")}
    wanted |= {"CMakeLists.txt", "CONTRIBUTING.md", "Makefile", "third_party/unpack_googletest.py"}
    assert not wanted - shipped
    assert not [name for name in shipped if name.startswith(("third_party/cutlass", "third_party/googletest"))]


def test_an_install_has_its_command_and_the_notices_of_what_is_compiled_in(tmp_path):
    _setup("egg_info", "--egg-base", tmp_path, "dist_info", "--output-dir", tmp_path)
    (folder,) = tmp_path.glob("*.dist-info")
    assert "msa_ext = msa_ext.__main__:main" in (folder / "entry_points.txt").read_text()
    notices = {file.name: file.read_text() for file in (folder / "licenses").rglob("*") if file.is_file()}
    assert notices.keys() == {"LICENSE", "CUTLASS.txt", "pybind11.txt"}
    unpacked = ROOT / "third_party/cutlass/LICENSE.txt"
    if unpacked.exists():
        assert notices["CUTLASS.txt"] == unpacked.read_text()
    assert "Wenzel Jakob" in notices["pybind11.txt"]


def test_no_nvcc_is_a_clear_error(tmp_path):
    """PATH with a Python only, no CUDA_HOME."""
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path), "CUDA_HOME": ""}
    code = (
        "import runpy, setuptools\n"
        "setuptools.setup = lambda **options: None\n"
        f"runpy.run_path({str(ROOT / 'setup.py')!r})['find_nvcc']()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode != 0
    assert "CUDA_HOME" in done.stderr and "MSA_BUILD_CUDA=0" in done.stderr


def test_a_build_folder_of_another_compiler_is_stale(tmp_path, monkeypatch):
    monkeypatch.setattr(setuptools, "setup", lambda **options: None)
    is_stale = runpy.run_path(str(ROOT / "setup.py"))["is_stale"]
    cache = tmp_path / "CMakeCache.txt"
    assert not is_stale(cache, "/a/nvcc")
    cache.write_text(f"CMAKE_CUDA_COMPILER:STRING=/a/nvcc\nCMAKE_HOME_DIRECTORY:INTERNAL={ROOT}\n")
    assert not is_stale(cache, "/a/nvcc")
    assert is_stale(cache, "/b/nvcc")
    cache.write_text("CMAKE_CUDA_COMPILER:STRING=/a/nvcc\nCMAKE_HOME_DIRECTORY:INTERNAL=/elsewhere\n")
    assert is_stale(cache, "/a/nvcc")


def test_unknown_architecture_is_a_clear_error(tmp_path):
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if cmake is None or shutil.which("nvcc") is None:
        pytest.skip("needs cmake and nvcc")
    ninja = (
        [f"-DCMAKE_MAKE_PROGRAM={path}"]
        if (path := shutil.which("ninja", path=str(Path(sys.executable).parent)))
        else []
    )
    command = [cmake, "-S", ROOT, "-B", tmp_path, "-G", "Ninja", *ninja, f"-DPython_EXECUTABLE={sys.executable}"]
    done = subprocess.run([*command, "-DMSA_ARCHS=80"], capture_output=True, text=True)
    assert done.returncode != 0
    assert "MSA_ARCHS: expected a comma-separated list of 90a, 100a, 103a, got" in done.stderr
