"""Runs a guide as a reader would: its blocks in order, in one empty folder.

What a block is follows from the page:

- `python` blocks run one after another in one namespace, as the cells of a notebook.
- `bash` blocks run line by line.  `rl-training` and `python FILE` run in a fork of a warm process,
  as installed: the current folder is not on the path unless the line says `PYTHONPATH=.`.  Lines
  that set up a machine (`SETUP`) are left out.  A block with pipes, redirections, loops or other
  commands is given to bash as a whole.
- A block of any language after a line that ends with "`NAME.EXT`:" is written to that file instead.
- A `text` block that begins with `error: `, `SomeError: ` or `SpecMismatch: ` is the error of the
  block before it, which must end with exactly that sentence; `...` is any words, a line break is a
  space.
- `# exit code N` behind a command is the exit code that it must have.
- Blocks of every other language (`sh`, `text`, `yaml`, ...) are not run.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from unittest import mock

from helpers.tiny import Outcome, clean_environment
from helpers.warm import run_warm

SETUP = {"pip", "git", "make", "cd", ".", "source", "python3"}
"""First words of lines that make a machine ready, which a test must not do."""
TIMEOUT = 900.0
COMMAND = f"""#!{sys.executable}
import sys
from rl_training.cli import main
sys.exit(main())
"""
_BLOCK = re.compile(
    r"(?:^(?:[^\n]*\s)?`(?P<file>[\w./-]+\.\w+)`:\n\n)?^```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^```",
    re.DOTALL | re.MULTILINE,
)
_ERROR = re.compile(r"(?:error|(?:\w+\.)*(?:\w*Error|SpecMismatch)): ")
_PLAIN = re.compile(
    r"(?:[A-Z_]+=\S* )*(?:rl-training|python [\w./-]+\.py)\b[^|<>&;$`]*|export [A-Z_]+=\S*"
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    code: str
    file: str | None
    """Where its text is written instead of being run."""
    error: str | None
    """The sentence that it must fail with."""


def guide_blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page in order, each with the error shown right after it."""
    text = page.read_text(encoding="utf-8")
    matches = list(_BLOCK.finditer(text))
    return [
        Block(match["language"], match["code"], match["file"], _error(match, after))
        for match, after in zip_longest(matches, matches[1:])
    ]


def run_guide(page: Path, folder: Path, replace: Mapping[str, str] = {}) -> str:
    """Run a page's blocks in a folder and return everything they printed.

    Args:
        page: The guide.
        folder: An empty folder, where everything happens.
        replace: Texts of the code, each of which must be on the page, and what to run instead, for
            instance fewer steps.
    """
    blocks = guide_blocks(page)
    indented = re.search(r"^[ \t]+```(?:python|bash)\b", page.read_text("utf-8"), re.MULTILINE)
    assert indented is None, f"{page.name}: an indented block would not be run"
    everything = "".join(block.code for block in blocks)
    assert not (missing := [old for old in replace if old not in everything]), (page.name, missing)
    guide = _Guide(folder)
    with _in_folder(folder, guide.namespace), tempfile.TemporaryDirectory() as programs:
        command = Path(programs, "rl-training")
        command.write_text(COMMAND, encoding="utf-8")
        command.chmod(0o755)
        guide.command = command
        for block in blocks:
            code = block.code
            for old, new in replace.items():
                code = code.replace(old, new)
            guide.do(Block(block.language, code, block.file, block.error))
    return "".join(guide.printed)


