"""Policies of the zoo: made from a run, evaluated, and held against their cards."""

from __future__ import annotations

import hashlib
import shlex
import shutil
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl_training.envs.tasks.mujoco import MUJOCO_TASKS
from rl_training.errors import CheckpointError, ConfigError, DataError, RLTrainingError
from rl_training.experiment.config import TrainConfig, load_config
from rl_training.experiment.runs import describe_system, read_description
from rl_training.experiment.summary import evaluations
from rl_training.experiment.zoo import (
    CARD_FILE,
    EPISODE_SEED,
    EPISODES,
    POLICY_FILE,
    README_FILE,
    Card,
    Evaluation,
    entry_name,
    figure,
    interval,
    policy_file,
    processor,
    read_card,
    readme_table,
    versions_differ,
    write_card,
)
from rl_training.runtime.checkpoints.resume import group_folders, home_of
from rl_training.runtime.workflows import LoadedAgent, evaluate_agent, load_agent
from rl_training.tools.hub import curve_text, public_config, save_policy

CONFIG_FILE = "config.yaml"
HALF_ABOVE = 2 * 2**20
"""Bytes beyond which weights are stored in 16 bits: the whole zoo is to stay below 30 MB."""
EXAMPLES = 3
"""Observations that tell which tensors acting reads."""
START, END = "<!-- generated: zoo -->", "<!-- end generated -->"


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the storages that operations read."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch's
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_leaves((args, kwargs or {}))
        self.storages |= {t.untyped_storage().data_ptr() for t in given if isinstance(t, Tensor)}
        return func(*args, **(kwargs or {}))


def acting_state(agent: LoadedAgent) -> dict[str, Any]:
    """Return the part of a learner's state that choosing actions reads, best or sampled.

    Critics, targets and optimizers are left out where a policy does not look at them.
    """
    learner, reads = agent.learner, _Reads()
    state = learner.state_dict()  # held while it acts: what it frees could lie at the same place
    obs = _examples(agent).to(learner.device)
    for act in (learner.act_from, learner.sample_from):
        acting = learner.initial_acting_state(obs.shape[1])
        with torch.no_grad(), reads:
            act(acting, obs)
    kept = _kept(state, reads.storages)
    assert isinstance(kept, dict)
    return kept


def _examples(agent: LoadedAgent) -> Tensor:
    """Return observations `[1, EXAMPLES, ...]` of the task's kind."""
    return torch.from_numpy(agent.env_spec.example_observations(EXAMPLES, 0)).unsqueeze(0)


def _kept(tree: Any, storages: set[int]) -> Any:
    """Return a tree without the tensors outside these storages, and without what is empty."""
    if isinstance(tree, Tensor):
        return tree if tree.untyped_storage().data_ptr() in storages else None
    if not isinstance(tree, Mapping):
        return None  # a count or a generator: acting draws from what it is given
    inner = {key: _kept(value, storages) for key, value in tree.items()}
    return {key: value for key, value in inner.items() if value is not None} or None


def add_entry(
    source: Path,
    zoo: Path,
    *,
    name: str | None = None,
    episodes: int = EPISODES,
    replace: bool = False,
) -> Card:
    """Put the last checkpoint of a finished run into a zoo, evaluated on the CPU.

    Args:
        source: Run folder, member of a group, or an entry of another zoo, which is evaluated here.
        zoo: Folder of the zoo.
        name: Of the entry; method and task if None.
        episodes: Of the evaluation; 0 leaves it for later: add the entry to a zoo then.
        replace: Take the place of an entry of that name.

    Raises:
        ConfigError: When the run has not finished, or the name is taken.
        CheckpointError: When the run cannot be read.
    """
    card, made = _of_entry(source) if (source / CARD_FILE).is_file() else _of_run(source)
    card = card.model_copy(update={"name": name or card.name})
    entry = zoo / card.name
    if entry.exists() and not replace:
        raise ConfigError(f"{entry} is there already; replace it with --replace, or name another")
    staged = zoo / f".new-{card.name}"
    shutil.rmtree(staged, ignore_errors=True)
    try:
        staged.mkdir(parents=True)
        made(staged)
        path = staged / POLICY_FILE
        data = path.read_bytes()
        facts: dict[str, Any] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
        if episodes:
            facts["evaluation"] = evaluated(path, episodes)
        card = card.model_copy(update=facts)
        write_card(staged, card)
        (staged / README_FILE).write_text(readme_of(card), encoding="utf-8")
        shutil.rmtree(entry, ignore_errors=True)
        staged.rename(entry)
    except OSError as error:
        raise DataError(f"{zoo} cannot be written ({error.strerror})") from None
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return card


