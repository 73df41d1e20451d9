"""Saying that a run learns from the random recipe, which tests need and nobody should mistake."""

from __future__ import annotations

from dataclasses import dataclass

from rl_training.algorithms.spec import Loop, Phase
from rl_training.data.datasets.config import DatasetSettings
from rl_training.data.datasets.expert_config import ExpertSettings
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.presets import random_return
from rl_training.experiment.registry import get_algorithm_spec


@dataclass(frozen=True, kw_only=True)
class MadeUpData:
    """Which setting asks for made-up data, and what can be expected of it."""

    setting: str
    """The setting as a user writes it, such as `dataset_kind: random`."""
    path_key: str
    """The setting that names real data."""
    env_id: str
    expected: str
    """What return there is to expect, as the end of a sentence."""

    @property
    def summary(self) -> str:
        """One sentence: what is the matter, and what return it can give."""
        return f"the data is made up ({self.setting}) and says nothing about {self.env_id}; " + (
            self.expected
        )

    @property
    def commands(self) -> tuple[str, ...]:
        """What to type for real data, from an agent that was trained on the task."""
        return (
            "rl-training data collect data.npz --checkpoint RUN --steps 1e5",
            f"rl-training train ... -s {self.path_key}=data.npz",
        )


def made_up_data(config: TrainConfig) -> MadeUpData | None:
    """Return what there is to say about the data of a run that is made up, None of a real one."""
    settings = config.algo_config
    if isinstance(settings, ExpertSettings) and settings.expert_dataset_kind == "random":
        setting, key = "expert_dataset_kind: random", "expert_dataset_path"
    elif isinstance(settings, DatasetSettings) and settings.dataset_mix:
        if all(source.kind != "random" for source in settings.dataset_mix):
            return None
        setting, key = "dataset_mix with kind random", "dataset_path"
    elif isinstance(settings, DatasetSettings) and settings.dataset_kind == "random":
        setting, key = "dataset_kind: random", "dataset_path"
    else:
        return None
    return MadeUpData(
        setting=setting, path_key=key, env_id=config.env_id, expected=_expected(config)
    )


def _expected(config: TrainConfig) -> str:
    spec = get_algorithm_spec(config.algo)
    online = spec.loop_of(config.algo_config) is Loop.OFF_POLICY
    if online and Phase.PRIOR_DATA in spec.loop_phases:
        return "only the environment's own steps teach the policy, and the made-up rows disturb it"
    value = random_return(config.env_id)
    figure = "" if value is None else f", about {value:g}"
    return f"expect no better return than a random policy's{figure}"
