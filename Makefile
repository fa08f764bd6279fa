# The project's commands. Each sets up what it needs in a virtual environment of its own.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SNAKEMAKE := $(BIN)/snakemake --profile workflow/profiles/local

.PHONY: help install demo mini test test-cluster torture bench check docs clean

help:            ## list the commands
	@sed -n 's/^\([a-z -]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

install: $(VENV)/.installed  ## the package and its tools, in a virtual environment

$(VENV)/.installed: pyproject.toml
	@echo "installing into $(VENV): some minutes, about 6 GB"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

demo mini: install  ## run a grid on the embedded images and print its table (demo: minutes; mini: an hour)
	$(SNAKEMAKE) --config grid=$@
	@cat results/grids/$@/top1.md
	@echo "figures: results/grids/$@/fig2.png results/grids/$@/fig4.png   claims: results/grids/$@/claims.md"

test: install    ## all tests but those on a Slurm
	$(BIN)/python -m pytest

test-cluster: install  ## tests on a Slurm that they start themselves (Debian: slurmctld slurmd slurm-client)
	$(BIN)/python -m pytest --override-ini=addopts=--strict-markers tests/cluster

torture: install ## break it on purpose, and count what survives (an hour)
	$(BIN)/python -m pytest -m "torture or not torture" tests/torture

# In a folder of its own: Snakemake imports every executor that it finds, and this one calls scontrol each time.
$(VENV)/peer: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $@ \
		snakemake-executor-plugin-slurm snakemake-executor-plugin-slurm-jobstep
	touch $@

bench: $(VENV)/peer  ## speed beside peers, on one page: results/bench/README.md (an hour)
	$(BIN)/python tests/bench/operators.py
	$(BIN)/python tests/bench/inference.py
	$(BIN)/python tests/bench/training.py
	$(BIN)/python tests/bench/workflow.py
	$(BIN)/python tests/bench/executors.py --peer $(VENV)/peer
	$(BIN)/python tests/bench/page.py

check: install   ## style, types, import order, workflow
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/snakefmt --check Snakefile workflow
	$(BIN)/snakemake --lint

docs: install    ## the documentation as a site: site/index.html; dead links and other warnings fail
	$(BIN)/sphinx-build -q -W --keep-going -b html docs site
	@echo "site/index.html   links that lead out of it, not followed: site/external-links.txt"

clean:           ## remove everything that can be made again, results included
	rm -rf $(VENV) .snakemake report.html site results/bench results/data results/grids results/runs results/sources
