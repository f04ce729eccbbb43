"""Options and skips shared by all tests."""

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--fuzz", type=int, default=20, help="random packs of the GPU fuzz test")
    parser.addoption("--seed", type=int, default=0, help="first seed of the GPU fuzz test")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_generate_tests(metafunc):
    if "fuzz_seed" in metafunc.fixturenames:
        first = metafunc.config.getoption("seed")
        metafunc.parametrize("fuzz_seed", range(first, first + metafunc.config.getoption("fuzz")))
