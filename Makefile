# One command each; `make demo` needs nothing but Python 3.11 or newer and a network to install from.

PYTHON ?= python3
HOST ?= 127.0.0.1
PORT ?= 8000
JOBS ?= 2
DRAFTS ?= build/demo-drafts
VENV := .venv
BIN := $(VENV)/bin
unexport PYTHONDONTWRITEBYTECODE  # An installation compiles nothing, so each module is compiled when it is first imported.
INSTALLED := $(VENV)/.installed

.PHONY: install demo demo-drafts test fuzz lint docs dist bench bench-gpu clean

install: $(INSTALLED)

# --no-compile: pip would compile all 22,000 modules on one core, for more than a minute.
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q --no-compile

# Two processes first install what is pinned, half of it each. Then pip resolves little more than what is there already.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "lorafleet needs Python 3.11 or newer: make install PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) 'pip>=26' || true  # resolves a minute sooner
	pids=; failed=; for half in 0 1; do \
		awk "!/^#/ && NR % 2 == $$half" constraints.txt >$(VENV)/half-$$half.txt; \
		$(PIP) --no-deps -r $(VENV)/half-$$half.txt & pids="$$pids $$!"; \
	done; for pid in $$pids; do wait $$pid || failed=1; done; test -z "$$failed"
	$(PIP) -c constraints.txt -e '.[dev]'
	@touch $@

# exec: Ctrl-C must reach the server itself, not a shell before it
demo: install
	@exec $(BIN)/lorafleet demo --host $(HOST) --port $(PORT)

# a draft model for the demo and draft LoRAs in copies of its adapters, in the new folder DRAFTS; minutes on a CPU
demo-drafts: install
	$(BIN)/python demo/draft_prompts.py $(DRAFTS)
	$(BIN)/lorafleet train-draft --model demo/model --out $(DRAFTS)/model --rank 8 \
		--adapters $(foreach name,shout json pirate,$(name)=$(DRAFTS)/adapters/$(name)) \
		--prompts $(DRAFTS)/prompts.jsonl --held-out $(DRAFTS)/held_out.jsonl

# JOBS: processes; tests/README.md says how they share the tests
test: install
	$(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

# an hour each of adapters and of requests with random faults; the tests have 10 s and 4 s of it
fuzz: install
	LORAFLEET_FUZZ_S=3600 LORAFLEET_FUZZ_SEED=$$(date +%s) $(BIN)/pytest -s tests/fuzz

lint: install
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

# the documentation as a site in site/; a broken link is an error
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# a wheel and a source archive, in dist/
dist: install
	$(BIN)/python -m build

bench: install
	$(BIN)/python benchmarks/http_frontend.py
	$(BIN)/python benchmarks/cpu_engine.py

# every benchmark that needs GPUs, then the tables and charts of the docs from their figures; RUNS="sampling serving" for
# some of them. One that fails stops neither the others nor the tables, but the status is then an error.
bench-gpu: install
	$(BIN)/python benchmarks/run_gpu.py $(if $(RUNS),--only $(RUNS)); status=$$?; \
		$(BIN)/python benchmarks/measured_page.py --adopt benchmarks/results && exit $$status

clean:
	rm -rf $(VENV) build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache benchmarks/results
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
