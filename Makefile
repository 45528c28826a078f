# make demo and make test do their own set-up in .venv; a second call starts at once.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
DEVELOP := .venv/.develop
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint bench docs dist clean

demo: $(READY)  ## the paper's comparison on the bundled data
	@echo "Comparing three rules, 15 workers, equal batches and very unequal ones, 3 seeds: about 2 minutes."
	$(BIN)/signvote compare --task mnist-10k --model mlp --recipe paper --modes 1 4 --seeds 0 1 2 --rounds 300 --out runs/demo

test: lint  ## every check
	$(BIN)/python -m pytest --numprocesses $$(( ($$(nproc) * 3 + 1) / 2 )) --maxschedchunk 2 --cov  # some tests mostly wait

lint: $(DEVELOP)  ## style, formatting, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)  ## kernels against copy speed, as ratios
	$(BIN)/signvote bench kernels

docs: $(DEVELOP)  ## this documentation as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Open site/index.html; to search in it, too: $(BIN)/python -m http.server --directory site"

dist: $(DEVELOP)  ## wheel and sdist in dist/, each installed with its dependencies into an empty environment and tried
	rm -rf dist && $(BIN)/python -m hatchling build
	for file in dist/*.whl dist/*.tar.gz; do \
	  rm -rf dist/empty && $(PYTHON) -m venv dist/empty && \
	  dist/empty/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $$file && \
	  dist/empty/bin/signvote doctor && \
	  dist/empty/bin/signvote train --model mlp --rounds 20 --evaluate-every 10 --out dist/empty/run || exit 1; \
	done; rm -rf dist/empty

$(READY): pyproject.toml constraints.txt
	@echo "Setting up .venv: torch and the rest are installed once, which takes a minute or two."
	$(PYTHON) -m venv .venv
	$(INSTALL) -e .
	@touch $(READY)

$(DEVELOP): $(READY)
	@echo "Installing what tests and docs need, once."
	$(INSTALL) -e ".[dev,docs,flower,tensorboard]"
	@touch $(DEVELOP)

clean:  ## remove the environment and every cache
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
