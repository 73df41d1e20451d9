"""What presets are about, read from their files alone: no method is imported for it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from rl_training.experiment.yaml_loader import load_yaml
from rl_training.resources import ASSETS, preset_names, preset_path

MEASURED = "measured.yaml"
"""Packaged figures of the learning gates; `python -m bench.evidence --render` writes them."""


RESOLVED = "resolved.json"
"""Packaged defaults of every method, and presets as they resolve; `scripts/update_docs.py` writes
it.  The settings themselves are in the methods' files, which import PyTorch."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a preset reached when it was last measured."""

    value: float
    """Interquartile mean over seeds of the last checkpoint's mean return."""
    seconds: float
    """Wall time of all seeds, side by side on the machine that docs/results.md names."""
    seeds: int
    steps: int
    real_data: bool
    """Whether recorded data took the place of the preset's made-up data."""


@dataclass(frozen=True, kw_only=True)
class PresetFacts:
    """What a person wants to know before choosing a preset."""

    name: str
    env_id: str
    steps: int
    made_up: bool
    """Whether its data is the random recipe, from which nothing can be learned."""
    measured: Measured | None
    random_return: float | None
    """What a random policy gets, where there is a gate."""


@cache
def preset_facts() -> tuple[PresetFacts, ...]:
    """Return the facts of every preset, sorted by name."""
    figures = load_yaml(ASSETS / MEASURED).data
    return tuple(_facts(name, figures.get(name)) for name in preset_names())


def _facts(name: str, figure: dict[str, Any] | None) -> PresetFacts:
    data = load_yaml(preset_path(name)).data
    gate = ASSETS / "configs" / f"{name}.gate.yaml"
    facts = load_yaml(gate).data if gate.is_file() else {}
    return PresetFacts(
        name=name,
        env_id=str(data["env_id"]),
        steps=int(data.get("total_timesteps", 100_000)),
        made_up="random" in _kinds(data.get("algo_kwargs") or {}),
        measured=None if figure is None else Measured(**figure),
        random_return=facts.get("random"),
    )


def _kinds(settings: dict[str, Any]) -> set[object]:
    return {settings.get("dataset_kind"), settings.get("expert_dataset_kind")}


def resolved_preset(name: str) -> dict[str, Any]:
    """Return a packaged preset with every default filled in, as `TrainConfig.resolved` does."""
    known = json.loads((ASSETS / RESOLVED).read_text(encoding="utf-8"))
    own = known["presets"][name]
    settings = known["methods"][own["algo"]] | own["algo_kwargs"]
    resolved: dict[str, Any] = known["run"] | own | {"algo_kwargs": settings}
    return resolved


def random_return(env_id: str) -> float | None:
    """Return what a random policy gets on a task, where that is known."""
    from rl_training.data.datasets.scores import reference_scores

    known = [f.random_return for f in preset_facts() if f.env_id == env_id]
    measured = next((value for value in known if value is not None), None)
    if measured is not None:
        return measured
    scores = reference_scores(env_id)
    return None if scores is None else scores.random
