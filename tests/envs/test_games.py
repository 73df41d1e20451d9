"""The rules of the built-in games, move by move."""

from __future__ import annotations

import numpy as np
import pytest

from rl_training.envs import make_env
from rl_training.envs.snapshot import SnapshotWrapper
from rl_training.envs.tasks.games import LEFT, RIGHT, STAY, Breakout, Catch
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


@pytest.mark.parametrize("name", ["Catch", "Breakout"])
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
