"""The public names of the package, page by page of the reference.

What is public is said by a module's `__all__`, or here where it has none.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Source:
    """A module whose names a page shows."""

    module: str
    names: tuple[str, ...] = ()
    """Those that are public, where the module has no `__all__` and not all of them are."""

    def members(self) -> dict[str, Any]:
        """Return the public names with what they stand for."""
        module = importlib.import_module(self.module)
        names = self.names or getattr(module, "__all__", None) or _defined_in(module)
        return {name: getattr(module, name) for name in names if not name.startswith("__")}


def _defined_in(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == module.__name__
    ]


@dataclass(frozen=True)
class Page:
    """A page of the reference."""

    name: str
    title: str
    text: str
    sources: tuple[Source, ...]


PAGES = (
    Page(
        "agents",
        "Agents",
        "Every method is a class with the methods of `Agent`; [methods](methods.md) lists them.",
        (Source("rl_training.api.agent", ("Agent",)),),
    ),
    Page(
        "runs",
        "Runs",
        "Train from a configuration, and use what a run has left on disk.",
        (
            Source("rl_training.experiment.config", ("load_config",)),
            Source("rl_training.runtime.train", ("train",)),
            Source(
                "rl_training.runtime.workflows",
                (
                    "resume_training",
                    "evaluate_checkpoint",
                    "evaluate_group",
                    "predict_from_checkpoint",
                    "load_agent",
                    "LoadedAgent",
                ),
            ),
            Source(
                "rl_training.runtime.results", ("TrainResult", "EvalResult", "TrainingInterrupted")
            ),
            Source("rl_training.experiment.manager"),
            Source("rl_training.resources"),
        ),
    ),
    Page(
        "callbacks",
        "Callbacks",
        "What a run calls while it trains. The [guide](../callbacks.md) has complete examples.",
        (
            Source(
                "rl_training.runtime.callbacks",
                (
                    "Callback",
                    "TrainerState",
                    "LearnerView",
                    "StopOnReturn",
                    "SaveEvery",
                    "PruneTrial",
                    "StopRule",
                ),
            ),
            Source("rl_training.runtime", ("learning_rate_factor", "linear")),
        ),
    ),
    Page(
        "data",
        "Data",
        "Replay buffers and recorded datasets; the [guide](../datasets.md) says how to bring "
        "your own data.",
        (Source("rl_training.data"),),
    ),
    Page(
        "environments",
        "Environments",
        "How environments are made, stepped and saved; see also the [guide](../environments.md).",
        (Source("rl_training.envs"), Source("rl_training.envs.options")),
    ),
    Page(
        "networks",
        "Networks",
        "Networks that methods are built with. The first axis of every parameter and of every "
        "input is that of the seeds.",
        (Source("rl_training.models"),),
    ),
    Page(
        "learners",
        "Learners",
        "What computes an update, and how a method declares itself. "
        "[Adding a method](../contributing.md) works through an example.",
        (
            Source("rl_training.algorithms.base", ("Learner", "OnPolicyLearner", "UpdateResult")),
            Source("rl_training.algorithms.spec", ("AlgorithmSpec", "Loop", "Phase")),
            Source(
                "rl_training.experiment.registry",
                ("algorithm_names", "algorithm_summaries", "get_algorithm_spec", "import_plugin"),
            ),
        ),
    ),
    Page(
        "checkpoints",
        "Checkpoints",
        "What is on disk, read and verified; the [guide](../checkpoints.md) says what is promised.",
        (Source("rl_training.experiment.checkpointing"),),
    ),
    Page(
        "statistics",
        "Statistics and reports",
        "Figures over seeds and tasks, and the page that compares runs.",
        (
            Source("rl_training.experiment.statistics"),
            Source("rl_training.reporting.gather", ("gather", "Run", "Method", "Task")),
            Source("rl_training.reporting.page", ("write_report",)),
        ),
    ),
    Page(
        "offline_evaluation",
        "Offline evaluation",
        "What a policy is worth from recorded data alone; see the "
        "[guide](../offline_evaluation.md).",
        (
            Source("rl_training.ope.estimate", ("evaluate_offline", "rank_offline")),
            Source("rl_training.ope.value", ("OfflineValue",)),
            Source("rl_training.ope.fqe", ("FQEConfig",)),
        ),
    ),
    Page(
        "tools",
        "Tools",
        "What is done with a trained agent: export, videos, recorded data, the Hugging Face Hub.",
        (
            Source("rl_training.tools.export", ("export_agent", "Exported")),
            Source("rl_training.tools.video", ("record_agent", "watch_agent")),
            Source("rl_training.tools.collect", ("collect_dataset", "CollectPlan")),
            Source("rl_training.tools.hub", ("push_agent", "Pushed")),
        ),
    ),
    Page(
        "errors",
        "Errors",
        "Every mistake of a user is one of these, with a sentence that says what, where and "
        "what to do.",
        (Source("rl_training.errors"),),
    ),
)
"""Page by page, in the order of the navigation."""
