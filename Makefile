.PHONY: install demo demo-network test test-fast check openapi clean
PYTHON ?= python3
BIN := .venv/bin

# Reinstalled only when the pins or the dependencies change.
.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

install: .venv/.installed

demo: install
	$(BIN)/python -m demo

# Three hospitals as processes of their own, with certificates, on loopback.
demo-network: install
	$(BIN)/python -m demo.network

# In the order of the folders: the long tests of tests/e2e start first, not last.
test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --quiet

# Unit tests without processes, for every save.
test-fast: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit -m "not process" --numprocesses 2 --dist loadfile --quiet

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

openapi: install
	$(BIN)/python -m service.openapi > openapi.yaml

clean:
	rm -rf .venv .locum .mypy_cache .ruff_cache .pytest_cache *.egg-info
