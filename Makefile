# Two commands do all: `make demo` (environment, a real plan, a real run) and `make test` (environment, checks, tests).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# What Python compiled is kept also where the environment forbids it: tests start hundreds of
# processes, each of which would compile all of the planner again.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test checks tests slow lint docs clean

# Half of an installation is compiling all modules of all packages, of which Python compiles those
# that are imported by itself.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	mkdir -p demo
	$(BIN)/plan zoo:llama3-8b --devices 64 --batch 512 --force -o demo/llama3-8b.plan.json
	$(BIN)/plan zoo:llama-tiny --devices 8 --hardware cpu --precision fp32 --batch 16 --pin dp=4,tp=2 --force -o demo/llama-tiny.plan.json
	$(BIN)/plan emit demo/llama-tiny.plan.json --model zoo:llama-tiny --backend shard_map --force -o demo/llama_tiny.py
	$(BIN)/python demo/llama_tiny.py --virtual-devices 8 --steps 3

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The checks keep one core busy, so that the tests run beside them.
test: $(STAMP)
	$(MAKE) --no-print-directory -j2 checks tests

checks: lint
	$(BIN)/python -m benchmarks.baselines

tests: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

docs: $(STAMP)
	$(BIN)/python -m mkdocs build

clean:
	rm -rf $(VENV) demo build *.egg-info
