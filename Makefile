# Two commands to know: `make repro` (data to reports) and `make test` (everything that guards them).
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
DEV := $(VENV)/.dev
PEERS := $(VENV)/.peers
export PATH := $(BIN):$(PATH)
export DVC_NO_ANALYTICS := 1
# two threads in each of two workers is the slowest of all
ONE := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.PHONY: help setup setup-peers lab repro test export lint test-slow test-peers test-gpu gpu-check upgrade

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(DEV): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' || { echo "foxhunt needs Python 3.11 or 3.12; call make PYTHON=python3.11"; exit 2; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/pip install -q -c requirements.lock -e '.[dev]'
	touch $@

$(PEERS): $(DEV)
	$(BIN)/pip install -q -c requirements.lock -e '.[peers]'
	touch $@

setup: $(DEV)  ## virtual environment with the locked packages
setup-peers: $(PEERS)  ## the libraries that foxhunt is compared with, on top

lab: $(DEV)  ## JupyterLab on the notebooks
	jupyter lab --notebook-dir=nbs

repro: $(DEV)  ## data.dvc to reports; prints where they are
	dvc pull -q data.dvc
	dvc repro
	@echo; echo "Reports:"; ls -1 artifacts/reports/*.html | sed "s|^|  $(CURDIR)/|"
	@echo "dvc.lock and metrics/ now describe this machine's run; commit them to keep it."

export: $(DEV)  ## notebooks to package, and metadata cleaned
	nbdev_clean
	nbdev_export

lint: $(DEV)
	ruff check -q foxhunt tests

test: $(DEV)  ## export drift, notebooks, pytest, pipeline drift: what CI runs
	dvc pull -q data.dvc
	$(ONE) pytest -q tests/test_house.py
	$(ONE) nbdev_test --n_workers 2 --do_print
	$(ONE) pytest -q -n 2 --dist worksteal -m "not slow and not gpu and not peers" tests
	@dvc repro --allow-missing --dry > $(VENV)/drift.txt 2>&1; if grep -E 'Running stage|ERROR' $(VENV)/drift.txt; then echo "dvc.lock is behind the code: run dvc repro and commit dvc.lock and metrics/"; exit 1; else echo "pipeline: dvc.lock agrees with code, parameters and data"; fi

test-slow: $(DEV)  ## the long proofs
	dvc pull -q data.dvc
	$(ONE) nbdev_test --n_workers 2 --flags slow --do_print
	$(ONE) pytest -q -n 2 -m slow tests
	$(ONE) pytest -q -n 2 --hypothesis-profile=explore $$(grep -l hypothesis tests/test_*.py) -m "not slow and not gpu and not peers"

test-peers: $(PEERS)  ## recompute the golden tensors with the peer libraries
	$(ONE) nbdev_test --n_workers 2 --flags peers --path nbs/peers --do_print
	$(ONE) pytest -q -m peers tests

test-gpu: $(DEV)  ## one worker, so that nothing shares the card
	pytest -q -m gpu tests

gpu-check: $(DEV)  ## audit, memory and benchmark against a real GPU; skipped without one
	python tests/gpu_check.py --out bench/gpu_check.json

upgrade: $(DEV)  ## a new lock, and everything that could notice
	$(BIN)/pip install -q --upgrade --upgrade-strategy eager 'torch==$(shell grep -oP '^torch==\K.*' requirements.lock)' -e '.[dev,peers]'
	$(BIN)/pip check
	$(BIN)/pip freeze --exclude-editable > requirements.lock
	$(MAKE) test test-slow test-peers
