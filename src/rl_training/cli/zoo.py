"""`rl-training zoo`: trained policies of the repository, evaluated in a minute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from rl_training.cli.options import whole_option

if TYPE_CHECKING:
    from rl_training.experiment.zoo import Card

app = typer.Typer(
    name="zoo",
    help="Trained policies of this repository: list, evaluate, record, verify, add.",
    no_args_is_help=True,
)
out = Console(soft_wrap=True, emoji=False)
err = Console(stderr=True, emoji=False)

ZooOption = Annotated[
    Path | None,
    typer.Option(
        "--zoo",
        help="Folder of the zoo; zoo/ here or of the repository if not given.",
        metavar="PATH",
    ),
]
NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the policy: sac-pendulum.")
]
NamesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME]...", help="Names of policies; all by default.", show_default=False
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
EpisodesOption = Annotated[int, whole_option(help="Number of episodes.", min=1)]
SeedOption = Annotated[int | None, whole_option(help="Seed of the start states.", min=0)]


@app.command("list")
def list_command(zoo: ZooOption = None, as_json: JsonOption = False) -> None:
    """List the policies, with what their cards say."""
    from rl_training.cli.tables import print_rows
    from rl_training.experiment.zoo import figure, find_zoo, read_zoo

    cards = read_zoo(find_zoo(zoo))
    if as_json:
        out.print_json(json.dumps([card.model_dump(mode="json") for card in cards]))
        return
    rows = []
    for card in cards:
        found = card.evaluation
        reached = (
            "not evaluated" if found is None else f"{figure(found.mean)} ± {figure(found.std)}"
        )
        size = f"{card.size / 1024:,.0f} KiB"
        rows.append((card.name, card.task, f"{card.steps:,}", str(card.seed), reached, size))
    columns = ("policy", "task", "steps", "seed", "return", "size")
    print_rows(out, columns, rows, numbers=("steps", "seed", "return", "size"))
    out.print(
        f"\n{sum(card.size for card in cards) / 2**20:.1f} MiB together. rl-training zoo eval NAME "
        "evaluates one here.",
        highlight=False,
    )


@app.command("eval")
def evaluate(
    name: NameArgument,
    zoo: ZooOption = None,
    episodes: EpisodesOption = 100,
    seed: SeedOption = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a policy on the CPU, from the card's start states or others."""
    from rl_training.experiment.zoo import EPISODE_SEED, find_zoo, policy_file, read_zoo

    folder = find_zoo(zoo)
    card = read_zoo(folder, [name])[0]
    from rl_training.tools.zoo import evaluated

    path = policy_file(folder, card)
    result = evaluated(path, episodes, seed=EPISODE_SEED if seed is None else seed)
    if as_json:
        out.print_json(json.dumps(result.model_dump(mode="json")))
        return
    lines = [
        f"policy={card.name}",
        f"return_mean={result.mean:.4f}",
        f"return_std={result.std:.4f}",
        f"episodes={result.episodes}",
    ]
    if card.evaluation is not None:
        lines.append(f"card_mean={card.evaluation.mean:.4f}")
    for line in lines:
        out.print(line, markup=False, highlight=False)


@app.command("record")
def record(
    name: NameArgument,
    zoo: ZooOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="mp4, webm or gif; NAME.mp4 if not given.")
    ] = None,
    episodes: EpisodesOption = 1,
    seed: SeedOption = None,
) -> None:
    """Make a video of a policy."""
    from rl_training.experiment.zoo import find_zoo, policy_file, read_zoo

    folder = find_zoo(zoo)
    path = policy_file(folder, read_zoo(folder, [name])[0])
    from rl_training.runtime.workflows import load_agent
    from rl_training.tools.video import record_agent

    target = output or Path(f"{name}.mp4")
    shown = record_agent(load_agent(path, device="cpu"), target, episodes=episodes, seed=seed)
    for index, value in enumerate(shown.returns):
        out.print(f"episode={index} return={value:.2f}", highlight=False)
    out.print(f"video={shown.path}", markup=False, highlight=False)


@app.command("verify")
def verify(names: NamesArgument = None, zoo: ZooOption = None, as_json: JsonOption = False) -> None:
    """Evaluate policies again and compare them with their cards; exit code 1 if one fails."""
    from rl_training.experiment.zoo import find_zoo, read_zoo

    folder = find_zoo(zoo)
    cards = read_zoo(folder, names or ())
    from rl_training.tools.zoo import STATES, Verdict
    from rl_training.tools.zoo import verify as verify_card

    verdicts: list[Verdict] = []
    for card in cards:
        verdict = verify_card(folder, card)
        verdicts.append(verdict)
        if not as_json:
            text = f"{verdict.state:<9} {card.name}: {verdict.reason}"
            out.print(text, markup=False, highlight=False)
    if as_json:
        facts = [
            {"name": v.card.name, "state": v.state, "reason": v.reason, "mean": v.mean}
            for v in verdicts
        ]
        out.print_json(json.dumps(facts))
    else:
        counts = [(sum(v.state == state for v in verdicts), state) for state in STATES]
        out.print(", ".join(f"{count} {state}" for count, state in counts if count))
    if any(verdict.failed for verdict in verdicts):
        raise typer.Exit(1)


@app.command("add")
def add(
    source: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="Folder of a finished run, or an entry of another zoo."),
    ],
    zoo: ZooOption = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the policy; method and task by default.")
    ] = None,
    episodes: Annotated[
        int, whole_option(help="Episodes of the evaluation; 0 leaves it for a later add.", min=0)
    ] = 100,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace a policy of that name.")
    ] = False,
) -> None:
    """Put a run's last checkpoint into the zoo, evaluated on the CPU."""
    from rl_training.experiment.zoo import FOLDER, read_zoo
    from rl_training.tools.zoo import add_entry, renew_readme

    folder = Path(FOLDER) if zoo is None else zoo
    card = add_entry(source, folder, name=name, episodes=episodes, replace=replace)
    renew_readme(folder, read_zoo(folder))
    _print_added(folder, card)


def _print_added(folder: Path, card: Card) -> None:
    lines = [f"policy={folder / card.name}", f"size={card.size}"]
    if card.evaluation is not None:
        lines.append(f"return_mean={card.evaluation.mean:.4f}")
    for line in lines:
        out.print(line, markup=False, highlight=False)
