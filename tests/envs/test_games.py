"""The rules of the built-in games, move by move."""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from typing import Any

import numpy as np
import pytest

from rl_training.envs import make_env
from rl_training.envs.snapshot import SnapshotWrapper
from rl_training.envs.tasks.games import LEFT, RIGHT, STAY, Breakout, Catch, CuedCatch
from rl_training.errors import ConfigError


def breakout(**state: object) -> Breakout:
    game = Breakout(sticky_actions=0.0)
    game.reset(seed=0)
    game.set_state(game.get_state() | state)
    return game


def test_cells_are_drawn_as_squares_of_pixels() -> None:
    small, large = Catch(), Catch(image_size=64)
    centres = (np.arange(10) * 64 + 32) // 10
    seen = [game.reset(seed=3)[0] for game in (small, large)]
    for step in range(9):
        assert seen[1].shape == large.observation_space.shape == (2, 64, 64)
        assert np.array_equal(seen[1][:, centres][:, :, centres], seen[0])
        assert np.isin(seen[1].astype(bool).sum((1, 2)), (36, 42, 49)).all()
        seen = [game.step(step % 3)[0] for game in (small, large)]
    other = Catch(image_size=64, size=6)
    other.reset(seed=0)
    ends = [other.step(STAY)[2] for _ in range(5)]
    assert ends == [False] * 4 + [True]
    with pytest.raises(ConfigError, match="image_size must be >= 10"):
        make_env("rl_training/Breakout-v0", {"image_size": 9})


def test_a_ball_falls_straight_and_is_caught_or_missed() -> None:
    for column, reward in ((5, 1.0), (0, -1.0)):
        game = Catch()
        game.reset(seed=0)
        game.set_state({"row": 0, "column": column, "paddle": 5, "last_action": STAY})
        rewards, ended = [], False
        while not ended:
            obs, given, ended, truncated, _ = game.step(STAY)
            assert not truncated
            assert obs[1, :, column].sum() == 255
            rewards.append(given)
        assert rewards == [0.0] * 8 + [reward]


def test_every_column_can_be_reached_in_time() -> None:
    for column in range(10):
        game = Catch()
        game.reset(seed=0)
        game.column = column
        ended, reward = False, 0.0
        while not ended:
            move = STAY if game.paddle == column else LEFT if column < game.paddle else RIGHT
            _, reward, ended, _, _ = game.step(move)
        assert reward == 1.0


def test_the_paddle_stays_on_the_grid() -> None:
    game = breakout(paddle=0)
    game.step(LEFT)
    assert game.paddle == 0
    game.step(RIGHT)
    assert game.paddle == 1


def test_a_brick_breaks_once_gives_one_and_sends_the_ball_back() -> None:
    game = breakout(ball=[4, 4], velocity=[-1, 1])
    obs, reward, ended, _, _ = game.step(STAY)
    assert (reward, ended) == (1.0, False)
    assert not game.bricks[3, 5]
    assert game.bricks.sum() == 29
    assert (game.ball, game.velocity) == ([4, 5], [1, 1])
    assert obs[2, 4, 4] == 255  # the trail
    assert obs[3].sum() == 29 * 255


def test_a_ball_that_has_just_broken_a_brick_passes_over_the_next() -> None:
    game = breakout(ball=[4, 4], velocity=[-1, 1], just_struck=True)
    _, reward, _, _, _ = game.step(STAY)
    assert reward == 0.0
    assert game.bricks.sum() == 30
    assert (game.ball, game.velocity) == ([3, 5], [-1, 1])


@pytest.mark.parametrize(
    ("ball", "velocity", "after", "then"),
    [
        ([5, 9], [1, 1], [6, 9], [1, -1]),  # right wall
        ([5, 0], [1, -1], [6, 0], [1, 1]),  # left wall
        ([0, 4], [-1, 1], [0, 5], [1, 1]),  # top
        ([5, 4], [1, 1], [6, 5], [1, 1]),  # nothing in the way
    ],
)
def test_walls_reflect(
    ball: list[int], velocity: list[int], after: list[int], then: list[int]
) -> None:
    game = breakout(ball=ball, velocity=velocity)
    game.step(STAY)
    assert (game.ball, game.velocity) == (after, then)


@pytest.mark.parametrize(
    ("paddle", "then", "lost"),
    [(4, [-1, 1], False), (5, [-1, -1], False), (7, [1, 1], True)],
)
def test_the_side_of_the_paddle_decides_where_the_ball_goes(
    paddle: int, then: list[int], lost: bool
) -> None:
    game = breakout(ball=[8, 4], velocity=[1, 1], paddle=paddle)
    _, reward, ended, _, _ = game.step(STAY)
    assert (reward, ended) == (0.0, lost)
    assert game.velocity == then
    assert game.ball == ([9, 5] if lost else [8, 5])


def test_bricks_come_back_when_the_last_is_gone_and_the_ball_comes_down() -> None:
    game = breakout(ball=[7, 3], velocity=[1, 1], paddle=4, bricks=np.zeros((10, 10), np.bool_))
    game.step(STAY)
    assert not game.bricks.any()
    game.step(STAY)
    assert game.bricks.sum() == 30