@dataclass
class _Guide:
    folder: Path
    command: Path = Path("rl-training")
    printed: list[str] = field(default_factory=list)
    exported: dict[str, str] = field(default_factory=dict)
    namespace: ModuleType = field(default_factory=lambda: ModuleType("__main__"))

    def do(self, block: Block) -> None:
        """Write or run a block, or leave it out."""
        if block.file is not None:
            path = self.folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.code, encoding="utf-8")
        elif block.language == "python":
            self.run_python(block)
        elif block.language == "bash":
            self.run_bash(block)

    def run_python(self, block: Block) -> None:
        code = compile(block.code, "<guide>", "exec")
        said: str | None = None
        stream = io.StringIO()
        with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
            try:
                exec(code, vars(self.namespace))
            except Exception as error:
                if block.error is None:
                    raise
                said = f"{type(error).__name__}: {error}"
        self.printed.append(stream.getvalue())
        if block.error is not None:
            assert said is not None, f"no error\n{block.code}"
            assert _agree(block.error, said), f"{block.code}\nfails with {said}"

    def run_bash(self, block: Block) -> None:
        lines = [
            line
            for line in block.code.replace("\\\n", " ").splitlines()
            if line.strip() and not line.startswith("#") and line.split()[0] not in SETUP
        ]
        if all(_PLAIN.fullmatch(_words(line)) for line in lines):
            for number, line in enumerate(lines):
                last = number == len(lines) - 1
                self.run_line(line, block.error if last else None)
        else:
            self.check(block.code, self.bash(block.code), block.error)

    def run_line(self, line: str, error: str | None) -> None:
        words = shlex.split(line, comments=True)
        if words[0] == "export":
            name, value = words[1].split("=", 1)
            self.exported[name] = value
            return
        settings = dict(self.exported)
        while "=" in words[0]:
            name, value = words.pop(0).split("=", 1)
            settings[name] = value
        if "PYTHONPATH" in settings:
            inherited = os.environ.get("PYTHONPATH", "")
            given = (settings["PYTHONPATH"], inherited)
            settings["PYTHONPATH"] = os.pathsep.join(filter(None, given))
        arguments = [self.command, *words[1:]] if words[0] == "rl-training" else words[1:]
        with mock.patch.dict(os.environ, settings):
            done = run_warm(*arguments, cwd=self.folder, timeout=TIMEOUT)
        self.check(line, done, error)

    def bash(self, code: str) -> Outcome:
        environment = clean_environment() | self.exported
        places = (str(self.command.parent), str(Path(sys.executable).parent), environment["PATH"])
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", code],
            cwd=self.folder,
            env=environment | {"PATH": os.pathsep.join(places)},
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    def check(self, code: str, done: Outcome, error: str | None) -> None:
        self.printed += [done.out, done.err]
        stated = re.search(r"# exit code (\d+)", code)
        expected = int(stated[1]) if stated else 0 if error is None else 2
        assert done.code == expected, f"{code}\nexit code {done.code}\n{done.out}\n{done.err}"
        if error is not None:
            line = next((line for line in done.err.splitlines() if _ERROR.match(line)), "")
            assert _agree(error, line), f"{code}\nfails with {done.err}"


@contextlib.contextmanager
def _in_folder(folder: Path, namespace: ModuleType) -> Iterator[None]:
    """Be a notebook in a folder; what it imported from there is forgotten afterwards."""
    before = Path.cwd()
    modules = dict(sys.modules)
    with (
        mock.patch.dict(sys.modules, {"__main__": namespace}),
        mock.patch.object(sys, "path", [str(folder), *sys.path]),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)
            new = {name: sys.modules[name] for name in sys.modules if name not in modules}
    for name, module in new.items():
        # `mock` took back every import; what does not belong to the guide stays imported.
        if not str(getattr(module, "__file__", None) or "").startswith(str(folder)):
            sys.modules[name] = module


def _error(match: re.Match[str], after: re.Match[str] | None) -> str | None:
    """Return the error that the next block shows, if nothing but blank lines is between."""
    if after is None or after["language"] not in ("", "text") or match["language"] == "text":
        return None
    if match.string[match.end() : after.start()].strip():
        return None  # prose between them
    return after["code"] if _ERROR.match(after["code"]) else None


def _words(line: str) -> str:
    """Return a line without its comment and without what is quoted."""
    plain = re.sub(r"\"[^\"]*\"|'[^']*'", "_", line)
    return re.sub(r"\s+#.*", "", plain).strip()


def _agree(shown: str, said: str) -> bool:
    parts = map(re.escape, " ".join(shown.split()).split("..."))
    return re.fullmatch(".*".join(parts), " ".join(said.split())) is not None
