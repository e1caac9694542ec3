PYTHON ?= python3
BIN := .venv/bin

.PHONY: run test lint types bench format clean

run: .venv/ready  ## a study: six kinds of attention as small language models
	$(BIN)/mercer study quick

test: .venv/ready lint types  ## lint, types, tests and the README's snippets
	$(BIN)/python -m pytest -n auto

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/ready
	$(BIN)/mypy

bench: .venv/ready  ## the figures of docs/performance.md, on this machine
	$(BIN)/python benchmarks/core.py

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv
