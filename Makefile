# make demo and make test do their own set-up in .venv; a second call starts at once.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
DEVELOP := .venv/.develop
PROCESSES := $(shell echo $$(( $$(nproc 2>/dev/null || echo 2) * 3 / 2 )))  # some tests wait rather than compute
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

unexport PYTHONDONTWRITEBYTECODE  # tests start many processes: compiled modules are kept

.PHONY: demo test soak steady lint bench docs dist clean

demo: $(READY)  ## the paper's comparison on the bundled data
	@echo "Comparing three rules, 15 workers, equal batches and very unequal ones, 3 seeds: about 2 minutes."
	$(BIN)/signvote compare --task mnist-10k --model mlp --recipe paper --modes 1 4 --seeds 0 1 2 --rounds 300 --out runs/demo

test: lint  ## every check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(PROCESSES) --cov
	$(BIN)/coverage report --include='src/signvote/core/*' --fail-under=100

soak: $(DEVELOP)  ## faults at random moments over all engines, and a table of what was survived: 30 minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m soak --minutes 30 --seed 1

steady: $(DEVELOP)  ## does `make test` pass every time? 10 runs on idle cores, 10 on busy ones: about 3 hours
	$(BIN)/python -m tests.steady 10
	$(BIN)/python -m tests.steady 10 --busy

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
	@touch $@

$(DEVELOP): pyproject.toml constraints.txt
	@echo "Setting up .venv with all that tests and docs need, once, which takes two minutes or three."
	$(PYTHON) -m venv .venv
	$(INSTALL) -e ".[dev,docs,flower,mlflow,tensorboard,wandb]"
	@touch $(READY) $@

clean:  ## remove the environment and every cache
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
