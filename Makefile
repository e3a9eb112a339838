# Two commands: `make serve` starts a server, `make test` runs the tests. Both set up .venv by themselves.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# -qq: pip's notes about package sources are no news here; its errors still show.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
# Without a GPU this one torch is enough and small where the package source has a CPU build of it.
TORCH_CPU ?= torch==2.13.0
ARGS ?=
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help serve test test-faults lint format docs clean

help:
	@echo 'make serve ARGS="..."   install into .venv if needed, then `sglang serve ARGS`'
	@echo 'make test               unit, process and end-to-end tests; ARGS="..." goes to pytest'
	@echo 'make test-faults        the longer tests that kill, hang and break things'
	@echo 'make lint               formatter, linter, types and spelling'
	@echo 'make format             let the formatter and the linter repair what they can'
	@echo 'make docs               write docs/cli.md and docs/compatibility.md from the code'
	@echo 'make clean              remove .venv and what tools left behind'

serve: $(VENV)/.installed
	@exec $(BIN)/sglang serve $(ARGS)

test: $(VENV)/.installed-test
	$(PYTEST) -m "not faults and not native" test/unit test/process test/e2e $(ARGS)

test-faults: $(VENV)/.installed-test
	$(PYTEST) -m "faults and not native" test/faults test/e2e $(ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/pre-commit run --all-files

format: $(VENV)/.installed-test
	$(BIN)/ruff check -q --fix .
	$(BIN)/ruff format -q .

docs: $(VENV)/.installed
	$(BIN)/python -m sglang.cli.docs

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis python/*.egg-info
	find python test -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) was not found; set PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "error: Python 3.10 or later is needed ($(PYTHON) is `$(PYTHON) -V 2>&1`); set PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
		{ echo "error: $(PYTHON) lacks the venv module; install it (Debian: python3-venv)" >&2; exit 1; }
	@echo "Creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml
	@echo "Installing sglang into $(VENV) (once; a few minutes)"
	@command -v nvidia-smi >/dev/null || $(PIP) "$(TORCH_CPU)"
	@$(PIP) -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "Installing the test tools into $(VENV)"
	@$(PIP) -e ".[test]"
	@touch $@
