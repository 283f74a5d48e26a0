# Fresh machine to a demo, or to the whole test-suite, in one command. Nothing is installed outside .venv.
#
# PYTHON     interpreter that makes .venv (3.11 or newer)      make test PYTHON=python3.12
# PIP_FLAGS  passed to every pip install                       make demo PIP_FLAGS=--no-cache-dir
# WORKERS    processes of the test-suite                       make test WORKERS=8
# MINUTES    time of the fuzzer                                make fuzz MINUTES=60
# RUNS       disturbed merges                                  make chaos RUNS=500
# OTHER      checkout whose merged bytes are compared          make ledger OTHER=../other

PYTHON ?= python3
PIP_FLAGS ?=
WORKERS ?= 3
MINUTES ?= 10
RUNS ?= 100

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile $(PIP_FLAGS) -c constraints.txt
TORCH := $(shell grep '^torch==' constraints.txt)

# Compiled files are kept even where the environment says otherwise: without them each of the hundreds of processes that the
# tests start compiles torch and transformers anew.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: help demo test examples fuzz lint chaos mutants ledger site clean

help:  ## show this list
	@awk -F ':.*## +' '/^[a-z]+:.*## /{printf "%-9s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/demo.stamp  ## install what the demo needs and run it
	$(BIN)/actmat demo

test: $(VENV)/dev.stamp  ## install everything, check style and types, run all tests
	$(MAKE) --no-print-directory -j 2 lint examples
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

examples: $(VENV)/dev.stamp  ## run the examples in docstrings
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --doctest-modules src/actmat

fuzz: $(VENV)/dev.stamp  ## feed random files to every reader for MINUTES
	OMP_NUM_THREADS=1 $(BIN)/python -m fuzz --minutes $(MINUTES)

lint: $(VENV)/dev.stamp  ## check style and types only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

chaos: $(VENV)/dev.stamp  ## kill and disturb merges at random      make chaos RUNS=500
	OMP_NUM_THREADS=1 $(BIN)/python -m chaos --runs $(RUNS)

mutants: $(VENV)/dev.stamp  ## break formulae that carry a claim, and check that their tests fail
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants

ledger: $(VENV)/dev.stamp  ## make the same merges here and in OTHER, and compare their bytes
	$(BIN)/python -m tests.ledger $(OTHER)

site: $(VENV)/dev.stamp  ## build the documentation as a site in build/site
	$(BIN)/python -m docs.site

clean:  ## remove .venv and the caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build

# Stamps: a second run installs nothing unless the requirements changed.
# torch goes first, by its exact version, so that no later requirement can pull another build of it.
# pip itself comes first: those of 2023 take a minute longer over these requirements. Files are compiled when they are imported.
$(VENV)/torch.stamp: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) pip
	$(PIP) "$(TORCH)"
	@touch $@

$(VENV)/demo.stamp: $(VENV)/torch.stamp pyproject.toml
	$(PIP) -e '.[demo]'
	@rm -rf src/*.egg-info
	@touch $@

$(VENV)/dev.stamp: $(VENV)/torch.stamp pyproject.toml evidence/pyproject.toml packages/actmat-app/pyproject.toml
	$(PIP) -e '.[dev]' -e evidence
	$(PIP) --no-deps -e packages/actmat-app  # without Gradio, which would hold back pillow; its tests skip the page then
	@rm -rf src/*.egg-info evidence/src/*.egg-info packages/*/src/*.egg-info  # they would hide the installed entry points once these change
	@touch $(VENV)/demo.stamp $@
