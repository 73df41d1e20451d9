"""The contract suite's part of pytest: its fixtures, and which tests run by default.

A test marked `expensive` goes through whole runs or compilations of each algorithm.  By default it
runs for the algorithms of `COVERING` alone, which take every way through the loops, or for those of
its `only`; for the others it is marked `matrix`, which `make test-all` runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from rl_training.experiment.registry import algorithm_names
from rl_training.testing.contract import names_under_test

COVERING = ("dqn", "ppo", "sac", "td3_bc")
"""Off-policy, on-policy and offline; discrete and continuous; priorities, images and delays."""
MARKS = (
    "slow: learns something, or repeats many times; minutes",
    "gpu: needs an accelerator",
    "expensive(only): whole runs of each algorithm; by default four of them, or those of `only`",
    "matrix: an expensive test of another algorithm; `make test-all` runs it",
)


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marks."""
    for mark in MARKS:
        config.addinivalue_line("markers", mark)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Mark expensive tests of algorithms that are not among the covering ones."""
    if names_under_test() != algorithm_names():
        return  # a plug-in is tested in full
    for item in items:
        mark = item.get_closest_marker("expensive")
        if mark is not None and _algorithm(item) not in (None, *mark.kwargs.get("only", COVERING)):
            item.add_marker("matrix")


def _algorithm(item: pytest.Item) -> str | None:
    """Return the algorithm that a test is about; None where it is about none."""
    values: dict[str, object] = getattr(getattr(item, "callspec", None), "params", {})
    return next((str(value) for value in values.values() if value in algorithm_names()), None)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep compiled programs and measured choices of the tests out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RL_TRAINING_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(params=names_under_test())
def algo(request: pytest.FixtureRequest) -> str:
    """The name of each algorithm in turn."""
    name: str = request.param
    return name
