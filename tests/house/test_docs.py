"""The documentation says what is true: links, commands, presets, examples and generated tables."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
import yaml

from helpers.guides import guide_blocks
from rl_training.cli.commands import app
from rl_training.experiment.config import load_config
from rl_training.experiment.registry import algorithm_names, get_algorithm_spec
from rl_training.resources import preset_names

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NEW_ALGORITHM = "expected_sarsa"
"""Method of the worked example in CONTRIBUTING, which is not part of the package."""

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def shell_words(page: Path) -> list[list[str]]:
    """Return the words of every command in a page's bash blocks, one list per command."""
    commands: list[list[str]] = []
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            ends = [i for i, word in enumerate(words) if word in ("|", ">", "&&", ";")]
            for start, end in zip([0, *(i + 1 for i in ends)], [*ends, len(words)], strict=True):
                # `A=1 command`: settings of the shell come before the command.
                command = words[start:end]
                while command and re.fullmatch(r"[A-Z_]+=.*", command[0]):
                    command = command[1:]
                if command:
                    commands.append(command)
    return commands


def rl_training_arguments(page: Path) -> list[list[str]]:
    found = []
    for words in shell_words(page):
        if words[0] == "rl-training":
            found.append(words[1:])
        elif words[:3] == ["python", "-m", "rl_training"]:
            found.append(words[3:])
    return found


def parse_command(arguments: list[str]) -> dict[str, Any]:
    """Parse a command line as the program would, without running it."""
    while arguments[0] == "--plugin":  # an option of every command
        arguments = arguments[2:]
    group: Any = typer.main.get_command(app)
    context = group.make_context("rl-training", list(arguments))
    name, command, rest = group.resolve_command(context, list(arguments))
    parameters: dict[str, Any] = command.make_context(name, rest, parent=context).params
    return parameters


def slug(heading: str) -> str:
    """Return the anchor that a heading gets."""
    text = re.sub(r"[`*]", "", heading.strip().lower())
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def update_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("update_docs", ROOT / "scripts/update_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_parts_are_fresh(capsys: pytest.CaptureFixture[str]) -> None:
    assert update_docs().main(["--check"]) == 0, capsys.readouterr().out


def test_a_stale_part_is_found_and_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = update_docs()
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "README.md", tmp_path)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    page = tmp_path / "docs/algorithms/sac.md"
    fresh = page.read_text()
    page.write_text(fresh.replace("<!-- end generated -->", "| old |\n<!-- end generated -->", 1))
    assert module.main(["--check"]) == 1
    assert "docs/algorithms/sac.md" in capsys.readouterr().out
    assert module.main([]) == 0
    assert page.read_text() == fresh


def test_a_missing_page_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = update_docs()
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "README.md", tmp_path)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    page = tmp_path / "docs/algorithms/dqn.md"
    page.unlink()
    assert module.main(["--check"]) == 1
    assert module.main([]) == 0
    assert "`epsilon_start`" in page.read_text()


def test_a_new_page_has_every_section_and_a_start_of_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = update_docs()
    monkeypatch.setattr(module, "ROOT", tmp_path)
    text = module.rendered(tmp_path / "docs/algorithms/dqn.md")
    assert headings(text) == list(module.SECTIONS)
    assert "`ValueBased.step` in [`algorithms/value_based.py`]" in text
    assert "doi:10.1038/nature14236" in text.split("## Citation")[1]


