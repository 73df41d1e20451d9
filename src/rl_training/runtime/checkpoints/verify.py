"""Proof that a resumed run is the uninterrupted run, for any configuration."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from rl_training.errors import ConfigError
from rl_training.experiment.checkpoint.codec import Difference, compare_states, digest_state
from rl_training.experiment.checkpointing import load_checkpoint, read_manifest
from rl_training.experiment.config import TrainConfig
from rl_training.runtime.train import train
from rl_training.runtime.workflows import resume_training


@dataclass(frozen=True)
class ResumeReport:
    """Outcome of a comparison of two runs."""

    steps: int
    cut_at: int
    components: tuple[str, ...]
    differences: tuple[Difference, ...]
    digest: str
    resume_level: str

    @property
    def identical(self) -> bool:
        """Whether every bit of the two final states is the same."""
        return not self.differences

    def lines(self) -> list[str]:
        """Say it in words."""
        if self.identical:
            return [
                f"identical: {self.steps} steps at once, and {self.cut_at} + resume + "
                f"{self.steps - self.cut_at}, end in the same bits",
                f"compared: {', '.join(self.components)} (environments: {self.resume_level})",
                f"sha256={self.digest}",
            ]
        first = self.differences[0]
        return [
            f"DIFFERENT: {len(self.differences)} tensors or values differ after resuming at step "
            f"{self.cut_at}",
            f"first: {first.path}: {first.kind}, {first.detail}",
            f"environments resume at level: {self.resume_level}",
        ]


def verify_resume(config: TrainConfig, at: int) -> ResumeReport:
    """Train at once, and with a cut at step `at` and a resume, and compare the final states.

    Raises:
        ConfigError: When `at` is not inside the run.
    """
    if not 0 < at < config.total_timesteps:
        raise ConfigError(f"--at must be between 1 and {config.total_timesteps - 1}, got {at}")
    with tempfile.TemporaryDirectory() as folder:
        base = config.replace(output_dir=folder, tensorboard=False, trackers=())
        whole = train(base.replace(run_name="whole"))
        # The number of threads may be chosen by the load of the machine, which changes meanwhile.
        first = (whole.per_seed or (whole,))[0]
        threads = read_manifest(first.checkpoint_path).header["threads"]
        cut = train(base.replace(run_name="cut", threads=threads), stop_at=at)
        resumed = resume_training(cut.run_dir)
        pairs = zip(whole.per_seed or (whole,), resumed.per_seed or (resumed,), strict=True)
        reports = [_compare(w.checkpoint_path, r.checkpoint_path) for w, r in pairs]
    differences = [difference for report in reports for difference in report[0]]
    return ResumeReport(
        config.total_timesteps,
        int(cut.metrics["global_step"]),
        reports[0][1],
        tuple(differences),
        reports[0][2],
        reports[0][3],
    )


def _compare(left: Path, right: Path) -> tuple[list[Difference], tuple[str, ...], str, str]:
    a, b = load_checkpoint(left), load_checkpoint(right)
    names = sorted(table.name for table in a.manifest.segments)
    trees = [
        {**c.states, **{f"{n} rows": [dict(r) for _, r in c.read_segments(n)] for n in names}}
        for c in (a, b)
    ]
    return (
        compare_states(*trees),
        tuple(sorted(trees[0])),
        digest_state(trees[0]),
        str(a.header["resume_level"]),
    )