def _of_entry(source: Path) -> tuple[Card, Any]:
    card = read_card(source)
    policy_file(source.parent, card)

    def copy(target: Path) -> None:
        for file in (POLICY_FILE, CONFIG_FILE):
            shutil.copyfile(source / file, target / file)

    return card, copy


def _of_run(source: Path) -> tuple[Card, Any]:
    home = home_of(source)
    if home is None or group_folders(home):
        raise ConfigError(f"{source} is not the folder of one run (of a group, give seed_<n>)")
    agent = load_agent(source, device="cpu")
    config = agent.config
    if agent.step < config.total_timesteps:
        raise ConfigError(
            f"{source} is at step {agent.step:,} of {config.total_timesteps:,}; the zoo takes the "
            "last checkpoint of a finished run, so resume it first"
        )
    told = public_config(_trained_together(home) or config)
    state = acting_state(agent)
    half = sum(t.nbytes for t in tree_leaves(state)) > HALF_ABOVE
    name = entry_name(config.algo, config.env_id)
    card = Card(
        name=name,
        method=config.algo,
        task=config.env_id,
        seed=config.seed,
        steps=agent.step,
        command=f"rl-training train --config zoo/{name}/{CONFIG_FILE}",
        config=told.resolved(),
        trained_with=_circumstances(home),
        curve=tuple(sorted(evaluations(home).items())),
        sha256="",
        size=0,
        numbers="float16" if half else "float32",
        evaluation=None,
    )

    def save(target: Path) -> None:
        save_policy(agent, target / POLICY_FILE, public_config(config), acting=state, half=half)
        (target / CONFIG_FILE).write_text(told.to_yaml(), encoding="utf-8")

    return card, save


def _trained_together(home: Path) -> TrainConfig | None:
    """Return the configuration of the group that a run is a member of."""
    path = home.parent / "config.yaml"
    whole = load_config(path) if path.is_file() else None
    return whole if whole is not None and whole.is_group else None


def _circumstances(home: Path) -> dict[str, Any]:
    """Return what a run says of itself that is of use elsewhere, and what a person typed for it."""
    known = read_description(home)
    facts = {key: known.get(key) for key in ("rl_training", "created", "python", "platform")}
    # The system alone: which kernel it was is of no use elsewhere.
    facts["platform"] = str(facts["platform"]).partition("-")[0]
    facts["packages"] = known.get("packages")
    git = known.get("git")
    facts["commit"] = git.get("commit") if isinstance(git, dict) else None
    words = known.get("command")
    if isinstance(words, list) and words and Path(str(words[0])).name in _PROGRAMS:
        facts["typed"] = shlex.join(["rl-training", *map(str, words[1:])])
    return facts


_PROGRAMS = ("rl-training", "__main__.py")


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread: more would round sums in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def evaluated(
    policy: Path,
    episodes: int = EPISODES,
    *,
    seed: int = EPISODE_SEED,
    deterministic: bool | None = None,
) -> Evaluation:
    """Evaluate a policy on the CPU, on one thread, from the start states of this seed.

    Raises:
        RLTrainingError: When the file or the task cannot be used here.
    """
    with _one_thread():
        agent = load_agent(policy, device="cpu")
        result = evaluate_agent(agent, episodes, seed=seed, deterministic=deterministic)
    low, high = interval(result.returns)
    best = agent.config.eval_deterministic if deterministic is None else deterministic
    return Evaluation(
        episodes=episodes,
        seed=seed,
        deterministic=best,
        returns=tuple(map(float, result.returns)),
        mean=statistics.fmean(result.returns),
        std=statistics.pstdev(result.returns),
        low=low,
        high=high,
        processor=processor_kind(),
        versions=versions_for(agent.config),
    )


def processor_kind() -> str:
    """Return what decides how numbers are rounded: the processor's model and its instructions."""
    return f"{processor()}, {torch.backends.cpu.get_cpu_capability()}"


def versions_for(config: TrainConfig) -> dict[str, str]:
    """Return the versions of what computes a policy's returns on its task."""
    names = ["torch", "numpy", "gymnasium"]
    names += ["mujoco"] if _is_mujoco(config.env_id) else []
    names += ["ale-py"] if config.env_id.startswith("ALE/") else []
    packages = describe_system()["packages"]
    return {name: packages[name].partition("+")[0] for name in names if packages.get(name)}