def test_the_ball_begins_at_either_wall_and_falls_inwards() -> None:
    starts = set()
    for seed in range(20):
        game = Breakout()
        game.reset(seed=seed)
        starts.add((*game.ball, *game.velocity))
    assert starts == {(3, 0, 1, 1), (3, 9, 1, -1)}


def test_actions_stick_as_often_as_they_are_said_to() -> None:
    game = Breakout(sticky_actions=0.25)
    game.reset(seed=0)
    repeated = 0
    for _ in range(4000):
        game.last_action = LEFT
        game._move_paddle(RIGHT)
        repeated += game.last_action == LEFT
    assert 0.22 < repeated / 4000 < 0.28


def cued(columns: list[int], wanted: int, hidden: str | None = None) -> CuedCatch:
    game = CuedCatch(hidden)
    game.reset(seed=0)
    game.set_state(game.get_state() | {"columns": columns, "wanted": wanted})
    return game


def test_both_balls_fall_straight_and_the_one_that_the_cue_names_counts() -> None:
    for wanted, reward in ((0, -1.0), (1, 1.0)):
        game = cued([8, 5], wanted)
        rewards: list[float] = []
        info: dict[str, Any] = {}
        ended = False
        while not ended:
            obs, given, ended, truncated, info = game.step(STAY)
            assert not truncated
            assert obs["image"].shape == (3, 10, 10)
            assert obs["image"][1, game.row, 8] == obs["image"][2, game.row, 5] == 255
            assert obs["image"].sum() == 3 * 255
            assert obs["cue"].tolist() == [float(wanted == 0), float(wanted == 1)]
            rewards.append(given)
        assert rewards == [0.0] * 8 + [reward]
        assert info == {"is_success": wanted == 1}


def test_the_cue_and_the_columns_are_drawn_uniformly_and_the_balls_never_fall_together() -> None:
    game, counts = CuedCatch(size=4), defaultdict[tuple[int, ...], int](int)
    for seed in range(2_400):
        game.reset(seed=seed)
        counts[(*game.columns, game.wanted)] += 1
    assert set(counts) == {(*c, w) for c in product(range(4), repeat=2) for w in (0, 1)} - {
        (column, column, wanted) for column in range(4) for wanted in (0, 1)
    }
    assert sum((count - 100) ** 2 / 100 for count in counts.values()) < 50  # 23 degrees of freedom


@pytest.mark.parametrize(("hidden", "best"), [(None, 1.0), ("cue", 0.0), ("image", -0.8)])
def test_the_best_return_without_a_part_is_what_the_task_says(
    hidden: str | None, best: float
) -> None:
    """By what can be known: where the paddle ends is a choice for each start that looks different.

    The balls fall straight and the paddle is where it was moved, so later observations add nothing,
    and every column can be reached in time.
    """
    starts = [(list(c), w) for c in product(range(10), repeat=2) if c[0] != c[1] for w in (0, 1)]
    paid: dict[bytes, np.ndarray[Any, Any]] = defaultdict(lambda: np.zeros(10))
    for columns, wanted in starts:
        obs = cued(columns, wanted, hidden)._obs()
        shown = obs["image"].tobytes() + obs["cue"].tobytes()
        for target in range(10):
            game = cued(columns, wanted, hidden)
            ended, reward = False, 0.0
            while not ended:
                move = STAY if game.paddle == target else LEFT if target < game.paddle else RIGHT
                obs, reward, ended, _, _ = game.step(move)
                if hidden is not None:
                    assert not obs[hidden].any()
            paid[shown][target] += reward
    assert sum(of_each.max() for of_each in paid.values()) / len(starts) == pytest.approx(best)


def test_a_part_that_is_hidden_keeps_its_place_and_mistakes_are_refused() -> None:
    spaces = {hidden: CuedCatch(hidden).observation_space for hidden in (None, "cue", "image")}
    assert spaces[None] == spaces["cue"] == spaces["image"]
    assert spaces[None].contains(CuedCatch("cue").reset(seed=0)[0])
    with pytest.raises(ConfigError, match=r"hidden must be image, cue or null, got 'ball'"):
        make_env("rl_training/CuedCatch-v0", {"hidden": "ball"})
    with pytest.raises(ConfigError, match=r"size must be a whole number >= 2, .*, got 1"):
        make_env("rl_training/CuedCatch-v0", {"size": 1})


@pytest.mark.parametrize("name", ["Catch", "CuedCatch", "Breakout"])
def test_a_game_goes_on_exactly_from_a_snapshot(name: str) -> None:
    def made() -> SnapshotWrapper:
        return SnapshotWrapper(make_env(f"rl_training/{name}-v0"))

    def play(game: SnapshotWrapper, key: int) -> list[bytes]:
        seen = []
        for action in np.random.default_rng(key).integers(0, 3, 60):
            obs, reward, ended, _, _ = game.step(int(action))
            seen.append(obs.tobytes() + repr((reward, ended)).encode())
            if ended:
                seen.append(game.reset()[0].tobytes())
        return seen

    first, second = made(), made()
    assert first.resume_level == "exact"
    first.reset(seed=3)
    play(first, 0)
    second.reset(seed=8)
    assert second.restore(first.snapshot()) is None
    assert play(first, 1) == play(second, 1)