def headings(text: str) -> list[str]:
    """Return the headings of the second level."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"^## (.*)$", outside, re.MULTILINE)


def missing_on(name: str) -> list[str]:
    """Return what the page of a method should have and has not."""
    module, text = update_docs(), (ROOT / f"docs/algorithms/{name}.md").read_text()
    if headings(text) != list(module.SECTIONS):
        return [f"{name}: sections {headings(text)}"]
    parts = dict(
        zip(module.SECTIONS, re.split(r"^## .*$", text, flags=re.MULTILINE)[1:], strict=True)
    )
    citation = re.findall(r"^```bibtex\n(.*?)^```", parts["Citation"], re.DOTALL | re.MULTILINE)
    entries = re.split(r"^@", "".join(citation), flags=re.MULTILINE)[1:]
    fields = ("title", "author", "year")
    sentences = re.split(r"(?<=[.!?])\s+(?=[A-Z\[$])", parts["Idea"].strip())
    checks = {
        "an idea in three sentences": len(sentences) == 3,
        "when to use it": "**Use it**" in parts["When to use it, and when not"],
        "when not to use it": "**Do not " in parts["When to use it, and when not"],
        "code beside the equations": "<!-- generated: code " in parts["What is implemented"],
        "deviations": parts["Deviations, and why"].strip(),
        "limits": parts["Limits"].strip(),
        "results": "<!-- generated: results -->" in parts["Results"],
        "the paper of its declaration": get_algorithm_spec(name).paper in parts["Citation"],
        "title, authors and year": entries
        and all(re.search(rf"^ +{f} += {{.+", e, re.MULTILINE) for e in entries for f in fields),
    }
    return [f"{name}: {what}" for what, is_there in checks.items() if not is_there]


def test_every_method_has_a_whole_page() -> None:
    # A method of another package, which a test may have imported, has no page here.
    own = [n for n in algorithm_names() if (ROOT / f"docs/algorithms/{n}.md").is_file()]
    assert [problem for name in own for problem in missing_on(name)] == []


def test_code_on_a_page_is_the_lines_of_the_function_without_its_docstring() -> None:
    text = update_docs()._code("algorithms.sac.SAC.target_entropy")
    assert text.startswith("`SAC.target_entropy` in [`algorithms/sac.py`](../../src/rl_training/")
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert code.splitlines()[:2] == ["@property", "def target_entropy(self) -> float | Tensor:"]
    assert "self.entropy_per_entry * self.model.action_dim" in code
    assert '"""' not in code


