# Everything happens in .venv, which is made once and made again when the dependencies change.
#
#   make demo      the main job on the embedded model: a table, a plot, one JSON line
#   make test      ruff, mypy and the import contracts, then the tests (but the slow ones)
#   make test-all  the same, with the slow tests
#   make lint      only the first half of that
#   make format    let ruff fix what it can
#   make bench     speed on this machine: against transformers, and of every drafter
#   make gpu       what needs a CUDA device: its tests, then the benchmarks
#   make reasoner  train the embedded model again from its seed
#   make drafter   train its draft model again from its seed
#
# PY=python3 uses an interpreter that already has the dependencies, and sets nothing up.

VENV      := .venv
INSTALLED := $(VENV)/.installed

ifeq ($(origin PY),undefined)
PY    := $(VENV)/bin/python
setup := $(INSTALLED)
else
setup :=
export PYTHONPATH := src
endif

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint format bench gpu reasoner drafter clean

help:
	@sed -n 's/^#   make /  make /p' Makefile

$(INSTALLED): pyproject.toml constraints.txt
	@python3 -c 'import sys; sys.version_info >= (3, 11) or sys.exit("forethought needs Python 3.11 or newer; python3 is %d.%d here. Put a newer python3 first on PATH." % sys.version_info[:2])'
	python3 -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(setup)
	@$(PY) -m forethought demo

lint: $(setup)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(PY) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'

format: $(setup)
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

test: lint
	@$(PY) -m pytest -n 2 -m "not slow"

test-all: lint
	@$(PY) -m pytest -n 2

bench: $(setup)
	@$(PY) -m benchmarks.generate_vs_transformers
	@$(PY) -m benchmarks.speculation_vs_transformers
	@$(PY) -m benchmarks.step_overhead
	@$(PY) -m benchmarks.drafters
	@$(PY) -m benchmarks.goodput

gpu: $(setup)
	@$(PY) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("torch finds no CUDA device on this machine: nothing was run")'
	@$(PY) -m pytest -m gpu
	@$(PY) -m benchmarks.generate_vs_transformers
	@$(PY) -m benchmarks.speculation_vs_transformers
	@$(PY) -m benchmarks.step_overhead
	@$(PY) -m benchmarks.drafters --rounds 2

reasoner: $(setup)
	$(PY) -m forethought.training.reasoner.train --seed 0 --out runs/reasoner

drafter: $(setup)
	$(PY) -m forethought.training.reasoner.problems --seed 0 --out runs/drafter/prompts.txt
	$(PY) -m forethought train draft-model --self-distill runs/drafter/prompts.txt --held-out 64 --out runs/drafter --config src/forethought/assets/drafter/training.yaml

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
