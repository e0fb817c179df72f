# make quickstart   fresh machine -> environment, real text, tokenizer, training, samples
# make test         the whole test suite
# make bench        measure the operators, every layer, processes and the GPU (half an hour); ARGS=--quick: tiny sizes
# make lint         ruff and mypy
# make test-slow    longer studies
# make chaos        trials of random misfortune: killed, stopped and cut off processes, full disks, damaged files
# Other interpreters: make PYTHON=python3.12 ...; other recipe keys: make quickstart ARGS="train.steps=100"

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: quickstart test test-slow chaos bench lint format clean

quickstart: $(VENV)/.quickstart
	$(BIN)/hybrid train recipes/quickstart.yaml $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not slow and not chaos" --numprocesses auto --dist loadfile $(ARGS)

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow $(ARGS)

chaos: $(VENV)/.dev
	$(BIN)/python -m pytest tests/hybrid/train/test_chaos.py $(ARGS)

bench: $(VENV)/.dev
	for name in kvm mixers scale gpu; do \
		$(BIN)/python -m benchmarks.$$name --output benchmarks/results $(ARGS) || exit; done

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "kvm-hybrid needs Python 3.11, 3.12 or 3.13; name one with make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.quickstart: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[quickstart]"
	@touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $@ $(VENV)/.quickstart
