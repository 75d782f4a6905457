# make demo       install, then the main job on the embedded data: a table, and the path of the report
# make test       install what tests need, then lint, format, types and every test that is not marked slow
# make test-slow SHARD=3   a twelfth of the slow ones, at most 20 minutes; NOTE=yes keeps what they took (tests/shards.py)
# make test-all   all of these
# make docs       the documentation site, in build/docs/site
# make test-torch TORCH=2.15.0   with another version of PyTorch, in a virtual environment of its own, the tests that it could break
# PYTHON=python3.12 make ...   chooses the interpreter that .venv is made with (3.11 or later)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable

# What an installation depends on.
ENGINE := setup.py $(wildcard guozhuang/groups/shared_memory/*.[ch] guozhuang/exchange/kernels/*.[ch]) \
	$(wildcard packaging/*/*.py packaging/*/*.pth packaging/*/*.toml packaging/*/*/*/*.py)

.PHONY: demo test test-slow test-all test-torch mutations docs lint style install clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed-text
	$(BIN)/guozhuang compare --batch-size 16 --steps 40 --strategies single,ddp,torch-ddp,sharded,none

# Tests run side by side on three workers, for many of them wait (tests/conftest.py). Bytecode is written whatever the environment
# says: tests start Python a thousand times.
PYTEST = export PYTHONDONTWRITEBYTECODE=; $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test: style
	@$(PYTEST) -m "not slow"

# A slow test that fails beside others is run once more alone, and then counts.
test-slow: style $(VENV)/.installed-docs
	@[ -n "$(SHARD)" ] || { echo "make: which part of the slow tests? Fix: make test-slow SHARD=1, up to 12."; exit 1; }
	@export EXAMPLES=many; $(PYTEST) --cache-clear --shard $(SHARD) $(if $(NOTE),--note-durations) || { [ $$? = 1 ] && echo "once more, what failed, alone:" && \
		$(BIN)/python -m pytest -m slow --last-failed --last-failed-no-failures none; }

test-all: test
	@for shard in 1 2 3 4 5 6 7 8 9 10 11 12; do $(MAKE) test-slow SHARD=$$shard || exit 1; done

# What another version of PyTorch could break: collectives and sends on every group, DDP, the sharded strategies, a few steps of
# every strategy, groups whose ranks come and go, and the commands. PyPI's builds for Linux bring CUDA's libraries, 5 GB of them;
# PIP_EXTRA_INDEX_URL and TORCH=2.15.0+cpu take the CPU build from an index that has it.
TORCH ?= 2.15.0
TORCH_VENV := .venv-torch-$(TORCH)$(if $(filter-out python3,$(notdir $(PYTHON))),-$(notdir $(PYTHON)))
TORCH_TESTS := tests/pure/test_versions.py tests/threads/test_roll_call.py $(addprefix tests/processes/test_,$(addsuffix .py,\
	shm_group shm_stock hierarchical reconfigure world ddp_as_torchs equivalence sharding sharding_stages every_strategy compare run examples))

test-torch: $(TORCH_VENV)/.installed
	$(TORCH_VENV)/bin/python -c "import torch; print('PyTorch', torch.__version__)"
	$(TORCH_VENV)/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not slow or versions" $(TORCH_TESTS)

# Versions of PyTorch differ in the setuptools that they take.
$(TORCH_VENV)/.installed: pyproject.toml constraints.txt $(ENGINE)
	$(PYTHON) -m venv $(TORCH_VENV)
	grep -v -E '^(torch|setuptools)==' constraints.txt >$(TORCH_VENV)/constraints.txt
	$(TORCH_VENV)/bin/python -m pip install --quiet --constraint $(TORCH_VENV)/constraints.txt torch==$(TORCH) --editable '.[text,test]'
	@touch $@

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
	rm -rf $(VENV) .venv-torch-* build *.egg-info packaging/*/build packaging/*/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "make: '$(PYTHON)' was not found. Fix: install Python 3.11 or later (apt install python3 python3-venv), or set PYTHON=/path/to/python3."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: Python 3.11 or later is needed, '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Fix: set PYTHON=python3.11 or later."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "make: '$(PYTHON)' cannot make virtual environments. Fix: apt install python3-venv."; exit 1; }
	$(PYTHON) -m venv $(VENV)

# A stamp per set of requirements, so that a second run installs nothing.
$(VENV)/.installed-text: pyproject.toml constraints.txt $(ENGINE) | $(BIN)/python
	$(INSTALL) '.[text]'
	@touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt $(ENGINE) | $(BIN)/python
	$(INSTALL) '.[text,test]'
	@touch $@ $(VENV)/.installed-text

$(VENV)/.installed-docs: $(VENV)/.installed-test packaging/docs/build.py
	$(INSTALL) '.[docs]'
	@touch $@
