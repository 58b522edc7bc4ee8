# `make` alone lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# demo: empty (use what is there) or sandbox (start a Slurm on this machine).
SLURM ?=
# chaos: number of faults, and the random seed that chooses them.
FAULTS ?= 200
SEED ?= 1
# bench: the Python of an environment with lightning-fabric and accelerate, a torchx, and the Python of an environment
# with nvidia-resiliency-ext, to compare with.
PEERS ?=
TORCHX ?=
NVRX ?=
# A folder that may hold MNIST's files, such as a copy that several checkouts share. For demo, test and bench.
MNIST_FROM ?= $(wildcard ../shared/data/mnist)
export MNIST_FROM
# PyTorch takes minutes to download: on a terminal, pip shows how far it is.
PIP_INSTALL = [ -t 1 ] && quiet= || quiet=-qq; $(BIN)/pip install $$quiet --disable-pip-version-check
# Hundreds of processes import this package: let Python cache its bytecode, whatever the shell has set.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help demo quick test test-all coverage test-slurms test-gpu test-gpu-pair test-gpu-nodes check docs bench chaos jobs sandbox venv
help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 23

demo: $(VENV)/.installed  ## train the MNIST CNN here; SLURM=sandbox does it on a Slurm of its own
	@$(BIN)/python scripts/demo.py --slurm "$(SLURM)" --mnist-from "$(MNIST_FROM)"

# Test processes that run side by side: more than cores, as tests of jobs on Slurm wait much.
WORKERS ?= $(shell cores=$$(nproc); echo $$((cores < 12 ? cores + 5 : 16)))
PYTEST_OPTIONS = --dist=loadgroup --no-loadscope-reorder
PYTEST = $(BIN)/python -m pytest $(PYTEST_OPTIONS) --numprocesses=$(WORKERS)
# Those without torch wait seldom: one process more than cores.
PURE_WORKERS ?= $(shell echo $$(($$(nproc) + 1)))
PURE = $(BIN)/python -m pytest $(PYTEST_OPTIONS) --numprocesses=$(PURE_WORKERS) tests/pure

quick: check  ## check, the tests without torch, and one of each package with ranks: before each commit
	$(PURE)
	$(PYTEST) --numprocesses=auto tests/ranks -m quick

test: $(VENV)/.installed  ## the tests of what README promises and of most faults, on a real Slurm (as root on Debian/Ubuntu)
	$(PYTEST) -m "not full"

test-all: $(VENV)/.installed-interop  ## all tests: rare faults, a newer Slurm, other libraries, rehearsals and whole trainings, too
	$(PYTEST)

# Its data files: those of processes that ran elsewhere, too. Following each line makes all processes slower.
coverage: export COVERAGE_FILE = $(CURDIR)/.coverage/data
coverage: export TESTS_SLOWNESS = 3
coverage: $(VENV)/.installed  ## the tests of `make test`, and which lines of cluster_ddp/ they ran, in all their processes
	rm -rf .coverage && mkdir .coverage
	$(BIN)/python -m coverage run -m pytest $(PYTEST_OPTIONS) --numprocesses=$(WORKERS) -m "not full"
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report --skip-covered --fail-under=93

# Debian's releases of Slurm beside the system's.
SLURM_VERSIONS := 24.11 26.05

test-slurms: $(VENV)/.installed  ## the tests of jobs on Slurm 24.11 and 26.05 (fetched from Debian)
	@set -e; for version in $(SLURM_VERSIONS); do \
	  $(PYTEST) --slurm-version $$version tests/slurm --ignore tests/slurm/test_chaos.py --ignore tests/slurm/test_sandbox.py; \
	done

# The GPU tests need only torch and numpy. A machine with GPUs may be unable to install more: use a Python that has both.
GPU_PYTHON = $$($(PYTHON) -c 'import torch, numpy' 2>/dev/null && echo $(PYTHON) || echo $(BIN)/python)
define gpu-tests
@$(PYTHON) -c 'import torch, numpy' 2>/dev/null || $(MAKE) --no-print-directory --silent venv
@$(GPU_PYTHON) tests/gpu/run.py
endef

test-gpu:  ## tests that need one GPU (without one: tests nothing, and says so)
	$(gpu-tests) gpu

test-gpu-pair:  ## tests of two ranks on one GPU (NCCL 2.30 or newer; else on two)
	$(gpu-tests) gpu_pair

test-gpu-nodes:  ## tests of 2 nodes with 8 GPUs each, in a Slurm allocation
	$(gpu-tests) gpu_nodes

chaos: $(VENV)/.installed  ## train under 200 random faults on a sandbox, and compare (as root; over an hour)
	PYTHONPATH=tests $(BIN)/python -m chaos --faults $(FAULTS) --seed $(SEED)

check: $(VENV)/.installed  ## lint, format, types, imports, rendered jobs and pages, links in the documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest --quiet tests/pure/test_architecture.py
	$(BIN)/python scripts/render_jobs.py --check
	$(BIN)/python scripts/render_faults.py --check
	$(BIN)/python scripts/doctor_table.py --check
	$(BIN)/python scripts/check_links.py

bench: $(VENV)/.installed  ## all benchmarks; renews benchmarks/record.json and the tables in benchmarks/README.md
	$(BIN)/python benchmarks/bench.py --mnist-from "$(MNIST_FROM)" --peers "$(PEERS)" --torchx "$(TORCHX)" --nvrx "$(NVRX)"

docs: $(VENV)/.installed-docs  ## the documentation as a web site that needs no network, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

jobs: $(VENV)/.installed  ## render jobs/*.sbatch from the templates, and docs/faults.md from the tests
	$(BIN)/python scripts/render_jobs.py
	$(BIN)/python scripts/render_faults.py

sandbox: $(VENV)/.installed  ## start a real 4-node Slurm on this machine (as root)
	$(BIN)/python -m cluster_ddp.sandbox up --install

venv: $(VENV)/.installed  ## the environment that all of these use, in .venv

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "error: $(PYTHON) is not Python 3.10 to 3.13. Hint: make PYTHON=python3.12" >&2; exit 1; }
	@echo "Installing into $(VENV) (PyTorch is large: one to three minutes) …"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) --editable '.[dev]'
	@touch $@

$(VENV)/.installed-interop: $(VENV)/.installed
	@$(PIP_INSTALL) --editable '.[interop]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	@$(PIP_INSTALL) --editable '.[docs]'
	@touch $@
