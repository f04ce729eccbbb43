"""The extension beside other CUDA runtimes, drivers and installs: it works, or says at load what it expected and got."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from msa_ext import _runtime

ROOT = Path(__file__).parents[1]
ABORT = "void abort(void);\n"
ANSWER = "int cuda{}GetVersion(int* version) {{ *version = {}; return 0; }}\n"


@pytest.fixture(scope="module")
def extension():
    try:
        return _runtime.extension()
    except RuntimeError as error:
        pytest.skip(f"pure-Python install: {error}")


def _runtime_functions(library: str) -> list[str]:
    """The functions of the CUDA runtime that a library needs."""
    if shutil.which("nm") is None or shutil.which("gcc") is None:
        pytest.skip("needs nm and gcc")
    listing = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
    names = [line.split()[-1].split("@")[0] for line in listing.stdout.splitlines()]
    return [name for name in names if name.startswith(("cuda", "__cuda"))]


def _stub(folder: Path, names: list[str], soname: str = "", runtime: int = 13000, driver: int = 0, works=False) -> Path:
    """A library with these functions, which abort unless it `works`; its symbols are versioned if it has a soname."""
    source = ABORT
    for name in names:
        if name == "cudaRuntimeGetVersion":
            source += ANSWER.format("Runtime", runtime)
        elif name == "cudaDriverGetVersion":
            source += ANSWER.format("Driver", driver)
        else:  # registration, when the module loads, has a handle to give
            source += f"void* {name}(void) {{ {'' if works or 'Register' in name else 'abort();'} return 0; }}\n"
    (folder / "stub.c").write_text(source)
    library = folder / (soname or "libother.so")
    versioned = []
    if soname:
        (folder / "versions").write_text(f"{soname} {{ global: *; }};\n")
        versioned = [f"-Wl,-soname,{soname}", f"-Wl,--version-script={folder / 'versions'}"]
    command = ["gcc", "-w", "-fno-builtin", "-shared", "-fPIC", *versioned, folder / "stub.c", "-o", library]
    subprocess.run(command, check=True)
    return library


def _run(code: str, tree: Path = ROOT) -> subprocess.CompletedProcess:
    """Code of a fresh process that imports from `tree`; `load(path)` loads a library for all that come after it."""
    start = (
        "import ctypes\ndef load(path): ctypes.CDLL(path, ctypes.RTLD_GLOBAL)\nfrom msa_ext import _runtime, support\n"
    )
    return subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, cwd=tree)


def _explain_beside(library: Path) -> str:
    done = _run(f"load({str(library)!r})\nprint(support.explain())\n")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("order", ["before", "after"])
def test_the_runtime_of_a_torch_for_cuda_12_is_left_alone(extension, tmp_path, order):
    library = _stub(tmp_path, _runtime_functions(extension.__file__), "libcudart.so.12", runtime=12080)
    steps = [f"load({str(library)!r})", "_runtime.extension()"]
    code = "\n".join(steps if order == "before" else steps[::-1])
    done = _run(f"{code}\nprint(_runtime.extension().device_count(), support.cuda_backends().keys())")
    assert done.returncode == 0, done.stderr
    assert "simple" in done.stdout


def test_any_function_of_another_runtime_is_an_error_at_load(extension, tmp_path):
    """Each function that the module needs, alone in a library in front of the runtime."""
    load = (
        "import ctypes, importlib.util as util, sys; ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)\n"
        "spec = util.spec_from_file_location('msa_ext._C', sys.argv[2])\n"
        "spec.loader.exec_module(util.module_from_spec(spec))\n"
    )
    names = _runtime_functions(extension.__file__)
    assert "__cudaLaunchKernel" in names and "cudaLaunchKernel" in names
    for name in names:
        folder = tmp_path / name
        folder.mkdir()
        library = _stub(folder, [name])
        done = subprocess.run([sys.executable, "-c", load, library, extension.__file__], capture_output=True, text=True)
        assert "CUDA runtime: expected one library, got __cudaRegisterFatBinary from" in done.stderr, name
        assert str(library) in done.stderr


def test_another_runtime_in_front_of_ours_is_an_error_at_load(extension, tmp_path):
    library = _stub(tmp_path, _runtime_functions(extension.__file__), runtime=12040, works=True)
    assert f"CUDA runtime: expected 13.x, got 12.4 from {library}" in _explain_beside(library)


def test_an_older_driver_is_an_error_at_load(extension, tmp_path):
    names = _runtime_functions(extension.__file__)
    library = _stub(tmp_path, names, "libcudart.so.13", driver=12040, works=True)
    assert "CUDA driver: expected one for CUDA 13 or newer, got one for CUDA 12.4" in _explain_beside(library)


@pytest.mark.parametrize("driver", [0, 13000, 13020, 14000], ids=["none", "same", "newer", "next_major"])
def test_a_driver_that_serves(extension, tmp_path, driver):
    names = _runtime_functions(extension.__file__)
    library = _stub(tmp_path, names, "libcudart.so.13", driver=driver, works=True)
    assert "CUDA backends unavailable" not in _explain_beside(library)


def test_a_runtime_that_lacks_a_function_is_an_error_at_load(extension, tmp_path):
    names = [name for name in _runtime_functions(extension.__file__) if name != "__cudaLaunchKernel"]
    text = _explain_beside(_stub(tmp_path, names, "libcudart.so.13", works=True))
    assert "CUDA backends unavailable" in text and "undefined symbol: __cudaLaunchKernel" in text


def _source_tree(folder: Path, extension) -> Path:
    """The package alone, as a source tree without git and metadata."""
    package = folder / "msa_ext"
    shutil.copytree(ROOT / "msa_ext", package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return Path(shutil.copy2(extension.__file__, package))


def test_a_source_tree_without_git_and_metadata(extension, tmp_path):
    module = _source_tree(tmp_path, extension)
    code = f"""
