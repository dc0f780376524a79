# What a checkout can do. Everything is installed into .venv; nothing lands outside this folder.

# The interpreter that makes .venv: Python 3.11 or newer, with venv.
PYTHON ?= python3

BIN := .venv/bin
# A file at a time on every core.
# Tests wait for other processes a sixth of their time: one runs more than there are cores.
TESTS = $(BIN)/python -m pytest --numprocesses=$(shell expr $$(getconf _NPROCESSORS_ONLN) + 1) \
	--dist=loadfile --durations=10
# Tests that reach kernels directly: as plain Python, which coverage sees, they run every line of every kernel.
KERNELS := $(addprefix tests/,fastcomm_kernels ranks/test_matching.py \
	ranks/test_messages.py test_interval_sets.py trace/test_groups.py \
	trace/test_numbering.py formats/kineto/test_chrome.py formats/kineto/test_chrome_cut.py \
	formats/kineto/test_chrome_faults.py formats/kineto/test_begin_end_pairs.py formats/perfetto/test_packets.py metrics/test_across_ranks.py device_work/test_statistics.py \
	compat/test_hta.py $(addprefix critical_path/test_,corrected.py joined.py overlay.py windows.py) \
	$(addprefix compat/dpro/test_,network.py references.py replay.py statistics.py) \
	stragglers/test_stragglers.py hang/test_flight_recorder.py hang/test_rhythm.py)
# The options of pyproject.toml leave benchmarks out of the tests.
BENCH := $(BIN)/python -m pytest bench -o addopts=--strict-markers \
	--benchmark-timer=time.process_time
# pip's downloads and the machine code of the kernels.
export XDG_CACHE_HOME := $(CURDIR)/.cache
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Most modules of the dependencies are never loaded: Python compiles those that are, once.
export PIP_COMPILE := 0
unexport PYTHONDONTWRITEBYTECODE

FUZZ_SECONDS ?= 60
HANG_SEEDS ?= 2
# Tests that together use every dependency, and what they need besides.
LEAST := $(addprefix tests/,metrics/test_metrics.py formats/kineto/test_kineto.py formats/nsys/test_parts.py \
	formats/store/test_store.py formats/test_remote.py report/test_page.py critical_path/test_cli.py \
	compat/dpro/test_replay.py isp/test_isp.py dispatch/test_dispatch.py show/test_workbook.py \
	convert/test_chakra.py comparison/test_compare.py)
WITH_LEAST := 'pytest>=8.3' 'hypothesis>=6.135' 'pytest-benchmark>=5' 'jsonschema>=4.20' 'openpyxl>=3.1'

.DEFAULT_GOAL := help
# One target at a time: benchmarks measure. ABREAST is for those that `test` starts together.
ifndef ABREAST
.NOTPARALLEL:
endif
.DELETE_ON_ERROR:
.PHONY: help demo test lint kernels modules unit coverage docs pages bench bench-check bench-compare bench-scale soak soak-tests soak-bars fuzz clean \
	walk jobs hangs trainer trainer-cost dist least release-check

help: ## List what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv/.runtime ## Write a made-up run of 8 ranks into ./demo, measure it, write its page
	$(BIN)/fastcomm demo demo
	$(BIN)/fastcomm report demo --link-bandwidth 400Gbit/s --html demo/report.html
	@echo 'the page of the run, for a browser: demo/report.html'

test: .venv/.dev ## Run every check: style, types, floors, docs, tests, coverage
	$(MAKE) ABREAST=1 --jobs=2 kernels lint docs modules coverage
	$(MAKE) unit

lint: .venv/.dev ## Check style, types, spelling and which package imports which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell fastcomm kernels tests docs bench *.md Makefile pyproject.toml

kernels: .venv/.dev ## Compile the kernels before several processes need them at once
	PYTHONPATH=.:kernels:tests $(BIN)/python -m builders.compiled

modules: .venv/.dev ## Compile the modules of the tests once, before every process does
	$(BIN)/python -m pytest --collect-only -qqq

unit: .venv/.dev ## Run the tests as they ship: with the JIT
	$(TESTS)

coverage: .venv/.dev ## Run tests of kernels as plain Python; every line of every kernel must run
	NUMBA_DISABLE_JIT=1 $(TESTS) $(KERNELS) -m 'not compiled and not soak' \
		--cov=fastcomm_kernels --cov-report=term-missing:skip-covered --cov-fail-under=100

docs: .venv/.dev ## Build the documentation into docs/_build; a warning is an error
	$(BIN)/python -m sphinx -W -n --keep-going -q docs docs/_build/html

pages: .venv/.dev ## Write docs/cli.md and the outputs and tables that pages show anew
	$(BIN)/python docs/what_if_accuracy.py
	PYTHONPATH=tests $(BIN)/python docs/pages.py

bench: .venv/.dev ## Measure kernels and whole commands against yardsticks
	$(BENCH)

