# Two commands for people: `make demo` and `make test`. Both set up everything they need.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
DEMO   := $(VENV)/.demo
STAMP  := $(VENV)/.installed
JAVA   := build/spark.jsa
PIP    := $(BIN)/python -m pip install --disable-pip-version-check

# Tests start hundreds of Pythons. If none may keep its bytecode, each compiles the whole package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: caches test lint check coverage interop peers demo soak chaos simulate campaign docs clean

test: lint check

ifeq ($(or $(MAKECMDGOALS),test),test)
# Lint comes first, and takes one core: the archive that the tests' Javas start from is made at the same time.
MAKEFLAGS += --jobs=2
check: lint
endif

# A newcomer waits for this, so it installs no more than the demo needs. pip would compile all modules that it installs;
# here only imported ones get compiled. pip would also build us in an environment with a second NumPy and all of
# IPython, which the chart library's package requires and its two files don't need. An environment without pip (Debian's
# Python leaves one if python3-venv is missing) is made again.
$(DEMO): pyproject.toml
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@test -e $@ || echo "Installing into $(VENV), once: 650 MB to download, of which Spark is 456; 1.1 GB on disk."
	@$(PIP) --quiet --no-compile "hatchling>=1.25" editables
	@$(PIP) --quiet --no-compile --no-deps "uplot-python==1.1.1"
	@$(PIP) --quiet --no-deps --no-build-isolation --editable .
	@$(BIN)/python -m pip uninstall --quiet --yes uplot-python
	$(PIP) --no-compile "tailrace[spark]"
	@touch $@

# Compiling other people's modules gives warnings, which are errors in tests: so they are compiled here.
$(STAMP): $(DEMO)
	$(PIP) --quiet --no-compile "tailrace[spark,dev]"
	-$(BIN)/python -m compileall -qq -j 2 $(VENV)/lib
	touch $@

lint: $(STAMP)
	$(BIN)/ruff check src tests bench docs examples
	$(BIN)/ruff format --check src tests bench docs examples
	$(BIN)/mypy
	MYPYPATH=bench $(BIN)/mypy bench

# The tests of `tailrace invalidate` need a real Redis and a real memcached, which come from Debian's packages.
caches:
	@command -v redis-server >/dev/null && command -v memcached >/dev/null \
	|| (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq redis-server memcached) >/dev/null \
	|| echo "redis-server and memcached could not be installed: their tests are skipped, or fail in CI" >&2

# The archive that the tests' Javas start from: it halves the cost of each. They also start without it.
$(JAVA): $(STAMP) tests/quick_java.py
	@mkdir -p $(@D) || true
	$(BIN)/python tests/quick_java.py $@ 2>$(@D)/quick_java.log \
	|| echo "$@ could not be made, $(@D)/quick_java.log says why: the tests take longer" >&2

# Six workers on two cores: many tests wait for a timeout or a process. WORKERS=4 needs less memory.
check: $(STAMP) $(JAVA) caches
	$(BIN)/pytest -n $(or $(WORKERS),6) --dist loadgroup

# Other people's software with ours: java-dcp-client by Maven and gocbcore by Go against our node, Spark 4.0 to 4.3 from
# PyPI, a Spark cluster, delta-spark by Maven and other engines on our tables. What a machine lacks is left out, with a
# message. Environments and jars are kept below build/ and reused.
interop: $(STAMP)
	@for tool in java mvn go node npm; do command -v $$tool >/dev/null || echo "left out: what needs $$tool, which is not installed"; done
	$(BIN)/pytest -n 2 --dist loadgroup -m interop tests/interop tests/table/test_object_store.py

# Other clients against ours, on one node in one run; PEERS='--docs 100000 --sizes 256' makes it short.
peers: $(STAMP)
	$(BIN)/python bench/peers/run.py $(PEERS)
	$(BIN)/python bench/peers/delta_merge.py $(MERGE)

# Coverage of the suite by package, and the functions it never runs. TESTS=tests/store runs only a part of it.
coverage: $(STAMP) $(JAVA) caches
	$(BIN)/coverage erase
	-$(BIN)/coverage run -m pytest -n 2 --dist loadgroup $(TESTS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage json --quiet -o .coverage.json
	$(BIN)/python tests/coverage_by_package.py .coverage.json

soak: $(STAMP)
	$(BIN)/pytest -n 2 -m long --timeout 0

# All campaigns (node, reader, mirror, cluster) side by side on two cores for HOURS, with planted bugs that they must
# catch, and one table at the end. CAMPAIGN=mirror runs only one of them, and with SEED=7 replays that schedule;
# SEED=7 with ROUNDS=12 or KILLS=10 plays a longer script of the mirror.
chaos: $(STAMP)
ifneq ($(ROUNDS)$(KILLS),)
	SEED=$(SEED) ROUNDS=$(ROUNDS) KILLS=$(KILLS) $(BIN)/pytest -m long --timeout 0 -k again tests/chaos
else
	nice -n 19 $(BIN)/python tests/campaigns/run.py --hours $(or $(HOURS),2) $(if $(SEED),--seed $(SEED)) \
		$(if $(CAMPAIGN),--only $(CAMPAIGN)) $(if $(and $(CAMPAIGN),$(SEED)),--schedules 1)
endif

# SEED=17 (STEPS=200) replays a seed of the simulated cluster exactly, and prints what happens
simulate: $(STAMP)
	SIMULATE=$(or $(SEED),0) STEPS=$(STEPS) CAUTIOUS=$(CAUTIOUS) $(BIN)/pytest -q -s -m long -k again tests/cluster/test_simulation.py

# SEED=7 SECONDS=60 plays the faults of a seed against a cluster of real processes
campaign: $(STAMP)
	CAMPAIGN=$(or $(SEED),0) SECONDS=$(SECONDS) $(BIN)/pytest -q -m long -k again tests/cluster/test_campaign.py

# The generated pages, and all of them as a site in build/site.
docs: $(STAMP)
	$(BIN)/python docs/build.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "build/site/index.html; with search: $(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site"

demo: $(DEMO)
	$(BIN)/tailrace demo

clean:
	rm -rf $(VENV) $(JAVA) build/quick_java.log build/interop .pytest_cache .mypy_cache .ruff_cache