import importlib, importlib.metadata
def version(name): raise importlib.metadata.PackageNotFoundError(name)
importlib.metadata.version = version
import msa_ext
msa_ext = importlib.reload(msa_ext)
assert _runtime.extension().__file__ == {str(module)!r}
print(support.info_text())
try:
    print(_runtime.extension().device_info(0)["name"])
except RuntimeError as error:
    print(error)
"""
    done = _run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "msa_ext 0+unknown" in done.stdout and "CUDA backends unavailable" not in done.stdout
    assert f"built architectures: {', '.join(extension.built_archs())}" in done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("first", ["torch", "extension"])
@pytest.mark.parametrize("other", [False, True], ids=["alone", "beside_cuda_12"])
def test_a_source_tree_runs_on_the_gpu(extension, tmp_path, first, other):
    """Whichever of torch and the extension calls CUDA first, and with the runtime of CUDA 12 in the process."""
    _source_tree(tmp_path, extension)
    steps = ["import torch; torch.zeros(1, device='cuda')", "print(_runtime.extension().device_info(0))"]
    if other:
        library = _stub(tmp_path, _runtime_functions(extension.__file__), "libcudart.so.12", runtime=12080)
        steps.insert(0, f"load({str(library)!r})")
    if first == "extension":
        steps.reverse()
    demo = "from msa_ext.__main__ import main\nassert main(['demo', '--device', 'cuda', '--tokens', '256']) == 0"
    done = _run("\n".join([*steps, demo]), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "PASS" in done.stdout


def test_no_runtime_at_all_names_the_wheel(extension, tmp_path):
    module = _source_tree(tmp_path, extension)
    module.write_bytes(module.read_bytes().replace(b"libcudart.so.13", b"libcudart.so.00"))
    done = _run("print(support.explain())", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "CUDA backends unavailable" in done.stdout and "libcudart.so.00: cannot open shared object" in done.stdout
    assert "nvidia-cuda-runtime" in done.stdout


@pytest.mark.parametrize("archs", ["90a", "100a", "103a", "90a,103a", "90a,100a,103a"])
def test_a_subset_of_architectures_builds_what_runs_there(tmp_path, archs):
    """What the build would compile: neutral kernels for each, a main kernel for its own, the host layer told of both."""
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    if not all(shutil.which(program, path=path) for program in ("cmake", "ninja", "nvcc")):
        pytest.skip("needs cmake, ninja and nvcc")
    configure = ["cmake", "-S", ROOT, "-B", tmp_path, "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}"]
    environment = {**os.environ, "PATH": path}
    done = subprocess.run([*configure, f"-DMSA_ARCHS={archs}"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    commands = {
        str(Path(entry["file"]).relative_to(ROOT / "csrc")): entry["command"]
        for entry in json.loads((tmp_path / "compile_commands.json").read_text())
    }
    wanted = set(archs.split(","))
    own = {"sm90": wanted & {"90a"}, "sm100": wanted & {"100a", "103a"}}

    def compiled_for(command: str) -> set[str]:
        return {arch for arch in ("90a", "100a", "103a") if f"code=[compute_{arch},sm_{arch}]" in command}

    assert compiled_for(commands["delta/delta.cu"]) == wanted
    for name, subset in own.items():
        assert compiled_for(commands.get(f"{name}/backward/launch.cu", "")) == subset
        assert (f"MSA_HAS_{name.upper()}" in commands["pipeline/main_kernels.cpp"]) == bool(subset)
