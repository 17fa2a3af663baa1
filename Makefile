# The two commands: `make demo` and `make test`. Both install what they need into .venv first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
OUT ?= demo_out
# Where PyTorch keeps its CPU wheels; asked only if pip does not find the CPU build by itself.
TORCH_CPU_INDEX ?= download.pytorch.org/whl/cpu

.PHONY: help demo test test-slow lint clean resolve-gpu
.DEFAULT_GOAL := help

help:
	@echo "make demo        install into $(VENV), then SFT + GRPO on arithmetic, before/after table (about 8 minutes on 2 cores)"
	@echo "make test        install what tests need, then lint, types and tests"
	@echo "make test-slow   the longer tests"
	@echo "make lint        ruff, import-linter, mypy"
	@echo "make resolve-gpu check that the gpu extra resolves (downloads gigabytes)"

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info < (3, 14) else "Python 3.11 to 3.13 is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

# One resolver call for the extras of a target, so that pip proves that they fit together. A stamp an extras list.
define install
	@index=""; \
	$(BIN)/pip install --quiet --dry-run --no-deps 'torch==2.13.0+cpu' >/dev/null 2>&1 || index="--extra-index-url https://$(TORCH_CPU_INDEX)"; \
	echo "installing openrlhf_like[$(1)] into $(VENV) (about 3 minutes, 4 GB)"; \
	$(BIN)/pip install --quiet $$index -e '.[$(1)]'
	@mkdir -p $(dir $@) && touch $@
endef

$(VENV)/.demo-installed: setup.py | $(BIN)/python
	$(call install,cpu$(,)demo)

$(VENV)/.test-installed: setup.py | $(BIN)/python
	$(call install,cpu$(,)test)

, := ,

demo: $(VENV)/.demo-installed
	$(BIN)/python examples/demo/run_demo.py --output_dir $(OUT)

lint: $(VENV)/.test-installed
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy

test: $(VENV)/.test-installed lint
	$(BIN)/python -m pytest -m "not slow" tests

test-slow: $(VENV)/.test-installed
	$(BIN)/python -m pytest -m slow tests

resolve-gpu: | $(BIN)/python
	$(BIN)/pip install --dry-run --quiet '.[gpu]' && echo "the gpu extra resolves"

clean:
	rm -rf $(OUT) build dist *.egg-info
