# Each target sets up what it needs in .venv, once, and again when pyproject.toml changes.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# What documentation and the tests of the night need besides.
NIGHT  := $(VENV)/.installed-nightly
# The exact version takes the CPU build where one is provided; the package itself only asks for a floor.
TORCH  := torch==2.13.0

PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# uv takes a third of pip's time; where it cannot, as with an index that only pip's settings name, pip does it.
install = $(BIN)/uv pip install --quiet --python $(BIN)/python -e ".[$(1)]" "$(TORCH)" || $(PIP) -e ".[$(1)]" "$(TORCH)"

.PHONY: demo test test-all lint docs format clean echarts
.DEFAULT_GOAL := demo

$(STAMP): pyproject.toml hatch_build.py $(wildcard probes/native/*.c)
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "lowtide needs Python 3.10 or newer, $(PYTHON) is %d.%d: run make PYTHON=python3.11" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	@# The pip that Python brings may be years old, and take four times as long to choose the versions.
	$(PIP) --upgrade pip uv
	@# Before all else: where a CPU build is provided, only pip finds it.
	$(PIP) "$(TORCH)"
	$(call install,dev)
	@touch $@

$(NIGHT): $(STAMP)
	$(call install,nightly)
	@touch $@

demo: $(STAMP)
	$(BIN)/lowtide run --report build/demo

# One thread each: their threads would mostly wait for each other. Bytecode is written even where nobody wants it else:
# hundreds of inner runs load torch and the checker, which takes a fifth of the time without.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --leakcheck
# Four groups, each in processes of its own, because what goes through the whole heap takes as long as that is large,
# and each process imports all files of its group: torch makes it four times as large, a thousand tests by half. Torch's
# compiler and transformers make it twice as large for all that is run after them, and so come last.
ALL := $(sort $(wildcard tests/*/test_*.py tests/leakcheck/*/test_*.py))
LOADING_MORE := tests/engine/test_checkpoint.py $(shell grep -lE \
	'= torch\.compile|FakeTensorMode|torch\.profiler|import transformers|from transformers' $(ALL))
HEAPS := $(filter tests/probes/% tests/leakcheck/%,$(ALL))
WITHOUT_TORCH := $(shell grep -LE 'import torch|from torch|torch\.zeros|importorskip..torch|transformers|small_target|checked_life|test_driver|from lowtide\.engine|import lowtide\.engine|check_run' $(HEAPS))
WALKS := $(shell grep -lE '^import gc|lowtide\.probes\.heap|lowtide\.leakcheck\.explaining|findings\.(host_memory|turn_growth)' $(WITHOUT_TORCH))
WALKS_WITH_TORCH := $(filter-out $(WITHOUT_TORCH) $(LOADING_MORE),$(HEAPS))
# Inner runs load in processes of their own; those that take longest come first, or one worker waits for the other.
RUNS_OF_ITS_OWN := $(filter tests/pytest_plugin/%,$(LOADING_MORE))
ENGINE := $(RUNS_OF_ITS_OWN) $(filter-out $(LOADING_MORE),$(filter tests/engine/%,$(ALL))) \
	$(filter-out $(RUNS_OF_ITS_OWN) $(WITHOUT_TORCH),$(LOADING_MORE))
OTHERS := tests/pytest_plugin/test_leaks.py \
	$(filter-out tests/pytest_plugin/test_leaks.py $(WALKS) $(WALKS_WITH_TORCH) $(ENGINE),$(ALL))
# Whole lives, commands, kernels in Triton's interpreter and other runners' suites, which take half of the time of all
# tests: `make test-all` runs them, every night. A file says of itself that it is one of them, or a test of itself alone.
NIGHTLY := $(shell grep -lE '^(pytestmark = \[?|    )pytest\.mark\.nightly' $(ALL))

GROUPS := $(addprefix test-,OTHERS WALKS WALKS_WITH_TORCH ENGINE)
.PHONY: $(GROUPS)

# Two groups at a time: many tests wait for processes of their own, and at a group's end one process for the other's file.
test: $(STAMP)
	@echo "four groups of tests, two at a time; what each says is shown when it has ended"
	@$(MAKE) --no-print-directory --keep-going --jobs=2 --output-sync=line $(GROUPS)

$(GROUPS): test-%: $(STAMP)
	$(PYTEST) -m 'not nightly' $(filter-out $(NIGHTLY),$($*))

test-all: $(NIGHT) test
	$(PYTEST) -m nightly $(shell grep -l 'pytest\.mark\.nightly' $(ALL))

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# On a busy machine its workers may not come up in time: that is a crash (2), and no error in the code (1).
	$(BIN)/mypy || { [ $$? -eq 2 ] && $(BIN)/mypy --num-workers 0; }
	$(BIN)/lint-imports --no-cache

# What a page draws with: built once, and committed, so that nobody else needs npm.
echarts:
	cd reports/html/echarts && npm ci --silent && npm run --silent build && rm -rf node_modules

# The pages that show the code's own tables are written by docs/write_*.py; tests compare them.
docs: $(NIGHT)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python docs/check_site.py build/site
	@echo "the site is in build/site/index.html"

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
