# Everything runs in .venv, which the targets make and fill as needed. PYTHON=python3.12 chooses another interpreter.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: quickstart test train-eurosat clean

quickstart: .venv/demo
	$(BIN)/python tools/quickstart.py

# make train-eurosat DATA=folder: EuroSAT as class folders or .tar files, with a training and a test split
train-eurosat: .venv/demo
	$(BIN)/python tools/train.py --config configs/eurosat/flash_gau_pico.yaml --data_dir $(DATA)

test: .venv/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/pytest --numprocesses=auto --maxprocesses=8

# one stamp file for each set of dependencies
.venv/demo .venv/dev: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --editable '.[$(@F)]'
	touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and f"Python 3.10 or newer is needed, {sys.version.split()[0]} found: make PYTHON=...")'
	$(PYTHON) -m venv .venv

clean:
	rm -rf .venv build runs *.egg-info
