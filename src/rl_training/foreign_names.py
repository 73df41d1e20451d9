"""What other libraries call our settings, so that an unknown name can be answered with ours.

One table for Stable-Baselines3 (with its contrib package), CleanRL, d3rlpy, and a few more.  A name
is only looked up when it is not a setting of the method, so a name that means something else here
(`tau`, `alpha`) is not in the way.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

SB3 = "Stable-Baselines3"
CLEANRL = "CleanRL"
D3RLPY = "d3rlpy"
SPINNING_UP = "Spinning Up"
IMITATION = "imitation"
MBRL = "MBRL-Lib"
MBPO = "the authors' MBPO"
DREAMER = "the authors' DreamerV3"


@dataclass(frozen=True)
class ForeignName:
    """A setting of another library."""

    library: str
    name: str
    ours: tuple[str, ...] = ()
    """Our settings with this meaning; the first that the method has is meant."""
    run_key: str | None = None
    """Our key of the run (`TrainConfig`) with this meaning, where no setting of a method has it."""
    note: str = ""
    """What else differs, or what to do where we have no such setting."""


def _rows(library: str, *rows: tuple[str, str] | tuple[str, str, str]) -> list[ForeignName]:
    """Read `("their name", "ours or ours", "note")`; `run:name` is a key of the run."""
    names = []
    for their, ours, *note in rows:
        words = ours.split()
        keys = [word.removeprefix("run:") for word in words if word.startswith("run:")]
        settings = tuple(word for word in words if not word.startswith("run:"))
        key = keys[0] if keys else None
        names.append(ForeignName(library, their, settings, key, note[0] if note else ""))
    return names


_NOISE = "a standard deviation, in units of actions scaled to [-1, 1]"
_WIDTHS = "a list of widths, such as [256, 256]"

TABLE: tuple[ForeignName, ...] = (
    *_rows(
        SB3,
        ("n_steps", "num_steps n_step run:total_timesteps"),
        ("n_epochs", "update_epochs"),
        ("batch_size", "minibatch_size"),
        ("clip_range", "clip_coef"),
        ("clip_range_vf", "clip_value"),
        ("ent_coef", "alpha entropy_coef"),
        ("buffer_size", "buffer_capacity"),
        ("train_freq", "train_frequency"),
        ("gradient_steps", "gradient_updates_per_step model_updates_per_step"),
        ("exploration_initial_eps", "epsilon_start"),
        ("exploration_final_eps", "epsilon_end"),
        ("replay_buffer_class", "prioritized", "true gives prioritized replay"),
        ("action_noise", "exploration_noise", _NOISE),
        ("target_policy_noise", "policy_noise"),
        ("target_noise_clip", "noise_clip"),
        ("n_critics", "num_critics"),
        ("n_quantiles", "num_quantiles"),
        ("top_quantiles_to_drop_per_net", "quantiles_to_drop"),
        ("net_arch", "hidden_sizes model_hidden_sizes", _WIDTHS),
        ("policy_kwargs", "hidden_sizes model_hidden_sizes", "what is in net_arch"),
        ("activation_fn", "activation", "a name, such as tanh"),
        ("optimizer_class", "optimizer", "a name, such as adamw"),
        ("optimizer_kwargs", "optimizer", "a mapping, such as {type: adamw, weight_decay: 0.01}"),
        ("features_extractor_class", "encoder", "module:function that makes one"),
        ("log_std_init", "initial_log_std"),
        ("norm_obs", "normalize_observations"),
        ("norm_reward", "normalize_rewards normalize_reward"),
        ("eval_freq", "eval_interval"),
        ("n_eval_episodes", "run:eval_episodes"),
        ("n_envs", "run:num_envs"),
        ("env", "run:env_id"),
        ("vec_env_cls", "run:vector_mode"),
        ("wrapper_class", "run:env_kwargs", "env_kwargs.wrappers, a list"),
        ("save_freq", "run:checkpoint_interval"),
        ("tensorboard_log", "run:tensorboard", "true or false; files go into the run's folder"),
        ("policy", "", "the network follows from the spaces of the task, leave it out"),
        ("use_sde", "", "noise does not depend on the state, leave it out"),
        ("sde_sample_freq", "", "noise does not depend on the state, leave it out"),
        ("optimize_memory_usage", "", "observations of images are stored once, leave it out"),
        ("stats_window_size", "", "training returns are means over 100 episodes, leave it out"),
        ("verbose", "", "--quiet switches the display off"),
        ("progress_bar", "", "--quiet switches the display off"),
        ("reset_num_timesteps", "", "`rl-training resume RUN` continues with a run"),
    ),
    *_rows(
        CLEANRL,
        ("num_minibatches", "minibatch_size", "a size, not a number of them"),
        ("norm_adv", "normalize_advantage"),
        ("clip_vloss", "clip_value", "a width, or null"),
        ("anneal_lr", "lr_schedule", "such as {type: linear}"),
        ("start_e", "epsilon_start"),
        ("end_e", "epsilon_end"),
        ("target_network_frequency", "target_update_interval tau"),
        ("policy_lr", "policy_learning_rate actor_learning_rate"),
        ("q_lr", "learning_rate policy_learning_rate"),
        ("policy_frequency", "policy_delay"),
        ("autotune", "alpha", "auto, or a number that stays"),
        ("gym_id", "run:env_id"),
        ("exp_name", "run:run_name"),
        ("cuda", "run:device", "auto, cpu, cuda or cuda:<n>"),
        ("track", "run:trackers", "such as [wandb]"),
        ("wandb_project_name", "run:trackers", "such as [wandb]; WANDB_PROJECT names the project"),
        ("capture_video", "", "`rl-training record RUN` makes a video afterwards"),
        ("save_model", "", "every run is saved"),
        ("torch_deterministic", "", "a seed gives the same bits again, leave it out"),
    ),
    *_rows(
        D3RLPY,
        ("actor_learning_rate", "policy_learning_rate learning_rate"),
        ("critic_learning_rate", "learning_rate policy_learning_rate"),
        ("temp_learning_rate", "", "the temperature has the critics' learning_rate, leave it out"),
        ("alpha_learning_rate", "", "the weight has the critics' learning_rate, leave it out"),
        ("initial_temperature", "initial_alpha"),
        ("conservative_weight", "cql_alpha"),
        ("n_action_samples", "num_cql_samples"),
        ("alpha_threshold", "cql_target_gap"),
        ("soft_q_backup", "backup"),
        ("weight_temp", "beta"),
        ("max_weight", "max_advantage_weight"),
        ("alpha", "bc_alpha cql_alpha"),
        ("target_smoothing_sigma", "policy_noise"),
        ("target_smoothing_clip", "noise_clip"),
        ("update_actor_interval", "policy_delay"),
        ("n_greedy_quantiles", "num_action_quantiles"),
        ("embed_size", "embedding_dim"),
        ("reward_scaler", "reward_scale normalize_rewards"),
        ("observation_scaler", "normalize_observations", "true standardises"),
        ("action_scaler", "", "actions are scaled to the task's box always, leave it out"),
        ("encoder_factory", "hidden_sizes model_hidden_sizes", _WIDTHS),
        ("actor_encoder_factory", "actor_hidden_sizes hidden_sizes", _WIDTHS),
        ("critic_encoder_factory", "critic_hidden_sizes hidden_sizes", _WIDTHS),
        ("optim_factory", "optimizer", "a name, or a mapping {type: adamw, ...}"),
        ("q_func_factory", "num_quantiles"),
        ("n_steps_per_epoch", "eval_interval"),
        ("n_trials", "run:eval_episodes"),
        ("save_interval", "run:checkpoint_interval"),
        ("experiment_name", "run:run_name"),
        ("compile_graph", "run:accelerate"),
        ("update_interval", "train_frequency"),
        ("update_start_step", "learning_starts"),
        ("random_steps", "initial_random_steps learning_starts"),
        ("n_updates", "gradient_updates_per_step model_updates_per_step"),
        ("dataset", "dataset_path expert_dataset_path"),
        ("n_ensembles", "num_ensembles"),
        ("rollout_interval", "rollout_refresh_interval"),
    ),
    *_rows(
        SPINNING_UP,
        ("polyak", "tau", "which is 1 - polyak"),
        ("soft_tau", "tau"),
        ("lr", "learning_rate policy_learning_rate world_model_learning_rate model_learning_rate"),
        ("pi_lr", "actor_learning_rate policy_learning_rate learning_rate"),
        ("clip_ratio", "clip_coef"),
        ("lam", "gae_lambda penalty_coef"),
        ("replay_size", "buffer_capacity"),
        ("start_steps", "learning_starts"),
        ("update_after", "learning_starts"),
        ("update_every", "train_frequency"),
        ("act_noise", "exploration_noise", _NOISE),
        ("target_noise", "policy_noise"),
        ("train_pi_iters", "update_epochs"),
        ("max_ep_len", "run:env_kwargs", "env_kwargs.max_episode_steps"),
        ("discount", "gamma"),
    ),
    *_rows(
        IMITATION,
        ("demo_batch_size", "discriminator_batch_size"),
        ("n_disc_updates_per_round", "discriminator_updates"),
        ("demonstrations", "expert_dataset_path dataset_path"),
    ),
    *_rows(
        MBRL,
        ("ensemble_size", "num_ensembles"),
        ("freq_train_model", "model_train_frequency"),
        ("population_size", "planning_candidates"),
        ("elite_ratio", "planning_topk", "a number of candidates, not a share"),
        ("num_iterations", "planning_iterations"),
        ("num_particles", "planning_particles"),
    ),
    *_rows(
        MBPO, ("real_ratio", "synthetic_batch_ratio", "the share of imagined rows, 1 - real_ratio")
    ),
    *_rows(
        DREAMER,
        ("horizon", "imagination_horizon planning_horizon rollout_horizon"),
        ("imag_horizon", "imagination_horizon"),
        ("replay_size", "buffer_capacity"),
    ),
)
"""Every name once per library; of equal names the first that fits is meant."""


def foreign_hint(word: str, allowed: Collection[str]) -> str | None:
    """Say what a name of another library is called here, as the end of a sentence.

    Args:
        word: The unknown name.
        allowed: The fields of the settings class that does not know it.
    """
    known = word.lower().replace("-", "_")
    rows = [row for row in TABLE if row.name == known and row.name not in allowed]
    for row in rows:
        name = next((name for name in (*row.ours, row.run_key) if name in allowed), None)
        if name is not None:
            note = f" ({row.note})" if row.note else ""
            return f"; {row.library}'s {row.name} is {name} here{note}"
    for row in rows:
        if row.run_key is not None:
            return f"; {row.library}'s {row.name} is {row.run_key} here, a key of the run itself"
        if not row.ours:
            return f"; {row.library}'s {row.name} has no counterpart here: {row.note}"
    return None
