"""The GoogleTest checks of the host layer (tests/cpp), one pytest item each."""

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

BINARY = Path(__file__).parents[1] / "build" / sysconfig.get_config_var("SOABI") / "msa_cpp_tests"
REQUIRED = os.environ.get("MSA_BUILD_TESTS") == "1"  # set by `make test`


def _list_tests() -> list[str]:
    if not BINARY.exists():
        return []
    listing = subprocess.run([BINARY, "--gtest_list_tests"], capture_output=True, text=True, check=True).stdout
    names, suite = [], ""
    for line in listing.splitlines():
        if line.startswith("  "):
            names.append(suite + line.split("#")[0].strip())
        elif line.endswith("."):
            suite = line
    return names


TESTS = _list_tests()


def test_binary_is_built():
    if not TESTS and not REQUIRED:
        pytest.skip(f"{BINARY} is not built: make test")
    assert TESTS, f"{BINARY} is not built or lists no tests"


@pytest.mark.parametrize("name", TESTS)
def test_cpp(name):
    run = subprocess.run([BINARY, f"--gtest_filter={name}"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "[  PASSED  ] 1 test." in run.stdout
    if "[  SKIPPED ]" in run.stdout:
        if REQUIRED:
            pytest.fail(run.stdout)
        pytest.skip(run.stdout)