@every_page
def test_relative_links_resolve(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{target} is not there"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            assert anchor in map(slug, headings), f"{target} has no heading #{anchor}"


@every_page
def test_commands_parse_and_name_real_presets(page: Path) -> None:
    written = {block.file for block in guide_blocks(page)}
    for arguments in rl_training_arguments(page):
        if {"-h", "--help"} & set(arguments):
            continue
        try:
            parameters = parse_command(arguments)
        except Exception as error:
            pytest.fail(f"rl-training {' '.join(arguments)}: {error}")
        given = parameters.get("config") or ()
        for config in [given] if isinstance(given, str) else given:
            if not config.startswith(NEW_ALGORITHM) and config not in written:
                load_config(ROOT / config if config.endswith(".yaml") else config)


def test_the_command_check_can_fail() -> None:
    for wrong in (["trian"], ["train", "--confg", "x"], ["ope"], ["resume", "--checkpoint"]):
        with pytest.raises(Exception, match=r"\w"):
            parse_command(wrong)


@every_page
def test_presets_named_in_text_exist(page: Path) -> None:
    methods = "|".join(algorithm_names())
    named = re.findall(rf"`((?:{methods})/[a-z_]+)`", page.read_text())
    assert not set(named) - set(preset_names())


@every_page
def test_make_targets_and_scripts_exist(page: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = [
        *shell_words(page),
        *map(str.split, re.findall(r"`(make [a-z-]+)`", page.read_text())),
    ]
    for words in commands:
        if words[0] == "make":
            assert set(words[1:]) <= set(targets), words
        if words[0] == "python" and words[1].endswith(".py"):
            of_the_page = f"`{words[1]}`:\n\n```" in page.read_text()
            assert of_the_page or (ROOT / words[1]).is_file(), words


@every_page
def test_python_and_yaml_blocks_are_well_formed(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(block, str(page), "exec")
    for block in blocks(page, "yaml"):
        assert isinstance(yaml.safe_load(block), dict)


def run_python(code: str, folder: Path, source: Path = ROOT / "src") -> str:
    path = os.pathsep.join(filter(None, (str(source), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    return done.stdout


@pytest.fixture
def run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Runs code as a notebook in an empty folder would, in this process; returns its output."""

    def run(code: str) -> str:
        main = ModuleType("__main__")
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setitem(sys.modules, "__main__", main)
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()) as printed,
        ):
            warnings.simplefilter("ignore")
            exec(compile(code, "<notebook>", "exec"), vars(main))
        return printed.getvalue()

    return run


def test_readme_example_runs(tmp_path: Path, run_here: Callable[[str], str]) -> None:
    (code,) = blocks(ROOT / "README.md", "python")
    assert "learn(10_000)" in code
    short = code.replace("learn(10_000)", "learn(520)").replace("episodes=10", "episodes=1")
    printed = run_here(short).splitlines()
    assert printed[1] == printed[2], "a saved agent predicts what the agent did"
    assert (tmp_path / "pendulum.safetensors").is_file()


def test_examples_of_the_python_page_run_one_after_another(run_here: Callable[[str], str]) -> None:
    """As a notebook would: every block of the page in one process, with fewer steps."""
    code = "\n".join(blocks(ROOT / "docs/python.md", "python"))
    for steps in ("20_000", "10_000", "2_000", "1_000)", "1_500"):
        assert steps in code
    for steps, fewer in {
        "(20_000)": "(512)",
        "(10_000)": "(512)",
        "(2_000": "(200",
        "(1_000, progress": "(100, progress",
        "(1_500": "(150",
        "< 1_600": "< 180",
    }.items():
        code = code.replace(steps, fewer)
    assert "PPO(CartPole-v1, 512 steps" in run_here(code)


CALLBACKS_DID = """
import glob, json, os
assert os.path.isfile("best.safetensors")
assert len(glob.glob("runs/*/videos/step_*.gif")) >= 2
lines = [json.loads(line) for path in glob.glob("runs/sac*/metrics.jsonl") for line in open(path)]
logged = [line for line in lines if line["kind"] == "callback"]
assert logged and all(line["model_norm"] > 0 for line in logged)
assert result.stop_reason == "no gain in 4 evaluations"
assert len(study.trials) == 3
slow = DQN("CartPole-v1", eval_interval=50, eval_episodes=1)
slow.learn(100, progress=False, callbacks=SlowDown())
"""


@pytest.mark.matrix
def test_examples_of_the_callbacks_page_run_one_after_another(
    run_here: Callable[[str], str],
) -> None:
    pytest.importorskip("imageio")
    pytest.importorskip("optuna")
    code = "\n".join(blocks(ROOT / "docs/callbacks.md", "python"))
    for example in ("KeepBest", "VideoEvery", "WeightNorm", "StopWithoutGain", "PruneTrial"):
        assert f"callbacks={example}" in code or f"{example}(" in code
    # The target is out of reach in so few steps, so the run without gain must be what stops.
    run_here(code.replace("eval_interval=100", "eval_interval=20") + CALLBACKS_DID)


@pytest.mark.matrix
@pytest.mark.parametrize("page", ["from_sb3.md", "from_d3rlpy.md"])
def test_examples_for_people_who_come_from_elsewhere_run(
    page: str, run_here: Callable[[str], str]
) -> None:
    code = "\n".join(blocks(ROOT / "docs" / page, "python"))
    fewer = {
        "(10_000)": "(256)",
        "(600, p": "(240, p",
        "(500, p": "(150, p",
        "episodes=10)": "episodes=1)",
    }
    fewer |= {"(dataset, 200, p": "(dataset, 40, p", "learn(300, p": "learn(120, p"}
    for steps, few in fewer.items():
        code = code.replace(steps, few)
    run_here(code)


def test_environment_of_the_docs_trains(tmp_path: Path, run_here: Callable[[str], str]) -> None:
    page = ROOT / "docs/environments.md"
    (code,) = (block for block in blocks(page, "python") if "class Corridor" in block)
    (settings,) = blocks(page, "yaml")
    (tmp_path / "my_tasks.py").write_text(code)
    (tmp_path / "corridor.yaml").write_text(settings)
    run_here(
        "from rl_training.experiment.config import load_config\n"
        "from rl_training.runtime.checkpoints.verify import verify_resume\n"
        "report = verify_resume(load_config('corridor.yaml', ['total_timesteps=300']), 233)\n"
        "assert report.identical and report.resume_level == 'exact', report.lines()\n"
    )


def test_the_example_of_the_spaces_page_learns_and_predicts(
    tmp_path: Path, run_here: Callable[[str], str]
) -> None:
    task, use = blocks(ROOT / "docs/spaces.md", "python")
    (tmp_path / "my_rooms.py").write_text(task)
    assert "learn(3_000)" in use
    short = use.replace("learn(3_000)", "learn(520)").replace("episodes=20", "episodes=1")
    returned = float(run_here(short).splitlines()[-1])
    assert -0.17 < returned <= 0.99, "an episode costs 0.01 at each of at most 16 steps"


@pytest.mark.matrix
def test_worked_example_of_contributing_works_as_pasted_and_keeps_the_contract(
    tmp_path: Path,
) -> None:
    for folder in ("src", "docs", "examples", "scripts", "tests/contract", "tests/helpers"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for file in ("README.md", "tests/conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path / file)
    method, preset, maths = worked_example()
    (tmp_path / "src/rl_training/algorithms/expected_sarsa.py").write_text(method)
    presets = tmp_path / "src/rl_training/assets/configs/expected_sarsa"
    presets.mkdir()
    (presets / "cartpole.yaml").write_text(preset)
    (tmp_path / "tests/test_expected_sarsa_update.py").write_text(maths)
    printed = run_python(
        "import runpy, sys, pytest\n"
        "from rl_training import ExpectedSARSA\n"
        "from rl_training.experiment.config import load_config\n"
        "changes = {'total_timesteps': 1050, 'eval_episodes': 1, 'output_dir': 'runs'}\n"
        "config = load_config('expected_sarsa/cartpole', changes=changes)\n"
        "assert ExpectedSARSA(config).learn().metrics['gradient_steps'] == 50\n"
        "sys.argv = ['scripts/update_docs.py']\n"
        "try:\n    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as done:\n    assert not done.code\n"
        "options = ['-q', '-p', 'no:cacheprovider', '-k', 'expected_sarsa']\n"
        "sys.exit(pytest.main(options))\n",
        tmp_path,
        tmp_path / "src",
    )
    assert "[100%]" in printed


def worked_example() -> tuple[str, str, str]:
    """The files of CONTRIBUTING's example: the method, its preset, its test."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    pasted = re.findall(r"`([\w/.]+)`:\n\n```\w+\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    names = [Path(name).name for name, _ in pasted]
    assert names == ["expected_sarsa.py", "cartpole.yaml", "test_expected_sarsa_update.py"]
    method, preset, maths = (body for _, body in pasted)
    return method, preset, maths


@pytest.mark.matrix
def test_the_same_file_works_outside_the_package(tmp_path: Path) -> None:
    (tmp_path / "expected_sarsa.py").write_text(worked_example()[0])
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text[text.index("### Outside the package") : text.index("### In the package")]
    shell, python, _ = re.findall(r"^```\w+\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    commands = [line.split() for line in shell.splitlines()]
    assert [words[0] for words in commands] == ["rl-training"] * 3 + ["python"]
    for words in commands[:3]:
        code = f"import sys; sys.argv = {words!r}\nfrom rl_training.cli import main\nmain()"
        run_python(code, tmp_path)
    words = [*commands[3][2:], "-k", "metrics or round_trip"]
    run_suite = "runpy.run_module('rl_training.testing', run_name='__main__')"
    run_python(f"import runpy, sys; sys.argv = {words!r}\n{run_suite}", tmp_path)
    run_python(python + "\nassert ExpectedSARSA.__name__ == 'ExpectedSARSA'\n", tmp_path)
