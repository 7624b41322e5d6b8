# The README's two commands, and those that CI adds.
# Needs Python >= 3.11, pip and make; everything else is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint format clean

# One marker file per set of extras: a change to pyproject.toml reinstalls them.
$(VENV)/installed-%: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable ".[$*]"
	@touch $@

demo: $(VENV)/installed-test
	$(BIN)/gradflow run --output out/demo

test: $(VENV)/installed-test
	$(BIN)/python -m pytest -n 2

lint: $(VENV)/installed-test $(VENV)/installed-lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

format: $(VENV)/installed-lint
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) out build *.egg-info
