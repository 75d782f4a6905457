# make demo       install, then the main job on the embedded data: a table, and the path of the report
# make test       install what tests need, then lint, format, types and every test that is not marked slow
# make test-all   the same, and the slow ones
# make docs       the documentation site, in build/docs/site
# PYTHON=python3.12 make ...   chooses the interpreter that .venv is made with (3.11 or later)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable

.PHONY: demo test test-all mutations docs lint style install clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed-text
	$(BIN)/guozhuang compare --batch-size 16 --steps 40 --strategies single,ddp,torch-ddp,sharded,none

# Tests run side by side on three workers, for they mostly wait (tests/conftest.py). Types are checked meanwhile, and reported
# after them. Either failing fails.
PYTEST = $(BIN)/mypy >$(VENV)/types.log 2>&1 & types=$$!; \
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(1); tests=$$?; \
	wait $$types || tests=1; echo "mypy: $$(cat $(VENV)/types.log)"; exit $$tests

test: style
	@$(call PYTEST,-m "not slow")

test-all: style $(VENV)/.installed-docs
	@$(call PYTEST)

# Plants known faults in a copy of the tree, and expects the tests to fail.
mutations: $(VENV)/.installed-test
	$(BIN)/python tests/mutate.py

docs: $(VENV)/.installed-docs
	$(BIN)/python packaging/docs/build.py

lint: style
	$(BIN)/mypy

style: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

install: $(VENV)/.installed-text

clean:
	rm -rf $(VENV) build *.egg-info packaging/horovod/build packaging/horovod/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "make: '$(PYTHON)' was not found. Fix: install Python 3.11 or later (apt install python3 python3-venv), or set PYTHON=/path/to/python3."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: Python 3.11 or later is needed, '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Fix: set PYTHON=python3.11 or later."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "make: '$(PYTHON)' cannot make virtual environments. Fix: apt install python3-venv."; exit 1; }
	$(PYTHON) -m venv $(VENV)

# A stamp per set of requirements, so that a second run installs nothing.
ENGINE := setup.py $(wildcard guozhuang/groups/shared_memory/*.[ch] guozhuang/exchange/kernels/*.[ch]) \
	$(wildcard packaging/horovod/*.py packaging/horovod/*.pth packaging/horovod/*.toml packaging/horovod/*/horovod/*.py)

$(VENV)/.installed-text: pyproject.toml constraints.txt $(ENGINE) | $(BIN)/python
	$(INSTALL) '.[text]'
	@touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt $(ENGINE) | $(BIN)/python
	$(INSTALL) '.[text,test]'
	@touch $@ $(VENV)/.installed-text

$(VENV)/.installed-docs: $(VENV)/.installed-test packaging/docs/build.py
	$(INSTALL) '.[docs]'
	@touch $@
