# Every target sets up what it needs; a second call starts at once.
.PHONY: help setup setup-slurm material browser quickstart test kill-test lint format gpu-check
.DEFAULT_GOAL := help

PY := .venv/bin/python

help:
	@echo "make quickstart  train a small Qwen3-MoE on two CPU ranks and check the result (10 minutes the first time)"
	@echo "make test        the whole test suite, on CPU"
	@echo "make kill-test   kill a run 30 times at random moments; the end has to be the unbroken one's (KILLS=, SEED=)"
	@echo "make lint        ruff and mypy"
	@echo "make format      let ruff rewrite the files"
	@echo "make gpu-check   the tests that need a GPU; says so and ends well where there is none"
	@echo "make setup       only build .venv (Python >= 3.12; PYTHON=... names one)"
	@echo "make setup-slurm only install SLURM for its tests (part of make test; as root, with apt)"
	@echo "make material    only fetch the tokenizer and the example rows into .material"
	@echo "make browser     only fetch a headless Chromium into .browser, for the tests of the report"

setup: .venv/.setup-stamp
.venv/.setup-stamp: pyproject.toml constraints.txt
	@bash scripts/setup.sh
	@touch $@

# Packages of the machine, only as root and with apt; elsewhere it says which tests will skip.
setup-slurm:
	@bash scripts/setup_slurm.sh

# Looks at every checksum (a tenth of a second) and fetches only what is missing.
material: setup
	@$(PY) scripts/fetch_material.py

browser: setup
	@$(PY) scripts/fetch_browser.py

quickstart: material
	@$(PY) examples/quickstart.py

# One thread a process: the tests run up to four ranks side by side.
test: export OMP_NUM_THREADS ?= 1
test: material setup-slurm browser
	$(PY) -m pytest --durations=60

KILLS ?= 30
kill-test: export OMP_NUM_THREADS ?= 1
kill-test: export PYTHONPATH := $(CURDIR)
kill-test: material
	$(PY) -u tests/e2e/kill_campaign.py --kills $(KILLS) $(if $(SEED),--seed $(SEED))

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: setup
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

gpu-check: material
	@bash scripts/gpu_check.sh
