# Two commands are enough: `make train` (first run) and `make test`.  Everything lives in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

ALL := not slow and not gpu

.PHONY: train test test-all check check-portable docs dist learn evidence evidence-verify faults bench clean

train: $(STAMP)  ## Train SAC on Pendulum-v1 until it is solved, and say what to do next.
	@$(BIN)/rl-training train --config sac/pendulum_first_run

test: $(STAMP)  ## The tests that CI runs: cheap ones of every method, expensive ones of four.
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-all: $(STAMP)  ## The whole matrix: every test of every method but the slow ones.
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "$(ALL)"

check: $(STAMP)  ## Formatting, lint and types.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Other processors round differently.  These tests compute or learn something, so they run again with
# fewer instructions (no AVX at all; AVX2) and one or two threads: PORTABLE="default:1" is what CI adds.
PORTABLE ?= default:1 default:2 avx2:1 avx2:2
PORTABLE_TESTS := tests/test_*_update.py tests/test_mopo_dynamics_model.py tests/maths \
	tests/data/test_mixed_replay.py tests/data/test_prioritized_replay.py \
	src/rl_training/testing/test_contract_learner.py tests/faults/test_golden_traces.py
check-portable: $(STAMP)  ## Maths, golden traces and small learning tests as other processors compute them.
	@set -e; for pair in $(PORTABLE); do \
		level=$${pair%:*}; threads=$${pair#*:}; \
		case $$level in default) mkl=SSE4_2; onednn=SSE41 ;; avx2) mkl=AVX2; onednn=AVX2 ;; \
			*) echo "PORTABLE: $$pair is not default:THREADS or avx2:THREADS" >&2; exit 2 ;; esac; \
		echo "== instructions: $$level, threads: $$threads"; \
		ATEN_CPU_CAPABILITY=$$level MKL_ENABLE_INSTRUCTIONS=$$mkl ONEDNN_MAX_CPU_ISA=$$onednn \
			OMP_NUM_THREADS=$$threads $(BIN)/python -m pytest -n 2 -m "$(ALL)" $(PORTABLE_TESTS); \
	done

docs: $(STAMP)  ## The documentation as a site in site/; a warning or a dead link is an error.
	$(BIN)/python -m scripts.docs_site

dist: $(STAMP)  ## An sdist and a wheel of the last commit in dist/, built from nothing else and checked.
	$(BIN)/python scripts/build_dist.py

learn: $(STAMP)  ## The quick learning gates and the teaching scripts over three seeds each, two at a time; some 25 minutes on two cores.
	$(BIN)/python -m pytest -m slow -v -rP -n 2 --dist worksteal tests/learning

# GATES="ppo dqn" runs these alone; DATA=FOLDER has the recorded data, without which gates are skipped.
# AT_ONCE=16 runs so many gates at a time, each on one thread.
GATES ?=
AT_ONCE ?=
DATA ?= $(RL_DATA)
evidence: $(STAMP)  ## All learning gates over ten seeds; writes docs/results.md. Hours on two cores.
	$(BIN)/python -m bench.evidence $(GATES) $(if $(DATA),--data "$(DATA)") $(if $(AT_ONCE),--jobs $(AT_ONCE))

evidence-verify: $(STAMP)  ## Evaluates every policy of the zoo and holds it against its card; minutes.
	$(BIN)/rl-training zoo verify

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
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache
