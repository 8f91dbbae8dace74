# Two commands for people: `make demo` and `make test`. Both set up everything that they need.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: test lint check demo soak chaos docs clean

test: lint check

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $(STAMP)

lint: $(STAMP)
	$(BIN)/ruff check src tests bench docs
	$(BIN)/ruff format --check src tests bench docs
	$(BIN)/mypy

check: $(STAMP)
	$(BIN)/pytest -n 2 --dist loadgroup -m "not long"

soak: $(STAMP)
	$(BIN)/pytest -n 2 -m long --timeout 0

docs: $(STAMP)
	$(BIN)/python docs/build.py

# until the pipeline is there: the packets of the protocol documents, as frames that people can read
demo: $(STAMP)
	@for dialect in tap upr-a upr-b dcp; do \
	    printf '\n== %s ==\n' $$dialect; \
	    sed -n 's/.*"form": "[a-z]*", "hex": "\([0-9a-f]*\)".*/\1/p' tests/vectors/seed_$$(echo $$dialect | tr - _).jsonl \
	        | $(BIN)/tailrace decode --dialect $$dialect || exit 1; \
	done
	@printf '\nThose were the packets that the protocol documents draw, errata and all. Now try:\n'
	@printf '  %s\n' '$(BIN)/tailrace decode --help' '$(BIN)/tailrace serve --memory'

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
