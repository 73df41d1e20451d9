"""`python -m bench.evidence.fits`: how well the dynamics ensemble is fitted to few rows.

Transitions of uniformly random actions, as before a method's first update; a fit of the ensemble
with the settings of MBPO to so many of them, from scratch and in a row (to the first 250, then
going on to the first 1,000 and so on, as a run does).  Printed is the share of the variance of
unseen transitions that the elites' mean explains, R2, of the reward, of the worst and the median
entry of the observation, per seed.  `--peer PYTHON` fits mbrl-lib's ensemble, as its own trainer
does with its settings of MBPO, to the same rows by that interpreter.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Table = dict[str, NDArray[np.float32]]
UNSEEN = 4_000
"""Rows that R2 is measured on."""
HIDDEN, MEMBERS, ELITES = [200, 200, 200, 200], 7, 5
"""Sizes of the papers; `--small` has those below, a fifteenth of the work."""
SMALL = [64, 64, 64], 3, 3


def transitions(task: str, count: int, seed: int) -> Table:
    """Return `count` transitions of uniformly random actions, in learner units."""
    gymnasium: Any = importlib.import_module("gymnasium")
    env = gymnasium.make(task)
    rng = np.random.default_rng(seed)
    low, high = env.action_space.low, env.action_space.high
    rows: dict[str, list[Any]] = {"obs": [], "action": [], "next_obs": [], "reward": []}
    obs, _ = env.reset(seed=seed)
    for _ in range(count):
        action = rng.uniform(-1, 1, low.shape)
        next_obs, reward, ended, cut, _ = env.step(low + (action + 1) / 2 * (high - low))
        for name, value in zip(rows, (obs, action, next_obs, reward), strict=True):
            rows[name].append(value)
        obs = env.reset()[0] if ended or cut else next_obs
    env.close()
    return {name: np.asarray(values, np.float32) for name, values in rows.items()}


def r2(predicted: NDArray[Any], unseen: Table) -> dict[str, Any]:
    """Return R2 of reward, worst and median entry, for means `[B, D + 1]`."""
    target = np.c_[unseen["next_obs"] - unseen["obs"], unseen["reward"]]
    score = 1 - ((predicted - target) ** 2).mean(0) / target.var(0).clip(1e-12)
    entries = score[:-1]
    found = {"reward": score[-1], "worst": entries.min(), "median": np.median(entries)}
    return {name: float(value) for name, value in found.items()} | {
        "outputs": [round(float(value), 3) for value in score]
    }


def ours(tables: list[Table], unseen: Table, seed: int) -> list[dict[str, Any]]:
    """Fit one ensemble to one table after another."""
    fit: Any = importlib.import_module("rl_training.algorithms.dynamics.fit")
    loss: Any = importlib.import_module("rl_training.algorithms.dynamics.fit")
    config: Any = importlib.import_module("rl_training.algorithms.dynamics.fit")
    models: Any = importlib.import_module("rl_training.models")
    rng: Any = importlib.import_module("rl_training.rng")
    model = models.MLPMOPOEnsembleModel(
        unseen["obs"].shape[1],
        unseen["action"].shape[1],
        HIDDEN,
        MEMBERS,
        num_elites=ELITES,
        rng=rng.Rng((seed,), "networks"),
    )
    trainer = fit.DynamicsTrainer(model, config.DynamicsConfig(), (seed,))
    found = []
    for table in tables:
        columns = {name: torch.from_numpy(values).unsqueeze(0) for name, values in table.items()}
        ends = torch.zeros_like(columns["reward"])
        rows = loss.model_rows(
            columns["obs"], columns["action"], columns["reward"], columns["next_obs"], ends
        )
        begin = time.perf_counter()
        trainer.fit(rows)
        seconds = time.perf_counter() - begin
        with torch.no_grad():
            given = (torch.from_numpy(unseen[name]) for name in ("obs", "action"))
            mean = model.predict_distribution(*given)[0][model.elites[0]].mean(0)
        steps = int(trainer.epochs[0]) * trainer.epoch_steps(rows)
        found.append(r2(mean.numpy(), unseen) | {"steps": steps, "seconds": seconds})
    return found


def mbrl(tables: list[Table], unseen: Table, seed: int) -> list[dict[str, Any]]:
    """Do the same with mbrl-lib: its settings of MBPO, fixed bounds of the log-variance."""
    models, types = (importlib.import_module(f"mbrl.{name}") for name in ("models", "types"))
    buffers: Any = importlib.import_module("mbrl.util.replay_buffer")
    torch.manual_seed(seed)
    obs, action = unseen["obs"].shape[1], unseen["action"].shape[1]
    network = models.GaussianMLP(
        obs + action,
        obs + 1,
        "cpu",
        num_layers=len(HIDDEN),
        ensemble_size=MEMBERS,
        hid_size=HIDDEN[0],
        activation_fn_cfg={"_target_": "torch.nn.SiLU"},
    )
    model = models.OneDTransitionRewardModel(
        network, target_is_delta=True, normalize=True, num_elites=ELITES
    )
    trainer = models.ModelTrainer(model, optim_lr=1e-3, weight_decay=5e-5)
    found = []
    for table in tables:
        order = np.random.default_rng(seed).permutation(len(table["reward"]))
        held = len(order) // 5
        never = np.zeros(len(order), bool)
        columns = (*(table[n] for n in ("obs", "action", "next_obs", "reward")), never, never)
        split = [
            types.TransitionBatch(*(column[part] for column in columns))
            for part in (order[held:], order[:held])
        ]
        model.update_normalizer(types.TransitionBatch(*columns))
        train = buffers.BootstrapIterator(split[0], 256, MEMBERS, shuffle_each_epoch=True)
        valid = buffers.TransitionIterator(split[1], 256)
        begin = time.perf_counter()
        losses, _ = trainer.train(train, valid, patience=5, improvement_threshold=0.01)
        seconds = time.perf_counter() - begin
        steps = len(losses) * -(-(len(order) - held) // 256)
        with torch.no_grad():
            given = np.c_[unseen["obs"], unseen["action"]].astype(np.float32)
            inputs = model.input_normalizer.normalize(torch.from_numpy(given)).float()
            mean = network.forward(inputs, use_propagation=False)[0]
            # It names no elites where all members are.
            elites = list(range(MEMBERS)) if network.elite_models is None else network.elite_models
            mean = mean[elites].mean(0)
        found.append(r2(mean.numpy(), unseen) | {"steps": steps, "seconds": seconds})
    return found


SIDES = {"ours": ours, "mbrl": mbrl}


def measure(side: str, task: str, sizes: list[int], seeds: list[int]) -> list[dict[str, Any]]:
    """Return a record per seed and number of rows, from scratch and in a row."""
    torch.set_num_threads(1)
    found = []
    for seed in seeds:
        table = transitions(task, max(sizes), seed)
        unseen = transitions(task, UNSEEN, 10_000 + seed)
        tables = [{name: values[:size] for name, values in table.items()} for size in sizes]
        alone = [SIDES[side]([part], unseen, seed)[0] for part in tables]
        runs = {"alone": alone, "in a row": SIDES[side](tables, unseen, seed)}
        for how, records in runs.items():
            for size, record in zip(sizes, records, strict=True):
                found.append({"side": side, "seed": seed, "rows": size, "how": how} | record)
                print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    return found


def table_of(records: list[dict[str, Any]]) -> str:
    """Return the records as a table: a cell holds the seeds' figures."""
    lines = ["| fit | rows | gradient steps | R2 reward | worst entry | median entry | seconds |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
    keys = dict.fromkeys((r["side"], r["how"], r["rows"]) for r in records)
    for side, how, rows in keys:
        chosen = [r for r in records if (r["side"], r["how"], r["rows"]) == (side, how, rows)]

        def cell(name: str, form: str, chosen: list[dict[str, Any]] = chosen) -> str:
            return ", ".join(format(r[name], form) for r in chosen)

        figures = [cell(name, ".3f") for name in ("reward", "worst", "median")]
        cells = [f"{side}, {how}", f"{rows:,}", cell("steps", ","), *figures]
        lines.append(f"| {' | '.join([*cells, cell('seconds', '.0f')])} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.evidence.fits", description=__doc__)
    parser.add_argument("--task", default="Pendulum-v1")
    parser.add_argument("--rows", type=int, nargs="+", default=[250, 1_000, 5_000])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--side", choices=SIDES, default="ours")
    parser.add_argument("--peer", metavar="PYTHON", help="interpreter that has mbrl-lib")
    parser.add_argument("--json", type=Path, help="where the records are written")
    parser.add_argument("--small", action="store_true", help="3 members of 3x64")
    options = parser.parse_args()
    if options.small:
        globals().update(zip(("HIDDEN", "MEMBERS", "ELITES"), SMALL, strict=True))
    records = measure(options.side, options.task, options.rows, options.seeds)
    if options.peer is not None:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "records.json"
            numbers = [str(n) for n in (*options.rows, "--seeds", *options.seeds)]
            command = [options.peer, __file__, "--side", "mbrl", "--task", options.task]
            command += ["--small"] if options.small else []
            subprocess.run([*command, "--json", out, "--rows", *numbers], check=True)
            records += json.loads(out.read_text(encoding="utf-8"))
    if options.json is not None:
        options.json.write_text(json.dumps(records, indent=1), encoding="utf-8")
    print(table_of(records))


if __name__ == "__main__":
    main()
