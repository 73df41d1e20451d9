"""What the reference examples share: train a preset, evaluate it, predict, save, load."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from rl_training.envs.factory import make_env
from rl_training.experiment.config import load_config
from rl_training.runtime.train import train
from rl_training.runtime.workflows import evaluate_checkpoint, load_agent


def reference_main(preset: str) -> None:
    """Train a preset from the command line and show what the result can do.

    Options: `--total-timesteps`, `--seed`, `--output-dir` (a temporary folder by default),
    `--episodes` to evaluate, and `--set KEY=VALUE` for other settings.
    """
    parser = argparse.ArgumentParser(description=f"Reference run of the preset {preset}.")
    parser.add_argument("--total-timesteps", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=None)
    parser.add_argument("--episodes", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        changes = {"seed": options.seed, "output_dir": str(options.output_dir or temporary)}
        if options.total_timesteps is not None:
            changes["total_timesteps"] = options.total_timesteps
        config = load_config(preset, options.set, changes, may_import=True)
        result = train(config)
        print(f"run_dir={result.run_dir}")
        print(f"eval_return_mean={result.metrics['eval_return_mean']:.2f}")
        again = evaluate_checkpoint(result.checkpoint_path, num_episodes=options.episodes)
        print(f"{options.episodes} fresh episodes: {again.metrics['eval_return_mean']:.2f}")
        env = make_env(config.env_id, config.env_kwargs)
        obs, _ = env.reset(seed=options.seed)
        print(f"action for {obs}: {load_agent(result.checkpoint_path).predict(obs)}")
        env.close()
