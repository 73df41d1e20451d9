"""A trained agent as a repository of the Hugging Face Hub: the policy, its settings, a model card.

What leaves the machine is what the repository shows: one file of safetensors that `load` verifies,
the configuration without paths of this machine, and a card made from the run's own log.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from rl_training._version import __version__
from rl_training.algorithms.spec import paper_address
from rl_training.data.datasets.scores import SCORE
from rl_training.envs.tasks.spaces_only import SPACES_ONLY
from rl_training.errors import ConfigError, DataError
from rl_training.experiment.checkpointing import save_single_file
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.hub import POLICY_FILE, repository, require_hub, upload
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.experiment.summary import SUCCESS, evaluations
from rl_training.runtime.checkpoints.resume import group_folders, home_of
from rl_training.runtime.checkpoints.saver import ACTING_ONLY
from rl_training.runtime.results import EvalResult
from rl_training.runtime.workflows import LoadedAgent, evaluate_agent

CONFIG_FILE = "config.yaml"
CARD_FILE = "README.md"
CURVE_FILE = "learning_curve.png"
EPISODES = 20
"""Episodes that the card's figures are made of, unless the caller says otherwise."""
MOST_ROWS = 12
"""Rows of the curve as text; of more evaluations every n-th is shown, and the last."""
TAGS = ("reinforcement-learning", "deep-reinforcement-learning", "rl-training")
PATHS = ("dataset_path", "expert_dataset_path")
"""Settings that name a file of the machine that trained."""


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """Where an agent is now."""

    repo: str
    url: str | None
    """None where the files were written to a folder alone."""
    files: tuple[str, ...]
    result: EvalResult | None

    @property
    def name(self) -> str:
        """What `load`, `eval` and the others take."""
        return f"hf://{self.repo}"


def push_agent(
    agent: LoadedAgent,
    repo: str,
    *,
    run: Path | None = None,
    episodes: int = EPISODES,
    private: bool = False,
    message: str | None = None,
    folder: Path | None = None,
) -> Pushed:
    """Evaluate an agent, write its repository and upload it.

    Args:
        agent: The agent.
        repo: `user/name` on the hub; it is made if missing.
        run: Where it was loaded from; the log of a run's folder has the learning curve.
        episodes: Episodes of the evaluation on the card; 0 leaves it out.
        private: Make a repository that others do not see.
        message: Of the commit; None says method, task and step.
        folder: Write the files here and upload nothing.

    Raises:
        ConfigError: For a name that is none, or a number below 0.
        MissingExtraError: Without the extra `hub`.
        CheckpointError: When the hub refuses.
        DataError: When the folder cannot be written.
    """
    repo = repository(repo)
    if episodes < 0:
        raise ConfigError(f"episodes must be >= 0, got {episodes}")
    if folder is None:
        require_hub("push")
    has_task = agent.config.env_id != SPACES_ONLY
    result = evaluate_agent(agent, episodes) if episodes and has_task else None
    if folder is not None:
        try:
            names = write_repository(agent, folder, repo, run=run, result=result)
        except OSError as error:
            raise DataError(f"{folder} cannot be written ({error.strerror})") from None
        return Pushed(repo=repo, url=None, files=names, result=result)
    with tempfile.TemporaryDirectory() as temporary:
        names = write_repository(agent, Path(temporary), repo, run=run, result=result)
        text = message or f"{agent.config.algo} on {agent.config.env_id}, step {agent.step:,}"
        url = upload(Path(temporary), repo, private=private, message=text)
    return Pushed(repo=repo, url=url, files=names, result=result)


