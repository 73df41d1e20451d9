"""The zoo: trained policies with what was measured of them, one folder each.

`NAME/policy.safetensors` is the policy, `NAME/card.json` its card, and `NAME/README.md` the card
for people.  This file reads cards; nothing here needs PyTorch.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from rl_training.errors import ConfigError, DataError
from rl_training.experiment.checkpoint.files import is_plain
from rl_training.output_files import written_beside
from rl_training.validation import StrictModel, suggest

CARD_FILE = "card.json"
POLICY_FILE = "policy.safetensors"
README_FILE = "README.md"
FOLDER = "zoo"
EPISODES = 100
EPISODE_SEED = 5_000_000
"""Of the start states of these episodes; training evaluates with the seeds of its members."""
QUANTILE = 3.29
"""Of the normal distribution: 99.9% lie within so many standard deviations."""
LEAST_WIDTH = 0.01
"""Half the interval is at least this share of the mean, where all episodes end alike."""
_NUMBERS = re.compile(r"\[\s+([^\[\]{}\"]*?)\s+\]")


class Evaluation(StrictModel):
    """What the policy of the file got on the CPU, on one thread."""

    episodes: int
    seed: int
    """Of the start states."""
    deterministic: bool
    returns: tuple[float, ...]
    """Of each episode, exactly."""
    mean: float
    std: float
    low: float
    high: float
    """Where the mean of another 100 episodes lies, on any machine; see `interval`."""
    processor: str
    """Its kind; see `rl_training.tools.zoo.processor_kind`."""
    versions: dict[str, str]
    """Of what computes the returns."""


class Card(StrictModel):
    """What is known of a policy."""

    name: str
    method: str
    task: str
    seed: int
    steps: int
    """Done when the policy was saved: the last checkpoint."""
    command: str
    """What trains it again; `config` is the file it names."""
    config: dict[str, Any]
    """Every setting, and the seeds that were trained side by side."""
    trained_with: dict[str, Any]
    """Versions, platform and date."""
    curve: tuple[tuple[int, float], ...]
    """Steps and mean returns of the run's own evaluations."""
    sha256: str
    """Of the policy's file."""
    size: int
    """Of the policy's file, in bytes."""
    numbers: Literal["float32", "float16"]
    """What the weights are stored as; the evaluation is of what the file holds."""
    evaluation: Evaluation | None


def interval(returns: Sequence[float]) -> tuple[float, float]:
    """Return where the mean of as many other episodes lies with 99.9%.

    Two means of n episodes differ by sqrt(2/n) standard deviations.
    """
    mean, std = statistics.fmean(returns), statistics.pstdev(returns)
    half = max(QUANTILE * std * math.sqrt(2 / len(returns)), LEAST_WIDTH * abs(mean))
    return mean - half, mean + half


def find_zoo(folder: Path | None) -> Path:
    """Return the folder of the zoo: the one that is named, `zoo` here, or the repository's.

    Raises:
        ConfigError: When there is none.
    """
    if folder is not None:
        if not folder.is_dir():
            raise ConfigError(f"--zoo {folder}: there is no such folder")
        return folder
    around = Path(__file__).resolve().parents[3]
    for place in (Path(FOLDER), around / FOLDER):
        if any(place.glob(f"*/{CARD_FILE}")):
            return place
    raise ConfigError(
        f"there is no folder {FOLDER} here: the zoo is part of the repository, not of the "
        "installed package; run this in a clone of it, or name the folder with --zoo FOLDER"
    )


def read_zoo(folder: Path, names: Sequence[str] = ()) -> list[Card]:
    """Return the cards of these names in the order of their names; all for none.

    Raises:
        ConfigError: When there is no such entry, or none at all.
        DataError: When a card cannot be read.
    """
    known = sorted(path.parent.name for path in folder.glob(f"*/{CARD_FILE}"))
    if not known:
        raise ConfigError(f"{folder} holds no policy: each is a folder with a {CARD_FILE}")
    for name in names:
        if name not in known:
            raise ConfigError(f"{folder} has no policy {name!r}{suggest(name, known)}")
    return [read_card(folder / name) for name in known if not names or name in names]


def read_card(entry: Path) -> Card:
    """Return the card of an entry.

    Raises:
        DataError: When it cannot be read, or is that of another entry.
    """
    path = entry / CARD_FILE
    try:
        card = Card.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{error.error_count()} mistakes"
        raise DataError(f"{path} is not a card of this version ({reason})") from None
    if card.name != entry.name:
        raise DataError(f"{path} is the card of {card.name}; a folder has the name of its policy")
    return card


def write_card(entry: Path, card: Card) -> None:
    """Write a card, a list of numbers on one line."""
    text = json.dumps(card.model_dump(mode="json"), indent=1)
    short = _NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text)
    with written_beside(entry / CARD_FILE) as part:
        part.write_text(f"{short}\n", encoding="utf-8")


def policy_file(folder: Path, card: Card) -> Path:
    """Return the policy of a card, once it is known to be the one that the card is of.

    Raises:
        DataError: When the file is missing or another one.
    """
    path = folder / card.name / POLICY_FILE
    if not is_plain(path):
        raise DataError(f"{path} is missing")
    if hashlib.sha256(path.read_bytes()).hexdigest() != card.sha256:
        raise DataError(f"{path} is not the file of its card: its SHA-256 is another")
    return path


def entry_name(method: str, task: str) -> str:
    """Return what an entry is called: `sac-halfcheetah`, `dqn-pong`."""
    return f"{method}-{short_task(task)}"


def short_task(task: str) -> str:
    """Return a task's name without family and version: `ALE/Pong-v5` is `pong`."""
    name = re.sub(r"-v\d+$", "", task.rpartition("/")[2])
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def readme_table(cards: Sequence[Card]) -> str:
    """Return the table of a zoo, in Markdown."""
    lines = [
        "| policy | task | steps | seed | mean of 100 episodes | deviation | size |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for card in cards:
        found = card.evaluation
        figures = ("not evaluated", "") if found is None else map(figure, (found.mean, found.std))
        cells = (f"[{card.name}]({card.name}/{README_FILE})", card.task, f"{card.steps:,}")
        size = f"{card.size / 1024:,.0f} KiB"
        lines.append(f"| {' | '.join((*cells, str(card.seed), *figures, size))} |")
    return "\n".join(lines)


def figure(value: float) -> str:
    """Write a return with as many decimals as it needs."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.2f}"


def processor() -> str:
    """Return the model of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def versions_differ(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Return what is of another version here, as sentences have it."""
    names = sorted({*ours, *theirs})
    return [
        f"{name} {ours.get(name, 'missing')} in place of {theirs.get(name, 'none')}"
        for name in names
        if ours.get(name) != theirs.get(name)
    ]