def _is_mujoco(env_id: str) -> bool:
    spec = gym.registry.get(env_id)
    return spec is not None and spec.entry_point in MUJOCO_TASKS


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a policy does what its card says."""

    card: Card
    state: str
    """One of `STATES`."""
    reason: str
    mean: float | None = None

    @property
    def failed(self) -> bool:
        """Whether the card is wrong."""
        return self.state == "failed"


STATES = ("bit-exact", "inside", "failed", "skipped")
"""As the card to the last bit, inside its interval, neither, or not possible on this machine."""


def verify(zoo: Path, card: Card) -> Verdict:
    """Evaluate a policy again and hold it against its card.

    On the kind of processor and with the versions of the card every return must be the same to the
    last bit; elsewhere rounding makes other episodes of the same policy, whose mean must be inside
    the card's interval.
    """
    known = card.evaluation
    if known is None:
        return Verdict(card=card, state="failed", reason="the card has no evaluation")
    try:
        path = policy_file(zoo, card)
    except DataError as error:
        return Verdict(card=card, state="failed", reason=str(error))
    try:
        now = evaluated(path, known.episodes, seed=known.seed, deterministic=known.deterministic)
    except CheckpointError as error:
        return Verdict(card=card, state="failed", reason=str(error))
    except RLTrainingError as error:
        return Verdict(card=card, state="skipped", reason=str(error))
    return _judged(card, known, now)


def _judged(card: Card, known: Evaluation, now: Evaluation) -> Verdict:
    others = versions_differ(now.versions, known.versions)
    if now.processor != known.processor:
        others.insert(0, f"{now.processor} in place of {known.processor}")
    same = sum(a == b for a, b in zip(now.returns, known.returns, strict=True))
    if same == len(known.returns):
        return Verdict(
            card=card, state="bit-exact", reason="every return is the same", mean=now.mean
        )
    told = f"{same} of {len(known.returns)} returns are the same"
    if not others:
        reason = f"{told}, on the card's own kind of processor and versions"
        return Verdict(card=card, state="failed", reason=reason, mean=now.mean)
    inside = known.low <= now.mean <= known.high
    where = "inside" if inside else "outside"
    reason = (
        f"{told}; mean {where} [{figure(known.low)}, {figure(known.high)}]; {', '.join(others)}"
    )
    return Verdict(card=card, state="inside" if inside else "failed", reason=reason, mean=now.mean)


def readme_of(card: Card) -> str:
    """Return a card as a page for people."""
    found = card.evaluation
    reached = "Not evaluated yet."
    if found is not None:
        how = "best actions" if found.deterministic else "sampled actions"
        reached = (
            f"**{figure(found.mean)}** ± {figure(found.std)} over {found.episodes} episodes "
            f"({how}, start states of seed {found.seed}), from {figure(min(found.returns))} to "
            f"{figure(max(found.returns))}. Another machine must get a mean between "
            f"{figure(found.low)} and {figure(found.high)}."
        )
    with_ = card.trained_with
    packages = with_.get("packages") or {}
    seeds = card.config.get("seeds")
    beside = f" of {', '.join(map(str, seeds))}, trained side by side" if seeds else ""
    return f"""# {card.name}

{card.method} on {card.task}, seed {card.seed}{beside}, the last checkpoint, step {card.steps:,}.

{reached}

```bash
rl-training zoo eval {card.name}
rl-training zoo verify {card.name}
{card.command}
```

Trained with torch {packages.get("torch")}, Gymnasium {packages.get("gymnasium")}, Python
{with_.get("python")} on {with_.get("platform")}, {str(with_.get("created"))[:10]}.
Weights are stored as {card.numbers}; SHA-256 of the policy `{card.sha256}`.

{curve_text(card.curve)}
"""


def renew_readme(zoo: Path, cards: list[Card]) -> None:
    """Write the table of all policies into the zoo's own page, where it has a place for it."""
    page = zoo / README_FILE
    if not page.is_file():
        return
    before, start, rest = page.read_text(encoding="utf-8").partition(START)
    _, end, after = rest.partition(END)
    if start and end:
        page.write_text(f"{before}{START}\n{readme_table(cards)}\n{END}{after}", encoding="utf-8")
