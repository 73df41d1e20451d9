"""Sweeps on Ray's own test cluster, with a node killed in the middle."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny import learner_digest, run_cli, tiny_config, write_tiny
from rl_training.errors import MissingExtraError, RLTrainingError
from rl_training.experiment.checkpointing import list_checkpoints
from rl_training.sweeps.jobs import Job, do_job, make_job, write_jobs
from rl_training.sweeps.ray_runner import RayRunner
from rl_training.sweeps.runners import RayOptions, closing, do_all

ray = pytest.importorskip("ray", reason="the extra ray is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head that does no work, and two machines of one CPU each."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2] / "src"))
    quick = {"health_check_period_ms": 500, "health_check_failure_threshold": 4}
    made: Any = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "object_store_memory": 100 * 2**20,
            "include_dashboard": False,
            "_system_config": quick,
        },
    )
    made.workers = [made.add_node(num_cpus=1, object_store_memory=100 * 2**20) for _ in range(2)]
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


def jobs_in(folder: Path, steps: int) -> list[Job]:
    jobs = [
        make_job(
            tiny_config("sac", folder, seed=seed, total_timesteps=steps, checkpoint_interval=200),
            folder,
            f"seed_{seed}_run",
        )
        for seed in range(3)
    ]
    write_jobs(jobs)
    return jobs


@pytest.mark.slow
def test_a_sweep_loses_nothing_when_a_node_is_killed(cluster: Any, tmp_path: Path) -> None:
    undisturbed, jobs = (jobs_in(tmp_path / name, 4000) for name in ("a", "b"))
    killed: list[str] = []

    class Killing(RayRunner):
        """Kills a machine as soon as two runs have a checkpoint."""

        def ended(self) -> Any:
            under_way = [
                job.name for job in jobs if list_checkpoints(job.folder) and not job.outcome()
            ]
            if not killed and len(under_way) == 2:
                killed.extend(under_way)
                cluster.remove_node(cluster.workers[0], allow_graceful=False)
            return super().ended()

    with closing(Killing(RayOptions(cpus=1))) as runner:
        outcomes = do_all(jobs, runner)
    assert len(killed) == 2, "the node was killed while two runs were under way"
    assert {outcome.state for outcome in outcomes.values()} == {"done"}
    for expected, job in zip(undisturbed, jobs, strict=True):
        assert do_job(expected.file).metrics == outcomes[job.name].metrics
        assert learner_digest(expected.folder) == learner_digest(job.folder)


@pytest.mark.slow
def test_a_sweep_runs_on_a_cluster_begun_here(tmp_path: Path) -> None:
    config = write_tiny(tmp_path)
    options = ["sweep", "-c", config, "--seeds", "0,1", "-o", tmp_path / "sweep"]
    done = run_cli(*options, "--runner", "ray", "--cpus", 0.5)
    assert done.code == 0, done.err
    assert done.err.count("done tiny-seed_") == 2
    assert not ray.is_initialized()


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"pip install .*\[ray\]"):
        RayRunner(RayOptions())


@pytest.mark.slow
def test_an_address_without_a_cluster_is_one_sentence() -> None:
    with pytest.raises(RLTrainingError, match="no Ray cluster answers at"):
        RayRunner(RayOptions(address="auto"))
