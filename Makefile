# Every target sets up what it needs in .venv; run `make help` for the list.
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=

# Tests and demo start Python hundreds of times: its modules are compiled once.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test lint types imports tests integrations test-torch-next soak gpu serve clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 18

setup: .venv/.installed  ## create .venv with everything, pinned

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup  ## the whole loop on this machine (ARGS="--json out.json" for a record)
	$(BIN)/resihp demo $(ARGS)

serve: setup  ## the sidecar on http://127.0.0.1:8700
	$(BIN)/resihp serve $(ARGS)

test: lint types imports tests  ## lint, types, import directions and tests

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

imports: setup
	$(BIN)/lint-imports

tests: setup
	$(BIN)/python -m pytest --numprocesses 5 --dist worksteal $(ARGS)

integrations: .venv-integrations/.installed  ## the trainers that people use, in an environment of their own
	.venv-integrations/bin/python -m pytest -m "integrations and not soak" tests/integrations $(ARGS)

.venv-integrations/.installed: pyproject.toml constraints-integrations.txt
	$(PYTHON) -m venv .venv-integrations
	.venv-integrations/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-integrations.txt torch
	.venv-integrations/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-integrations.txt -e '.[integrations]'
	@touch $@

TORCH_NEXT := .venv-torch-next/bin/python

test-torch-next: .venv-torch-next/.installed  ## the elastic runtime on a newer torch, by gloo and by its reconfigure API
	RESIHP_PROCESS_GROUPS=gloo $(TORCH_NEXT) -m pytest --numprocesses 5 --dist worksteal tests/elastic $(ARGS)
	RESIHP_PROCESS_GROUPS=reconfigure $(TORCH_NEXT) -m pytest --numprocesses 5 --dist worksteal tests/elastic $(ARGS)

.venv-torch-next/.installed: pyproject.toml constraints-torch-next.txt
	$(PYTHON) -m venv .venv-torch-next
	$(TORCH_NEXT) -m pip install --quiet --disable-pip-version-check -c constraints-torch-next.txt torch
	$(TORCH_NEXT) -m pip install --quiet --disable-pip-version-check -c constraints-torch-next.txt -e '.[dev]'
	@touch $@

soak: setup .venv-integrations/.installed  ## the long campaigns
	$(BIN)/python -m pytest -m "soak and not integrations" --timeout 3600 $(ARGS)
	.venv-integrations/bin/python -m pytest -m "integrations and soak" --timeout 3600 tests/integrations $(ARGS)

gpu:  ## what needs a CUDA device, 36 minutes, in a Python with its torch (PYTHON=... ARGS="--part 1")
	$(PYTHON) -m benchmarks.gpu $(ARGS)

clean:  ## remove environments and caches
	rm -rf .venv .venv-integrations .venv-torch-next .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
