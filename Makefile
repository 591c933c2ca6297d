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
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -q --leakcheck
# Three groups, each of their parts in a process of its own, because what goes through the whole heap takes as long as
# that is large, and each process imports all files of its part: torch makes it four times as large, a thousand tests by
# half. What loads torch's compiler, transformers or scipy, which make it twice as large again, is loaded once, in one more.
ALL := $(sort $(wildcard tests/*/test_*.py tests/leakcheck/*/test_*.py))
# The plugin's own tests have torch in the texts of inner runs, which are processes of their own.
LOADING_TORCH := $(sort $(shell grep -lE -e '^( {4})?(import|from) torch' -e '"import torch.n' \
	-e 'importorskip..(torch|transformers|scipy)' -e '(from|import) lowtide\.(engine|targets)' \
	-e 'lives\.(fuzz|witness)' -e 'checked_life|small_target|check_run' $(filter-out tests/pytest_plugin/%,$(ALL))) \
	$(shell awk 'FNR < 14 && /^import torch$$/ { print FILENAME }' $(filter tests/pytest_plugin/%,$(ALL))))
LOADING_MORE := $(shell grep -lE -e '= torch\.compile|FakeTensorMode|torch\.profiler' \
	-e 'import transformers|from transformers|write_checkpoint: |scipy' $(LOADING_TORCH))
# The engine's tests leave more behind.
WITH_TORCH := $(filter-out tests/engine/% $(LOADING_MORE),$(LOADING_TORCH)) \
	$(filter-out $(LOADING_MORE),$(filter tests/engine/%,$(LOADING_TORCH)))
WALKS := $(shell grep -lE '^import gc|lowtide\.probes\.heap|lowtide\.leakcheck\.explaining|findings\.(host_memory|turn_growth)' \
	$(filter-out $(LOADING_TORCH),$(filter tests/probes/% tests/leakcheck/%,$(ALL))))
# The inner runs that take longest come first, or all wait for them.
LONG := tests/pytest_plugin/test_leaks.py tests/pytest_plugin/test_clean.py
OTHERS := $(LONG) $(filter-out $(LONG) $(WALKS) $(LOADING_TORCH),$(ALL))
# Whole lives, commands, kernels in Triton's interpreter and other runners' suites, which take half of the time of all
# tests: `make test-all` runs them, every night. A file says of itself that it is one of them, or a test of itself alone.
NIGHTLY := $(shell grep -lE '^(pytestmark = \[?|    )pytest\.mark\.nightly' $(ALL))

PARTS := LOADING_MORE $(foreach part,1 2 3 4 0,$(addsuffix .$(part),WITH_TORCH OTHERS WALKS))
.PHONY: $(addprefix test-,$(PARTS))

# Four processes at a time: many tests wait for processes of their own.
test: $(STAMP)
	@echo "sixteen parts of the tests, four at a time; what each says is shown when it has ended"
	@$(MAKE) --no-print-directory --keep-going --jobs=4 --output-sync=line $(addprefix test-,$(PARTS))

# Every fifth of a group's files: those of one room, which take about as long, are in different parts.
$(addprefix test-,$(PARTS)): test-%: $(STAMP)
	$(PYTEST) -m 'not nightly' \
		$(shell printf '%s\n' $(filter-out $(NIGHTLY),$($(basename $*))) | awk 'NR % 5 == $(or $(subst .,,$(suffix $*)),NR % 5)')

test-all: $(NIGHT) test
	$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder -m nightly $(shell grep -l 'pytest\.mark\.nightly' $(ALL))

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
