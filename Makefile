# make demo | test | lint | format | bench | clean. The first run sets everything up; later runs work offline.
PYTHON ?= python3
VENV := $(CURDIR)/.venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
TOOLKIT := $(CURDIR)/build/cuda-toolkit

# nvcc: on PATH, under CUDA_HOME, else assembled from PyPI wheels.
NVCC := $(or $(shell command -v nvcc 2>/dev/null),$(wildcard $(CUDA_HOME)/bin/nvcc))
ifeq ($(NVCC)$(filter 0,$(MSA_BUILD_CUDA)),)
export CUDA_HOME := $(TOOLKIT)/nvidia/cu13
TOOLKIT_READY := $(TOOLKIT)/ASSEMBLED
endif

# A torch that the new environment can import is reused; without a GPU the CPU build that is pinned for CI.
HAS_TORCH := $(shell $(PYTHON) -c "import torch" 2>/dev/null && echo yes)
TORCH := $(if $(shell command -v nvidia-smi 2>/dev/null),torch>=2.6,torch==2.13.0)

CPP_SOURCES = $(sort $(shell find csrc tests -name '*.h' -o -name '*.cuh' -o -name '*.cu' -o -name '*.cpp'))
# `make test` builds the C++ tests, and fails without them unless MSA_BUILD_TESTS=0 says to leave them out.
MSA_BUILD_TESTS ?= $(if $(filter 0,$(MSA_BUILD_CUDA)),0,$(if $(filter test,$(MAKECMDGOALS)),1,0))
export MSA_BUILD_TESTS

.PHONY: help venv build demo test lint format bench clean
help:
	@echo "make demo    an MSA backward on a real training pack, checked"
	@echo "make test    lint and all tests; GPU tests are skipped without a GPU"
	@echo "make bench   the benchmark; needs a GPU"
	@echo "make build | lint | format | clean"

$(READY): pyproject.toml
	$(PYTHON) -m venv $(if $(HAS_TORCH),--system-site-packages) $(VENV)
	$(PY) -c "import torch" 2>/dev/null || $(PY) -m pip install --quiet "$(TORCH)"
	$(PY) -m pip install --quiet "setuptools>=77" "pybind11>=2.13" ninja "cmake>=3.24" tqdm safetensors numpy
	$(PY) -m pip install --quiet "nvidia-cuda-runtime>=13.0,<14"
	$(PY) -m pip install --quiet "pytest>=8" "hypothesis>=6.100" "ruff==0.17.6" "clang-format==23.1.5" "mypy==2.4.1" "zstandard>=0.22" \
	  "nvidia-cuda-cuobjdump>=13,<14" "nvidia-cuda-nvdisasm>=13,<14"
	@# The package and its command, from anywhere; `build` puts the extension in its place.
	MSA_BUILD_CUDA=0 $(PY) -m pip install --quiet --no-build-isolation --no-deps --editable .
	touch $@

$(TOOLKIT)/ASSEMBLED: $(READY)
	$(PY) third_party/assemble_nvcc.py $(TOOLKIT)

venv: $(READY)

# Incremental: ninja rebuilds what changed.
build: $(READY) $(TOOLKIT_READY)
	@mkdir -p build
	@PATH="$(VENV)/bin:$$PATH" $(PY) setup.py --quiet build_ext --inplace > build/build.log 2>&1 || (cat build/build.log; exit 1)

demo: build
	$(PY) -m msa_ext demo

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run -Werror $(CPP_SOURCES)

format: $(READY)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(CPP_SOURCES)

test: lint build
	$(PY) -m pytest -q

bench: build
	PYTHONPATH=.:tests $(PY) benchmarks/bench_backward.py

clean:
	rm -rf build $(VENV) msa_ext/*.so *.egg-info