bench-check: .venv/.dev ## The same; what is under its bar fails
	$(BENCH) --check-bars

bench-compare: .venv/.dev ## Measure this checkout and revision REV in pairs; fails nothing
	$(BIN)/python bench/compare.py $(REV)

bench-scale: .venv/.dev ## Measure runs of 64, 512 and 4096 ranks, a trace of 5 GB, 16 384 dumps (12 GB of disk)
	$(BIN)/python bench/scale.py --write docs/scale.md
	$(BIN)/python bench/hang_scale.py

soak: .venv/.dev kernels ## Run what takes an hour: every moment, option and size, and bars beside it
	$(MAKE) ABREAST=1 --jobs=2 soak-tests soak-bars
	$(MAKE) fuzz FUZZ_SECONDS=300

soak-tests: .venv/.dev
	$(TESTS) --dist=worksteal -m 'soak or hypothesis' --hypothesis-profile=soak

# The tests of `soak` keep the cores busy meanwhile.
soak-bars: .venv/.dev
	for round in 1 2 3 4 5 6 7 8 9 10; do $(MAKE) bench-check || exit 1; done

fuzz: .venv/.dev ## Change files of every format at random, FUZZ_SECONDS long: read or refused
	PYTHONPATH=tests $(BIN)/python -m fuzz --seconds $(FUZZ_SECONDS)

jobs: .venv/.dev .venv-jobs/.torch ## Record real PyTorch jobs with planted faults anew (5 GB of packages), and check them
	.venv-jobs/bin/python tests/jobs/record.py build/jobs
	FASTCOMM_JOBS=build/jobs $(BIN)/python -m pytest tests/metrics/test_recorded_jobs.py

hangs: .venv/.runtime .venv-jobs/.torch ## Record jobs that hang and jobs that do not anew (HANG_SEEDS of each), and check `fastcomm hang`
	rm -rf build/hangs
	nice -n 10 .venv-jobs/bin/python tests/jobs/hangs/record.py build/hangs --seeds $(HANG_SEEDS)
	.venv-jobs/bin/python tests/jobs/hangs/analyzer.py build/hangs
	$(BIN)/python tests/jobs/hangs/check.py build/hangs

trainer: .venv-jobs/.torch ## Train real jobs that report on themselves, with faults of ranks, disks and loaders, and check what they write
	.venv-jobs/bin/python -m pip install --quiet --editable .
	.venv-jobs/bin/python -m pip install --quiet lightning transformers accelerate torchtitan
	.venv-jobs/bin/python tests/jobs/trainer/check.py build/trainer

trainer-cost: .venv-jobs/.torch ## Measure what the profiler of `fastcomm.torch` costs a real job, without and with it in turn
	.venv-jobs/bin/python -m pip install --quiet --editable .
	.venv-jobs/bin/python tests/jobs/trainer/cost.py build/trainer-cost

walk: ## Do what a newcomer does, in an empty clone of this commit, and time it
	docs/walk.sh

dist: .venv/.dev ## Build the wheel and the sdist into ./dist
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist

# Where the least versions do not work, raise them in pyproject.toml.
least: ## Run some tests with the least versions that pyproject.toml names, in .venv-least
	$(PYTHON) -m venv .venv-least
	.venv-least/bin/python -m pip install --quiet uv
	.venv-least/bin/uv pip compile --quiet --resolution lowest-direct --all-extras \
		--python .venv-least/bin/python --output-file .venv-least/least.txt pyproject.toml
	.venv-least/bin/python -m pip install --quiet --requirement .venv-least/least.txt $(WITH_LEAST)
	.venv-least/bin/python -m pip install --quiet --no-deps --editable .
	.venv-least/bin/python -m pytest -q -W default $(LEAST)

release-check: .venv/.runtime ## Check that TAG (v1.2.3) is the version of package and changelog
	test "$(TAG)" = "v$$($(BIN)/python -c 'import fastcomm; print(fastcomm.__version__)')"
	grep -q '^## \[$(TAG:v%=%)\]' CHANGELOG.md
	grep -q '^version: $(TAG:v%=%)$$' CITATION.cff

clean: ## Remove all that these commands made, .venv and ./demo included
	rm -rf .venv .venv-least .venv-jobs .cache build demo dist docs/_build .coverage .benchmarks .hypothesis
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

$(BIN)/python:
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and \
		"Python 3.11 or newer is needed, this is %d.%d: make PYTHON=python3.12 ..." % v[:2])'
	$(PYTHON) -m venv .venv

# pip from 25.1 on knows --group.
.venv/.runtime: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

.venv-jobs/.torch:
	$(PYTHON) -m venv .venv-jobs
	.venv-jobs/bin/python -m pip install --quiet torch numpy  # pipelines send objects through NumPy
	@touch $@

.venv/.dev: .venv/.runtime
	$(BIN)/python -m pip install --quiet --group dev --editable .
	@touch $@
