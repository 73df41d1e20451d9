"""Fixtures of the contract suite, as a plug-in of pytest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rl_training.testing.contract import names_under_test


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
