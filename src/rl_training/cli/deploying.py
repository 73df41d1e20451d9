"""`export`, `predict` and `push`: a checkpoint used by other programs and other people."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.console import Console

from rl_training.cli.options import CheckpointOption, RunArgument, chosen_run, whole_option
from rl_training.cli.showing import BestOption, warn

if TYPE_CHECKING:
    from rl_training.runtime.workflows import LoadedAgent

out = Console(soft_wrap=True, emoji=False)
BATCH = 1024
"""Observations of a file that are acted on at once."""


def export(
    run: RunArgument = None,
    checkpoint: CheckpointOption = None,
    format_: Annotated[str, typer.Option("--format", help="onnx or torch.")] = "onnx",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File; policy.onnx or policy.pt2 here.")
    ] = None,
    best: BestOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Export the policy as ONNX or a PyTorch program, compared with the original."""
    from rl_training.runtime.workflows import load_agent
    from rl_training.tools.export import FORMATS, describe, export_agent

    path = chosen_run("export", run, checkpoint)
    agent = load_agent(path, device="cpu", best=best, warn=warn)
    target = output or Path(f"policy{FORMATS.get(format_, '')}")
    made = export_agent(agent, target, format_)
    facts = {"exported": str(made.path), "format": made.format, "checked": made.checked}
    facts |= {"largest_difference": made.largest_difference}
    if as_json:
        out.print_json(json.dumps(facts | {"policy": describe(agent)}))
        return
    for name, value in facts.items():
        out.print(f"{name}={value}", markup=False, highlight=False)


def push(
    run: RunArgument = None,
    checkpoint: CheckpointOption = None,
    repo: Annotated[
        str | None, typer.Option("--repo", "-r", help="Repository, as user/name.", metavar="NAME")
    ] = None,
    best: BestOption = False,
    episodes: Annotated[
        int, whole_option(help="Episodes of the evaluation on the card; 0 for none.", min=0)
    ] = 20,
    private: Annotated[
        bool, typer.Option("--private", help="Make the repository private.")
    ] = False,
    folder: Annotated[
        Path | None, typer.Option(help="Write the files here and upload nothing.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Put an agent on the Hugging Face Hub, with a model card."""
    from rl_training.errors import ConfigError
    from rl_training.runtime.workflows import load_agent
    from rl_training.tools.hub import push_agent

    path = chosen_run("push", run, checkpoint)
    if repo is None:
        raise ConfigError(f"push needs a repository: rl-training push {path} --repo user/name")
    agent = load_agent(path, best=best, warn=warn)
    done = push_agent(agent, repo, run=path, episodes=episodes, private=private, folder=folder)
    facts: dict[str, Any] = {"repository": done.repo, "files": list(done.files)}
    facts |= {"folder": str(folder)} if done.url is None else {"url": done.url, "load": done.name}
    if done.result is not None:
        facts["eval_return_mean"] = done.result.metrics["eval_return_mean"]
    if as_json:
        out.print_json(json.dumps(facts))
        return
    for name, value in facts.items():
        shown = ",".join(value) if isinstance(value, list) else value
        out.print(f"{name}={shown}", markup=False, highlight=False)


def predict(
    run: RunArgument = None,
    checkpoint: CheckpointOption = None,
    obs: Annotated[
        str | None, typer.Option(help="Observation as JSON, such as [0.1, 0.2]; - reads stdin.")
    ] = None,
    input_: Annotated[
        str | None,
        typer.Option(
            "--input",
            "-i",
            help="Many observations: a .npy file, or JSON lines in a file or, with -, from stdin, "
            "where each line is answered at once.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Where to write the actions of --input: .npy or JSON lines."
        ),
    ] = None,
    best: BestOption = False,
    stochastic: Annotated[bool, typer.Option("--stochastic", help="Sample the action.")] = False,
) -> None:
    """Choose an action for an observation, or for each of many."""
    from rl_training.errors import ConfigError
    from rl_training.runtime.workflows import load_agent

    path = chosen_run("predict", run, checkpoint)
    if (obs is None) == (input_ is None):
        raise ConfigError("predict needs either --obs (one observation) or --input (many)")
    if output is not None and input_ is None:
        raise ConfigError("--output belongs to --input; the action of --obs is printed")
    agent = load_agent(path, best=best, warn=warn)
    if obs is not None:
        values = _parsed(_stdin_text() if obs == "-" else obs, "--obs")
        action = agent.predict(values, deterministic=not stochastic)
        out.print(json.dumps(action.tolist()), highlight=False)
    else:
        _predict_many(agent, str(input_), output, deterministic=not stochastic)


@contextmanager
def _stdin() -> Iterator[TextIO]:
    from rl_training.errors import DataError

    if sys.stdin is None:  # the caller has closed it
        raise DataError("stdin is closed; give the observations themselves, or a file")
    try:
        yield sys.stdin
    except UnicodeDecodeError:
        raise DataError("stdin is not UTF-8 text; give observations as JSON") from None


def _stdin_text() -> str:
    with _stdin() as stdin:
        return stdin.read()


def _parsed(text: str, where: str) -> Any:
    from rl_training.errors import DataError

    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not JSON ({error.msg} at character {error.pos})") from None
    except (RecursionError, ValueError):  # Python has bounds on depth and on digits
        raise DataError(f"{where} is nested too deeply, or a number in it is too long") from None


def _predict_many(
    agent: LoadedAgent, source: str, output: Path | None, *, deterministic: bool
) -> None:
    import numpy as np

    from rl_training.errors import DataError
    from rl_training.output_files import written_beside

    batches = _batches(source)
    actions = (agent.predict(batch, deterministic=deterministic) for batch in batches)
    try:
        if output is not None and output.suffix == ".npy":
            np.save(output, np.concatenate([np.atleast_1d(part) for part in actions]))
            return
        with ExitStack() as stack:
            target: Any = sys.stdout
            if output is not None:
                # Answers to stdin are there at once; those to a file are there whole or not at all.
                at_once = source == "-" or (output.exists() and not output.is_file())
                place = output if at_once else stack.enter_context(written_beside(output))
                target = stack.enter_context(place.open("w", encoding="utf-8"))
            for part in actions:
                rows = [part] if source == "-" else part
                for row in rows:
                    target.write(json.dumps(row.tolist()) + "\n")
                target.flush()
    except OSError as error:
        raise DataError(f"{output or 'stdout'} cannot be written ({error.strerror})") from None


def _batches(source: str) -> Iterator[Any]:
    """Return observations: every line of stdin by itself, those of a file many at once."""
    if source == "-":
        with _stdin() as stdin:
            for number, line in enumerate(stdin, 1):
                if line.strip():
                    yield _parsed(line, f"line {number} of stdin")
        return
    rows = _file_rows(Path(source))
    for start in range(0, len(rows), BATCH):
        yield rows[start : start + BATCH]


def _file_rows(path: Path) -> Any:
    import numpy as np

    from rl_training.errors import DataError

    try:
        if path.suffix == ".npy":
            rows = np.load(path, allow_pickle=False)
        else:
            lines = path.read_text(encoding="utf-8").splitlines()
            rows = [
                _parsed(line, f"{path}:{number}")
                for number, line in enumerate(lines, 1)
                if line.strip()
            ]
    except OSError as error:
        raise DataError(f"--input {path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"--input {path} holds no observations ({error})") from None
    if len(rows) == 0:
        raise DataError(f"--input {path} holds no observation; give one per line or row")
    return rows