def write_repository(
    agent: LoadedAgent, folder: Path, repo: str, *, run: Path | None, result: EvalResult | None
) -> tuple[str, ...]:
    """Write the files of an agent's repository; returns their names.

    Raises:
        OSError: When the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = public_config(agent.config)
    save_policy(agent, folder / POLICY_FILE, config)
    (folder / CONFIG_FILE).write_text(config.to_yaml(), encoding="utf-8")
    curve = _curve_of(run)
    drawn = _draw(curve, folder / CURVE_FILE)
    card = model_card(agent, config, repo, curve=curve, drawn=drawn, result=result)
    (folder / CARD_FILE).write_text(card, encoding="utf-8")
    picture = (CURVE_FILE,) if drawn else ()
    return (POLICY_FILE, CONFIG_FILE, CARD_FILE, *picture)


def _curve_of(source: Path | None) -> list[tuple[int, float]]:
    """Return steps and mean returns of a run's evaluations; nothing of what is not in a run."""
    if source is None or not source.is_dir():
        return []
    home = home_of(source)
    if home is None:
        return []
    log = next(iter(group_folders(home)), home)  # an agent of a group is its first member
    return [(step, mean) for step, mean in sorted(evaluations(log).items()) if math.isfinite(mean)]


def save_policy(
    agent: LoadedAgent,
    target: Path,
    config: TrainConfig | None = None,
    *,
    acting: Mapping[str, Any] | None = None,
    half: bool = False,
) -> None:
    """Write one self-contained file for evaluation and prediction.

    Args:
        agent: The agent.
        target: The file.
        config: What the file says of the run; None is all of it.
        acting: The part of the learner's state that acting reads, to be all that is stored.
        half: Store the weights in 16 bits.
    """
    if agent.acting_only:
        raise ConfigError("the agent is from a file that holds what acting needs alone; copy that")
    told = agent.config if config is None else config
    header = {
        "config": told.resolved(),
        "env_spec": agent.env_spec.model_dump(mode="json"),
        "seed": agent.config.seed,
        "step": agent.step,
    }
    state = agent.learner.state_dict() if acting is None else acting
    header |= {} if acting is None else {ACTING_ONLY: True}
    save_single_file(target, header=header, states={"learner": halved(state) if half else state})


def halved(tree: Any) -> Any:
    """Return a state whose float32 tensors have 16 bits."""
    if isinstance(tree, Mapping):
        return {key: halved(value) for key, value in tree.items()}
    is_wide = isinstance(tree, Tensor) and tree.dtype == torch.float32
    return tree.half() if is_wide else tree


def public_config(config: TrainConfig) -> TrainConfig:
    """Return a configuration in which files are named without the folders of this machine."""
    settings = dict(config.algo_kwargs)
    for name in PATHS:
        if settings.get(name) is not None:
            settings[name] = Path(str(settings[name])).name
    if settings.get("dataset_mix"):
        settings["dataset_mix"] = [_bare(source) for source in settings["dataset_mix"]]
    origin = config.from_checkpoint
    return config.replace(
        output_dir=TrainConfig.model_fields["output_dir"].default,
        from_checkpoint=None if origin is None else Path(origin).name,
        algo_kwargs=settings,
    )


def _bare(source: dict[str, Any]) -> dict[str, Any]:
    path = source.get("path")
    return source if path is None else source | {"path": Path(str(path)).name}


def model_card(
    agent: LoadedAgent,
    config: TrainConfig,
    repo: str,
    *,
    curve: Sequence[tuple[int, float]],
    drawn: bool,
    result: EvalResult | None,
) -> str:
    """Return the text of the repository's page."""
    spec = get_algorithm_spec(config.algo)
    title = f"{spec.title} on {config.env_id}"
    paper = paper_address(spec.paper) or spec.paper
    parts = [
        f"---\n{yaml.safe_dump(_metadata(config, title, result), sort_keys=False)}---",
        f"# {title}",
        f"An agent of [{spec.title}]({paper}) at step {agent.step:,}, trained with "
        f"rl-training {__version__} (seed {config.seed}).",
        _evaluation_text(result),
        _curve_text(curve, drawn),
        _use_text(spec.learner.__name__, repo),
        _training_text(repo, config),
    ]
    return "\n\n".join(parts) + "\n"


