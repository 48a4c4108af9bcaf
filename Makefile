# Every target makes .venv when it is missing: a fresh clone needs nothing else.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test check acceptance chaos bench clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

demo: $(STAMP)            ## four unequal peers train on this machine; see demo-report/report.html
	$(BIN)/shoal demo --out demo-report

check: $(STAMP)           ## the fast gate: lint, types, floors, unit tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src/shoal
	$(BIN)/lint-imports
	$(BIN)/pytest -q tests/unit

test: $(STAMP)            ## everything that runs on virtual time and counts, and a few real processes
	$(BIN)/pytest -q -m 'not acceptance' -n 2 tests/unit tests/model tests/paper tests/sim tests/conformance
	$(BIN)/pytest -q -m 'not acceptance' tests/net

acceptance: $(STAMP)      ## real time, real kills, many repeats; prints the figures
	$(BIN)/pytest -q -s -m acceptance

SEEDS ?= 1000
chaos: $(STAMP)           ## small swarms in which anything fails: make chaos SEEDS=n
	$(BIN)/shoal simulate chaos --seeds $(SEEDS) --jobs 2

bench: $(STAMP)           ## speeds, as ratios measured interleaved in one run
	$(BIN)/python benchmarks/averaging.py
	$(BIN)/python benchmarks/training_thread.py
	$(BIN)/python benchmarks/directory.py

clean:
	rm -rf $(VENV) demo-report .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
