# Each target runs in .venv, which is made on first use and again when the pins change.

PORT ?= 8000
ARGS ?=
VENV := .venv
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready
# A worker for each core, up to four; all tests of a file run in one worker, in their order.
PYTEST := $(PYTHON) -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help

.PHONY: help
help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  ARGS passes on, as in: make test ARGS='-k cache'. PORT chooses the site's port."

$(READY): pyproject.toml constraints.txt
	@python=$$(command -v python3.11 || command -v python3 || echo none); \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "lab35 needs Python 3.11 or newer as python3.11 or python3; found $$python" >&2; exit 1; }; \
	echo "Installing into $(VENV); the first time, PyTorch alone takes some minutes."; \
	"$$python" -m venv $(VENV)
	$(PYTHON) -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

.PHONY: site
site: $(READY) ## Build the course in strict mode and serve it; it reloads when a page changes.
	@$(PYTHON) -c 'import socket, sys; socket.create_server(("127.0.0.1", int(sys.argv[1]))).close()' '$(PORT)' 2>/dev/null || { \
		echo "PORT=$(PORT) is in use, or is no port that you may serve on; choose another, as in: make site PORT=8001" >&2; exit 1; }
	@$(PYTHON) scripts/notebooks.py
	@echo "The course will be at http://127.0.0.1:$(PORT)/ (stop with Ctrl-C)"
	@NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs serve --strict --dev-addr 127.0.0.1:$(PORT)

.PHONY: build
build: $(READY) ## Build the course in strict mode into the folder site, for any web server.
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict
	$(PYTHON) scripts/notebooks.py site/notebooks

.PHONY: test
test: $(READY) ## Run the tests, every fence of the course, and the checks of its numbers.
	$(PYTEST) -m "not slow" $(ARGS)

.PHONY: test-slow
test-slow: $(READY) ## Run the tests that take minutes.
	$(PYTEST) -m slow $(ARGS)

.PHONY: tables
tables: $(READY) ## Measure everything on this machine, and write the tables into the pages.
	$(PYTHON) scripts/tables.py $(ARGS)
	$(PYTHON) scripts/figures.py

.PHONY: outputs
outputs: $(READY) ## Run the fences, and write what they print into the pages.
	$(PYTHON) scripts/outputs.py $(ARGS)

.PHONY: figures
figures: $(READY) ## Draw the figures from the stored results.
	$(PYTHON) scripts/figures.py $(ARGS)

.PHONY: train
train: $(READY) ## Train a checkpoint into checkpoints/mine, in about half an hour on two cores.
	$(PYTHON) scripts/train.py --out checkpoints/mine $(ARGS)

.PHONY: lint
lint: $(READY) ## Check style and docstrings.
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

.PHONY: format
format: $(READY) ## Mend what can be mended by itself.
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

.PHONY: clean
clean: ## Delete what the tools leave behind; .venv and checkpoints stay.
	rm -rf build dist docs/notebooks site .hypothesis .pytest_cache .ruff_cache
	find docs scripts src tests -name __pycache__ -prune -exec rm -rf {} +
