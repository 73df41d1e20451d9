# Two commands are enough: `make train` (first run) and `make test`.  Everything lives in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: train test check docs learn evidence faults bench clean

train: $(STAMP)  ## Train SAC on Pendulum-v1 until it is solved, and say what to do next.
	@$(BIN)/rl-training train --config sac/pendulum_first_run

test: $(STAMP)  ## Run the fast tests, as CI does.
	$(BIN)/python -m pytest -n 2

check: $(STAMP)  ## Formatting, lint and types.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(STAMP)  ## The documentation as a site in site/; a broken link is an error.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

learn: $(STAMP)  ## The quick learning gates over three seeds; about half an hour on two cores.
	$(BIN)/python -m pytest -m slow -v -s tests/learning

# GATES="ppo dqn" runs these alone; DATA=FOLDER has the recorded data, without which gates are skipped.
GATES ?=
DATA ?= $(RL_DATA)
evidence: $(STAMP)  ## All learning gates over three seeds; writes docs/results.md. Hours on two cores.
	$(BIN)/python -m bench.evidence $(GATES) $(if $(DATA),--data "$(DATA)")

# JOBS processes at once, KILLS per method, runs of STEPS steps: JOBS=16 KILLS=20 make faults
JOBS ?= 2
KILLS ?= 15
STEPS ?= 1500
faults: $(STAMP)  ## Kill, corrupt and starve runs of every method; prints the table of what was tried.
	RL_FAULTS_KILLS=$(KILLS) RL_FAULTS_STEPS=$(STEPS) $(BIN)/python -m pytest -n $(JOBS) \
		-m "slow or not slow" --timeout 3600 tests/faults

bench: $(STAMP)  ## Speed beside Stable-Baselines3, where that is installed.
	$(BIN)/python -m bench

$(STAMP): pyproject.toml constraints.txt
	@echo "Setting up $(VENV) with pinned dependencies; this takes a minute or two, once."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $(STAMP)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
