# Everything a person or CI runs. Each target sets up what it needs on a fresh machine.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: help setup demo test test-long test-fast check bench torture docs causes format clean

help:
	@echo "make demo   train clean, bare and guarded side by side while four things go wrong"
	@echo "make test   the test suite"
	@echo "make test-long  the tests that take a minute each: Ray with two workers, the demo"
	@echo "make test-fast  in a minute: the tests that start no process and train no large model"
	@echo "make check  format, lint and strict types"
	@echo "make bench  every figure the docs claim (the GPU ones need a GPU)"
	@echo "make torture  kill a training run 200 times; it must end as if it never had been"
	@echo "make docs   build the documentation into site/"
	@echo "make causes write docs/causes.md from the catalogue"

setup: $(READY)

# One pip command under the constraints: pip must never choose a torch by itself. What is never imported need not be
# compiled: that halves the time.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@touch $(READY)

# The demo needs the package alone, so that nobody waits for the frameworks of the tests to see it. Where the tests
# have been set up, it runs there.
DEMO := .venv/.demo
$(DEMO): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --editable .
	@touch $(DEMO)

demo: $(if $(wildcard $(READY)),$(READY),$(DEMO))
	$(BIN)/python -m surefoot demo

# The tests of a file share what they set up, so they go to one worker. Compiled sources are kept whatever the
# environment says: compiling torch takes each process a second or two.
WORKERS ?= 2
PYTEST := env -u PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX=$(CURDIR)/.venv/pycache \
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(READY)
	$(PYTEST) -m "not long"

test-long: $(READY)
	$(PYTEST) -m long

test-fast: $(READY)
	$(PYTEST) --no-processes -m "not slow and not long and not gpu and not browser"

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)
	$(BIN)/python benchmarks/false_alarms.py
	$(BIN)/python benchmarks/guarded_step.py
	$(BIN)/python benchmarks/locate.py
	$(BIN)/python benchmarks/recovery.py
	$(BIN)/python benchmarks/checkpoint_stall.py
	$(BIN)/python benchmarks/log_cost.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/report.py
	$(BIN)/python benchmarks/run_overhead.py
	if $(BIN)/python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then \
		$(BIN)/python benchmarks/run_overhead.py --cuda; \
		$(BIN)/python -m surefoot zoo score --device cuda --seeds 100; fi

torture: $(READY)
	$(BIN)/python benchmarks/torture.py
	$(BIN)/python benchmarks/torture.py --repeat

docs: $(READY) causes
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

causes: $(READY)
	$(BIN)/python -m surefoot.diagnose.catalogue > docs/causes.md

clean:
	rm -rf .venv site .pytest_cache .mypy_cache .ruff_cache .hypothesis
