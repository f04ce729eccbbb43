"""explain(), the runtime seam, and an install whose extension is broken."""

import subprocess
import sys
import textwrap

import pytest

import msa_ext
from msa_ext import _runtime, support


def test_explain_lists_every_backend():
    text = support.explain()
    assert "reference takes every dq_accum and accumulates in float32" in text
    assert "reference" in text and "built architectures" in text
    try:
        names = list(support.cuda_backends())
    except RuntimeError:
        assert "CUDA backends unavailable" in text
    else:
        assert all(name in text for name in names)


def test_version():
    assert msa_ext.__version__ and msa_ext.__version__ in support.info_text()


def test_a_broken_extension_still_imports_and_says_why():
    code = """
        import sys
        sys.modules["msa_ext._C"] = None  # the import system's mark for a module that cannot be imported
        import torch, msa_ext
        from msa_ext import support
        from msa_ext.backward import run_backward
        print(support.explain())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "CUDA backends unavailable: msa_ext._C does not load" in done.stdout
    assert "nvidia-cuda-runtime" in done.stdout


def test_importing_does_not_load_the_extension():
    code = "import sys, msa_ext.backward, msa_ext.support; sys.exit('msa_ext._C' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_plan_workspace():
    try:
        extension = _runtime.extension()
    except RuntimeError as error:
        pytest.skip(f"pure-Python install: {error}")
    sizes = (8192, 64, 4, 8192, 1, 64, 131072, 300)
    total, sections = extension.plan_workspace(sizes, "bf16", 0)
    end = 0
    for _, offset, size in sections:
        assert offset % 256 == 0 and offset >= end
        end = offset + size
    assert total >= end
    guarded, spaced = extension.plan_workspace(sizes, "bf16", 4096)
    assert guarded == total + 4096 * len(sections) and len(spaced) == len(sections)
    with pytest.raises(ValueError, match="q: expected Hq / Hkv of 16 or 8, got 4"):
        extension.plan_workspace((8, 16, 4, 128, 1, 1, 8, 1), "bf16", 0)