def _metadata(config: TrainConfig, title: str, result: EvalResult | None) -> dict[str, Any]:
    """Return what the hub reads off the head of a card."""
    facts: dict[str, Any] = {
        "library_name": "rl-training",
        "pipeline_tag": "reinforcement-learning",
        "tags": [*TAGS, config.algo, config.env_id],
    }
    if result is not None:
        mean, std = (result.metrics[f"eval_return_{name}"] for name in ("mean", "std"))
        metric = {
            "type": "mean_reward",
            "name": "mean_reward",
            "value": f"{mean:.2f} +/- {std:.2f}",
        }
        outcome = {
            "task": {"type": "reinforcement-learning", "name": "reinforcement-learning"},
            "dataset": {"name": config.env_id, "type": config.env_id},
            "metrics": [metric | {"verified": False}],
        }
        facts["model-index"] = [{"name": title, "results": [outcome]}]
    return facts


def _evaluation_text(result: EvalResult | None) -> str:
    if result is None:
        return "## Evaluation\n\nThe agent was not evaluated when it was pushed."
    figures = result.metrics
    rows = [
        ("episodes", f"{len(result.returns)}"),
        ("mean return", f"{figures['eval_return_mean']:.2f}"),
        ("standard deviation", f"{figures['eval_return_std']:.2f}"),
        ("median", f"{figures['eval_return_median']:.2f}"),
        ("lowest, highest", f"{figures['eval_return_min']:.2f}, {figures['eval_return_max']:.2f}"),
    ]
    if SCORE in figures:
        rows.append(("normalised score (random 0, expert 100)", f"{figures[SCORE]:.1f}"))
    if SUCCESS in figures:
        rows.append(("episodes that succeeded", f"{figures[SUCCESS]:.1%}"))
    lines = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return f"## Evaluation\n\n| figure | value |\n| --- | --- |\n{lines}"


def _curve_text(curve: Sequence[tuple[int, float]], drawn: bool) -> str:
    head = "## Learning curve\n\n"
    if drawn:
        return f"{head}![mean return of the evaluations during training]({CURVE_FILE})"
    return f"{head}{curve_text(curve)}"


def curve_text(curve: Sequence[tuple[int, float]]) -> str:
    """Return a learning curve as text, in Markdown."""
    if not curve:
        return "The log of the run is not part of this repository."
    every = math.ceil(len(curve) / MOST_ROWS)
    shown = [*curve[:-1:every], curve[-1]]
    low, high = min(v for _, v in curve), max(v for _, v in curve)
    rows = []
    for step, value in shown:
        bar = "█" * (1 + round(23 * (value - low) / (high - low or 1.0)))
        rows.append(f"{step:>12,}  {value:>12.2f}  {bar}")
    lines = "\n".join([f"{'step':>12}  {'mean return':>12}", *rows])
    return f"```text\n{lines}\n```"


def _use_text(class_name: str, repo: str) -> str:
    return f"""## Use

```bash
pip install "rl-training[hub]"
rl-training eval hf://{repo} --episodes 20
rl-training record hf://{repo} -o agent.mp4
```

```python
from rl_training import {class_name}

agent = {class_name}.load("hf://{repo}")
action = agent.predict(obs)
```

`{POLICY_FILE}` is verified when it is loaded; nothing in it is executed or imported."""


def _training_text(repo: str, config: TrainConfig) -> str:
    files = [config.algo_kwargs.get(name) for name in PATHS]
    named = [f"`{name}`" for name in (*files, config.from_checkpoint) if name]
    needs = f"\n\nIt needs {' and '.join(named)}, not part of this repository." if named else ""
    return f"""## Train it again

```bash
hf download {repo} {CONFIG_FILE} --local-dir .
rl-training train --config {CONFIG_FILE}
```

The file holds every setting and the seed.{needs}"""


def _draw(curve: Sequence[tuple[int, float]], target: Path) -> bool:
    """Draw the curve where matplotlib is installed; returns whether there is a picture."""
    if not curve:
        return False
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(6.0, 3.4))
    FigureCanvasAgg(figure)
    axis = figure.add_subplot(1, 1, 1)
    steps, values = zip(*curve, strict=True)
    axis.plot(steps, values, marker="o", markersize=3, linewidth=1.4)
    axis.set_xlabel("step")
    axis.set_ylabel("mean evaluation return")
    axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(target, dpi=110)
    return True
