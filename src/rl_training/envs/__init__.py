"""Environments: the factory, stepping over environments and seeds, wrappers, exact snapshots.

No learner and no buffer is known here.
"""

from rl_training.envs.factory import make_env, probe_env
from rl_training.envs.options import evaluation_kwargs
from rl_training.envs.seeds import SeedVectorEnv, env_seed
from rl_training.envs.snapshot import ResumeLevel, SnapshotWrapper
from rl_training.envs.spec import EnvSpec
from rl_training.envs.step import RestoreReport, Step

__all__ = [
    "EnvSpec",
    "RestoreReport",
    "ResumeLevel",
    "SeedVectorEnv",
    "SnapshotWrapper",
    "Step",
    "env_seed",
    "evaluation_kwargs",
    "make_env",
    "probe_env",
]
