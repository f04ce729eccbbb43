"""Options and skips shared by all tests."""

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--fuzz", type=int, default=20, help="random packs of the GPU fuzz test")
    parser.addoption("--long", action="store_true", help="also run the tests marked long")
    parser.addoption("--seed", type=int, default=0, help="first seed of the GPU fuzz test")


def pytest_collection_modifyitems(config, items):
    skips = {}
    if not torch.cuda.is_available():
        skips["gpu"] = pytest.mark.skip(reason="needs a CUDA GPU")
    if not config.getoption("long"):
        skips["long"] = pytest.mark.skip(reason="needs --long")
    for item in items:
        for marker in skips.keys() & item.keywords.keys():
            item.add_marker(skips[marker])


def pytest_generate_tests(metafunc):
    if "fuzz_seed" in metafunc.fixturenames:
        first = metafunc.config.getoption("seed")
        metafunc.parametrize("fuzz_seed", range(first, first + metafunc.config.getoption("fuzz")))
