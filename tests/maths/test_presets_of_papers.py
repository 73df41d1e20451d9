"""Presets that say they have the settings of a paper have them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rl_training.experiment.config import load_config
from rl_training.resources import preset_names, preset_path

GAMES: dict[str, Any] = {
    "gamma": 0.99,
    "encoder": "nature",
    "buffer_capacity": 1_000_000,
    "learning_starts": 50_000,
    "train_frequency": 4,
    "batch_size": 32,
    "target_update_interval": 2_500,  # 10,000 agent steps
    "tau": 1.0,
    "n_step": 1,
    "prioritized": False,
    "max_grad_norm": None,
    "epsilon_start": 1.0,
}
VALUE_BASED = ("dqn", "qr_dqn", "iqn", "fqf")
DISTRIBUTION: dict[str, Any] = GAMES | {
    "learning_rate": 5e-5,
    "adam_epsilon": 0.01 / 32,
    "kappa": 1.0,
    "double": False,
    "dueling": False,
    "epsilon_end": 0.01,
    "eval_epsilon": 0.001,
}
QUANTILES: dict[str, Any] = DISTRIBUTION | {"num_quantiles": 200, "features_dim": 512}
DRAWN: dict[str, Any] = DISTRIBUTION | {
    "num_quantiles": 64,
    "num_target_quantiles": 64,
    "num_action_quantiles": 32,
    "embedding_dim": 64,
}
FRACTIONS: dict[str, Any] = DISTRIBUTION | {
    "fraction_learning_rate": 2.5e-9,
    "num_quantiles": 32,
    "embedding_dim": 64,
    "entropy_coef": 1e-3,
}
TWIN: dict[str, Any] = {
    "gamma": 0.99,
    "learning_rate": 3e-4,
    "actor_learning_rate": None,
    "adam_epsilon": 1e-8,
    "hidden_sizes": (256, 256),
    "batch_size": 256,
    "buffer_capacity": 1_000_000,
    "learning_starts": 25_000,
    "gradient_updates_per_step": 1,
    "train_frequency": 1,
    "tau": 0.005,
    "num_critics": 2,
    "policy_noise": 0.2,
    "noise_clip": 0.5,
    "policy_delay": 2,
    "exploration_noise": 0.1,
}
SOFT: dict[str, Any] = {
    "gamma": 0.99,
    "learning_rate": 3e-4,
    "actor_learning_rate": None,
    "adam_epsilon": 1e-8,
    "hidden_sizes": (256, 256),
    "batch_size": 256,
    "buffer_capacity": 1_000_000,
    "tau": 0.005,
    "alpha": "auto",
    "target_entropy": None,
    "gradient_updates_per_step": 1,
    "train_frequency": 1,
}
MODEL: dict[str, Any] = {
    "gamma": 0.99,
    "num_ensembles": 7,
    "model_hidden_sizes": (200, 200, 200, 200),
    "model_learning_rate": 1e-3,
    "adam_epsilon": 1e-8,
    "synthetic_batch_ratio": 0.95,
    "tau": 0.005,
}
WORLD_MODEL: dict[str, Any] = {
    "gamma": 0.997,  # 1 - 1 / 333
    "batch_size": 16,
    "batch_length": 64,
    "train_ratio": 128,
    "learning_starts": 1024,
    "world_model_learning_rate": 4e-5,
    "actor_learning_rate": 4e-5,
    "critic_learning_rate": 4e-5,
    "adaptive_clip": 0.3,
    "adam_epsilon": 1e-20,
    "imagination_horizon": 15,
    "return_lambda": 0.95,
    "entropy_coef": 3e-4,
    "free_nats": 1.0,
    "representation_scale": 0.1,
    "replay_value_scale": 0.3,
}
ROBOT_ARM: dict[str, Any] = {
    "gamma": 0.99,
    "learning_rate": 3e-4,
    "batch_size": 256,
    "hidden_sizes": (512, 512, 512, 512),
    "activation": "gelu",
}
WITH_CRITICS: dict[str, Any] = ROBOT_ARM | {
    "actor_learning_rate": None,
    "weight_init": "glorot",
    "num_critics": 2,
    "use_layer_norm": True,
    "tau": 0.005,
    "n_step": 1,
}
FLOW: dict[str, Any] = WITH_CRITICS | {"flow_steps": 10, "q_agg": "mean", "normalize_q": False}
EXPECTILE: dict[str, Any] = WITH_CRITICS | {
    "expectile": 0.9,
    "max_advantage_weight": 100.0,
    "value_layer_norm": True,
}
PENALISED: dict[str, Any] = WITH_CRITICS | {
    "policy_noise": 0.2,
    "noise_clip": 0.5,
    "policy_delay": 2,
    "normalize_q": True,
}
LOCOMOTION: dict[str, Any] = {
    "gamma": 0.99,
    "learning_rate": 3e-4,
    "batch_size": 256,
    "hidden_sizes": (256, 256),
    "num_critics": 2,
    "use_layer_norm": False,
    "tau": 0.005,
    "n_step": 1,
}
MANY_UPDATES: dict[str, Any] = SOFT | {
    "n_step": 1,
    "learning_starts": 5_000,
    "gradient_updates_per_step": 20,
    "critic_hidden_sizes": None,
    "actor_q": "mean",
    "weight_init": "glorot",
}
RANDOMIZED: dict[str, Any] = MANY_UPDATES | {
    "num_critics": 10,
    "num_target_critics": 2,
    "use_layer_norm": False,
}
DROPPING: dict[str, Any] = MANY_UPDATES | {
    "num_critics": 2,
    "num_target_critics": None,
    "critic_dropout": 0.01,
    "use_layer_norm": True,
}
ENTROPIES = {"hopper": -1.0, "halfcheetah": -3.0, "walker2d": -3.0}
"""Target entropies of MBPO, which REDQ and DroQ took over."""
CROSSED: dict[str, Any] = SOFT | {
    "learning_rate": 1e-3,
    "tau": 1.0,
    "learning_starts": 5_000,
    "critic_hidden_sizes": (2048, 2048),
    "num_critics": 2,
    "num_target_critics": None,
    "actor_q": "min",
    "policy_delay": 3,
    "renorm_momentum": 0.99,
    "renorm_warmup": 100_000,
}
TRUNCATED: dict[str, Any] = SOFT | {
    "critic_hidden_sizes": (512, 512, 512),
    "num_critics": 5,
    "num_quantiles": 25,
    "kappa": 1.0,
}
RESIDUAL: dict[str, Any] = SOFT | {
    "gamma": 0.995,
    "learning_rate": 1e-4,
    "hidden_sizes": (512, 512),
    "actor_hidden_sizes": (128,),
    "num_critics": 2,
    "initial_alpha": 0.01,
    "learning_starts": 5_000,
    "normalize_observations": True,
    "gradient_updates_per_step": 2,
    "n_step": 1,
}
SPHERICAL: dict[str, Any] = SOFT | {
    "gamma": 0.995,
    "learning_rate": 1e-4,
    "lr_schedule": {"type": "linear", "start": 1.0, "end": 0.5, "milestones": (), "gamma": 0.1},
    "hidden_sizes": (512, 512),
    "actor_hidden_sizes": (128,),
    "critic_hidden_sizes": None,
    "num_critics": 2,
    "num_bins": 101,
    "value_range": 5.0,
    "initial_alpha": 0.01,
    "learning_starts": 5_000,
    "normalize_observations": True,
    "normalize_rewards": True,
    "gradient_updates_per_step": 2,
    "n_step": 1,
}
MANY_ENVIRONMENTS: dict[str, Any] = {
    "gamma": 0.99,
    "learning_rate": 3e-4,
    "actor_learning_rate": None,
    "actor_hidden_sizes": (512, 256, 128),
    "critic_hidden_sizes": (1024, 512, 256),
    "batch_size": 32_768,
    "train_frequency": 128,
    "gradient_updates_per_step": 2,
    "tau": 0.1,
    "num_critics": 2,
    "num_atoms": 101,
    "use_cdq": True,
    "policy_noise": 0.001,
    "noise_clip": 0.5,
    "policy_delay": 2,
    "exploration_noise": 0.4,
    "exploration_noise_min": 0.001,
    "n_step": 1,
    "normalize_observations": True,
    "normalize_rewards": True,
    "v_min": -10.0,
    "v_max": 10.0,
}
DROPPED = {"hopper": 5, "halfcheetah": 0, "walker2d": 2, "humanoid": 2}
"""Quantiles that TQC drops per critic."""
LINEAR = {"type": "linear", "start": 1.0, "end": 0.0, "milestones": (), "gamma": 0.1}
PROXIMAL: dict[str, Any] = {
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "num_steps": 128,
    "minibatch_size": 256,
    "update_epochs": 4,
    "learning_rate": 2.5e-4,
    "adam_epsilon": 1e-5,
    "clip_coef": 0.1,
    "clip_value": 0.1,
    "ent_coef": 0.01,
    "vf_coef": 0.5,
    "max_grad_norm": 0.5,
    "normalize_advantage": True,
    "lr_schedule": LINEAR,
    "clip_schedule": LINEAR,
}
PROXIMAL_GAMES = tuple(
    f"ppo/{game}_atari" for game in ("breakout", "pong", "qbert", "seaquest", "space_invaders")
)
PAPERS: dict[str, dict[str, Any]] = {
    **{f"redq/{task}": RANDOMIZED | {"target_entropy": e} for task, e in ENTROPIES.items()},
    **{f"droq/{task}": DROPPING | {"target_entropy": e} for task, e in ENTROPIES.items()},
    **{f"crossq/{task}": CROSSED for task in (*DROPPED, "ant")},
    **{f"simba/{task}": RESIDUAL for task in (*DROPPED, "ant")},
    **{f"simba_v2/{task}": SPHERICAL for task in (*DROPPED, "ant")},
    **{f"fast_td3/{task}": MANY_ENVIRONMENTS for task in (*DROPPED, "ant")},
    **{f"tqc/{task}": TRUNCATED | {"quantiles_to_drop": n} for task, n in DROPPED.items()},
    "iql/halfcheetah": LOCOMOTION
    | {
        "actor_learning_rate": None,
        "expectile": 0.7,
        "beta": 3.0,
        "max_advantage_weight": 100.0,
        "policy_dropout": 0.0,
        "normalize_rewards": True,
        "normalize_observations": False,
        "weight_init": "orthogonal",
    },
    "cql/halfcheetah": LOCOMOTION
    | {
        "actor_learning_rate": 1e-4,
        "hidden_sizes": (256, 256, 256),
        "cql_alpha": 10.0,
        "cql_target_gap": None,
        "num_cql_samples": 10,
        "cql_temperature": 1.0,
        "backup": "deterministic",
        "bc_warmup_updates": 40_000,
        "calibrated": False,
    },
    "td3_bc/halfcheetah": LOCOMOTION
    | {
        "actor_learning_rate": None,
        "bc_alpha": 2.5,
        "policy_noise": 0.2,
        "noise_clip": 0.5,
        "policy_delay": 2,
        "normalize_observations": True,
    },
    "rebrac/halfcheetah": LOCOMOTION
    | {
        "learning_rate": 1e-3,
        "batch_size": 1024,
        "hidden_sizes": (256, 256, 256),
        "use_layer_norm": True,
        "beta_actor": 0.001,
        "beta_critic": 0.01,
        "policy_noise": 0.2,
        "noise_clip": 0.5,
        "policy_delay": 2,
        "normalize_q": True,
    },
    # OGBench's default tasks, as in the FQL paper: alpha of FQL and IQL, both of ReBRAC.
    **{
        f"{algo}/{task}": settings
        for task, fql, iql, actor, critic in (
            ("cube_single", 300.0, 1.0, 1.0, 0.0),
            ("cube_double", 300.0, 0.3, 0.1, 0.0),
            ("scene", 300.0, 10.0, 0.1, 0.01),
            ("puzzle_3x3", 1000.0, 10.0, 0.3, 0.01),
            ("puzzle_4x4", 1000.0, 3.0, 0.3, 0.01),
        )
        for algo, settings in (
            ("fql", FLOW | {"alpha": fql}),
            ("iql", EXPECTILE | {"beta": iql}),
            ("rebrac", PENALISED | {"beta_actor": actor, "beta_critic": critic}),
        )
    },
    "dqn/breakout_atari": GAMES
    | {
        "learning_rate": 6.25e-5,
        "adam_epsilon": 1.5e-4,
        "epsilon_end": 0.1,
        "eval_epsilon": 0.05,
        "features_dim": 512,
    },
    **{
        f"{algo}/{game}_atari": settings | changes
        for game, changes in (
            ("breakout", {}),
            (
                "pong",  # of a fifth of the steps
                {
                    "buffer_capacity": 200_000,
                    "learning_starts": 20_000,
                    "target_update_interval": 2_000,
                },
            ),
        )
        for algo, settings in (("qr_dqn", QUANTILES), ("iqn", DRAWN), ("fqf", FRACTIONS))
    },
    "c51/pong_atari": GAMES
    | {
        "num_atoms": 51,
        "v_min": -10.0,
        "v_max": 10.0,
        "learning_rate": 2.5e-4,
        "adam_epsilon": 0.01 / 32,
        "double": False,
        "dueling": False,
        "noisy": False,
        "epsilon_end": 0.01,
        "eval_epsilon": 0.001,
    },
    "c51/rainbow_pong_atari": GAMES
    | {
        "num_atoms": 51,
        "v_min": -10.0,
        "v_max": 10.0,
        "learning_rate": 6.25e-5,
        "adam_epsilon": 1.5e-4,
        "learning_starts": 20_000,
        "target_update_interval": 2_000,  # 8,000 agent steps
        "double": True,
        "dueling": True,
        "noisy": True,
        "n_step": 3,
        "prioritized": True,
        "priority_exponent": 0.5,
        "importance_exponent": 0.4,
    },
    "pqn/breakout_atari": {
        "gamma": 0.99,
        "q_lambda": 0.65,
        "num_steps": 32,
        "minibatch_size": 128,  # 128 games: 32 minibatches
        "update_epochs": 2,
        "learning_rate": 2.5e-4,
        "max_grad_norm": 10.0,
        "layer_norm": True,
        "encoder": "nature",
        "features_dim": 512,
        "epsilon_start": 1.0,
        "epsilon_end": 0.001,
        "exploration_fraction": 0.1,
    },
    **dict.fromkeys(PROXIMAL_GAMES, PROXIMAL),
    # The paper's, but for jaxrl's target entropy and first weights, which learned faster.
    "sac/halfcheetah": SOFT
    | {"learning_starts": 10_000, "target_entropy": -3.0, "weight_init": "orthogonal"},
    "sac/hopper": SOFT | {"learning_starts": 1_000},
    "sac/walker2d": SOFT | {"learning_starts": 1_000},
    "sac/ant": SOFT | {"learning_starts": 10_000},
    "sac/humanoid": SOFT | {"learning_starts": 1_000},
    "mbpo/hopper": MODEL
    | {
        "learning_starts": 5_000,
        "gradient_updates_per_step": 20,
        "target_entropy": -1.0,
        "rollout_schedule": (20_000, 150_000, 1, 15),
        "rollout_batch_size": 100_000,
        "model_train_frequency": 250,
    },
    "mbpo/inverted_pendulum": MODEL
    | {
        "learning_starts": 500,
        "gradient_updates_per_step": 10,
        "target_entropy": -0.05,
        "rollout_horizon": 1,
        "rollout_batch_size": 100_000,
        "model_train_frequency": 250,
    },
    "mopo/halfcheetah": MODEL
    | {
        "rollout_horizon": 1,
        "penalty_coef": 1.0,
        "target_entropy": -3.0,
        "rollout_batch_size": 50_000,
        "rollouts_kept": 5,
    },
    "mbpo/halfcheetah": MODEL
    | {
        "learning_starts": 5_000,
        "gradient_updates_per_step": 40,
        "target_entropy": -3.0,
        "rollout_horizon": 1,
        "rollout_batch_size": 100_000,
    },
    "mbpo/walker2d": MODEL
    | {
        "learning_starts": 5_000,
        "gradient_updates_per_step": 20,
        "target_entropy": -3.0,
        "rollout_horizon": 1,
        "rollout_batch_size": 100_000,
    },
    "mopo/hopper": MODEL
    | {
        "rollout_horizon": 5,
        "penalty_coef": 1.0,
        "target_entropy": -1.0,
        "rollout_batch_size": 50_000,
        "rollouts_kept": 5,
    },
    **{
        f"mobile/{task}": MODEL
        | {
            "actor_learning_rate": 1e-4,
            "hidden_sizes": (256, 256),
            "rollout_horizon": 5,
            "rollout_batch_size": 50_000,
            "rollout_refresh_interval": 1_000,
            "rollouts_kept": 5,
            "penalty_coef": penalty,
            "num_penalty_samples": 10,
            "lowest_target": 0.0,
            "model_max_epochs": 30 if task == "walker2d" else None,
        }
        for task, penalty in (("halfcheetah", 0.1), ("hopper", 1.5), ("walker2d", 0.5))
    },
    "pets/cartpole": {
        "adam_epsilon": 1e-8,
        "batch_size": 32,
        "model_hidden_sizes": (500, 500, 500),
        "model_weight_decay": (1e-4, 2.5e-4, 2.5e-4, 5e-4),
        "planning_horizon": 25,
        "planning_candidates": 400,
        "planning_topk": 40,
        "planning_iterations": 5,
        "planning_momentum": 0.1,
        "planning_particles": 20,
    },
    "dreamer/boxing_atari": WORLD_MODEL,
    "dreamer/breakout_atari": WORLD_MODEL,
    "dreamer/pong_atari": WORLD_MODEL,
    "pets/halfcheetah": {
        "adam_epsilon": 1e-8,
        "model_hidden_sizes": (200, 200, 200, 200),
        "planning_horizon": 30,
        "planning_candidates": 500,
        "planning_topk": 50,
        "planning_iterations": 5,
        "planning_particles": 20,
    },
    "rlpd/halfcheetah": {
        "gamma": 0.99,
        "learning_rate": 3e-4,
        "adam_epsilon": 1e-8,
        "hidden_sizes": (256, 256),
        "num_critics": 10,
        "num_target_critics": 2,
        "use_layer_norm": True,
        "gradient_updates_per_step": 20,
        "offline_batch_ratio": 0.5,
        "tau": 0.005,
    },
    **{f"td3/{task}": TWIN for task in ("halfcheetah", "hopper", "walker2d", "ant", "humanoid")},
}
SAMPLED = (
    "c51/pong_atari",
    *(f"{algo}/{game}_atari" for algo in VALUE_BASED for game in ("breakout", "pong")),
    *PROXIMAL_GAMES,
    "dreamer/boxing_atari",
    "dreamer/breakout_atari",
    "dreamer/pong_atari",
)


@pytest.mark.parametrize("preset", PAPERS)
def test_a_preset_has_the_settings_of_its_paper(preset: str) -> None:
    settings = load_config(preset).algo_config.model_dump()
    assert {name: settings[name] for name in PAPERS[preset]} == PAPERS[preset]


def test_ppo_has_tianshous_settings_on_every_mujoco_task() -> None:
    published = {
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "minibatch_size": 64,
        "update_epochs": 10,
        "hidden_sizes": (64, 64),
        "learning_rate": 3e-4,
        "lr_schedule": LINEAR,
        "clip_coef": 0.2,
        "clip_value": None,
        "vf_coef": 0.25,
        "ent_coef": 0.0,
        "max_grad_norm": 0.5,
        "normalize_advantage": False,
        "recompute_advantages": True,
        "normalize_observations": True,
        "normalize_rewards": True,
        "initial_log_std": -0.5,
    }
    for task in ("halfcheetah", "hopper", "walker2d", "ant", "humanoid"):
        config = load_config(f"ppo/{task}")
        settings = config.algo_config.model_dump()
        assert {name: settings[name] for name in published} == published
        assert settings["num_steps"] * config.num_envs == 2048


def test_cloning_of_robot_arms_has_the_networks_of_the_other_methods() -> None:
    for task in ("cube_single", "cube_double", "scene", "puzzle_3x3", "puzzle_4x4"):
        settings = load_config(f"bc/{task}").algo_config.model_dump()
        assert {name: settings[name] for name in ROBOT_ARM} == ROBOT_ARM


def test_the_actor_of_iql_has_the_papers_cosine() -> None:
    schedule = load_config("iql/halfcheetah").algo_config.model_dump()["actor_lr_schedule"]
    assert (schedule["type"], schedule["start"], schedule["end"]) == ("cosine", 1.0, 0.0)


def test_no_preset_speaks_of_a_paper_without_being_checked() -> None:
    claim = re.compile(r"(settings|sizes) of the (\w+ )?(paper|authors)", re.IGNORECASE)
    names = preset_names()
    claiming = [name for name in names if claim.search(preset_path(name).read_text("utf-8"))]
    assert sorted(claiming) == sorted(PAPERS)


def test_games_are_evaluated_as_in_the_papers_and_flows_by_samples() -> None:
    sampled = [name for name in preset_names() if not load_config(name).eval_deterministic]
    flows = [name for name in preset_names() if name.startswith("fql/")]
    assert sorted(sampled) == sorted((*SAMPLED, *flows))
    for name in SAMPLED:
        assert load_config(name).env_kwargs["max_episode_steps"] == 27_000
