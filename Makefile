# Everything a fresh machine needs: Python 3.11 and make.
PYTHON ?= python3.11
# Another package index for a CPU build of torch, e.g. `make serve TORCH_INDEX=URL`; default: pip's own configuration.
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
CONFIG ?= deploy/local.yaml
PIP_ARGS := --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
export RAY_USAGE_STATS_ENABLED ?= 0

.PHONY: serve test test-all check format proto bench quality clean help

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(VENV)/.python:
	@echo "==> creating $(VENV)"
	@$(PYTHON) -m venv $(VENV) && touch $@

$(VENV)/.cpu: requirements/cpu.txt $(VENV)/.python
	@echo "==> installing requirements/cpu.txt (torch, Ray, transformers: a few minutes the first time)"
	@$(BIN)/pip install $(PIP_ARGS) -r requirements/cpu.txt && touch $@

$(VENV)/.bench: requirements/bench.txt $(VENV)/.cpu
	@echo "==> installing requirements/bench.txt"
	@$(BIN)/pip install $(PIP_ARGS) -r requirements/bench.txt && touch $@

$(VENV)/.dev: requirements/dev.txt $(VENV)/.bench
	@echo "==> installing requirements/dev.txt"
	@$(BIN)/pip install $(PIP_ARGS) -r requirements/dev.txt && touch $@

# Without a compiler torch's kernels serve instead.
$(VENV)/.native: $(VENV)/.cpu $(wildcard cluster/engine/native/csrc/*)
	@$(BIN)/python -m cluster.engine.native.build || true
	@touch $@

serve: $(VENV)/.native ## Serve the demo model from deploy/local.yaml until Ctrl-C
	@$(BIN)/python -m deploy.cli serve --config $(CONFIG)

test: $(VENV)/.dev $(VENV)/.native ## Run the tests (about half an hour)
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-all: $(VENV)/.dev $(VENV)/.native ## Run all tests, the slow ones too
	$(BIN)/python -m pytest

check: $(VENV)/.dev ## Formatting, lint, types, import contract, stub drift
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.check_stubs

format: $(VENV)/.dev ## Format the code
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

proto: $(VENV)/.dev ## Regenerate cluster/pb from proto/
	$(BIN)/python -m tests.check_stubs --write

bench: $(VENV)/.bench ## Load a running server: make bench ARGS='http://127.0.0.1:8000 --rate 2 --plot load.png'
	@$(BIN)/python -m deploy.cli bench $(ARGS)

quality: $(VENV)/.native ## Perplexity and greedy agreement of the served pair against bf16
	$(BIN)/python -m benchmarks.quality

clean: ## Remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
