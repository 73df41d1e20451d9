"""Atari games on ALE's vector interface: every emulator in a thread of its own.

`ale_py.AtariVectorEnv` steps all its games or none, restarts a whole game after a lost life and
cannot save an emulator. So each lane here has such an interface to itself, told to do nothing but
hold an action: frames, the larger of the last two screens, and the resize. Actions are sent to all
lanes before any answer is awaited. Lives, FIRE, idle starts, limits and frame stacks are ours, as
in `rl_training.envs.atari`, which `tests/envs/test_atari_vector.py` compares frame by frame.

Deviations from that module, because of which `vector_mode: auto` does not choose this backend and
its snapshots have a `kind` of their own:

- a resized pixel may differ by one grey level: both average areas, and round a half differently;
- the observation in which a game ends shows the screen before the end, which is all the interface
  gives; the transition is terminal, so no value is bootstrapped from it;
- a game begins with idle holds of `frame_skip` frames (at most `noop_max` frames in all) and FIRE
  is held as long; `AtariFrames` counts single frames.

A snapshot holds what every lane was sent since its game began. Without sticky actions a game is
determined by that; with them, every game seeds its emulator from the lane's generator.

Shapes: S seeds, n environments per seed, L = S * n lanes, K stacked frames of H x H pixels.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np

from rl_training.envs.atari import FIRE, NOOP, AtariOptions, emulator_kwargs
from rl_training.envs.factory import class_name, register_atari
from rl_training.envs.options import wrapper_options
from rl_training.envs.plain import State, encode, generator_from
from rl_training.envs.snapshot import MAX_REPLAY_ACTIONS, ResumeLevel, weakest_level
from rl_training.envs.spec import Array

ATARI_CLASS = "ale_py.env:AtariEnv"
_POSSIBLE = frozenset(
    {
        "wrappers",
        "max_episode_steps",
        "repeat_action_probability",
        "full_action_space",
        "max_num_frames_per_episode",
    }
)
_NEVER = 2**31 - 2  # a limit that no episode reaches; the interface adds one to it
_NO_SEED = [-1]
_FULL_STRENGTH = [1.0]


def why_no_atari_vector(env_id: str, env_kwargs: Mapping[str, Any]) -> str | None:
    """Why a game cannot run here with such keywords; None if it can."""
    if wrapper_options(env_id, env_kwargs.get("wrappers")).atari is None:
        return "env_kwargs.wrappers.atari is not set, and its preprocessing is built in there"
    register_atari(env_id)
    name = class_name(env_id)
    if name != ATARI_CLASS or gym.registry[env_id].additional_wrappers:
        wrapped = "a wrapped " if name == ATARI_CLASS else ""
        return f"only ale_py's own class runs there, and this id stands for {wrapped}{name}"
    impossible = [
        key for key, value in env_kwargs.items() if key not in _POSSIBLE and value is not None
    ]
    if impossible:
        names = " and ".join(f"env_kwargs.{key}" for key in impossible)
        return f"{names} cannot be had there; of the game's own keywords, it takes " + ", ".join(
            sorted(_POSSIBLE - {"wrappers", "max_episode_steps"})
        )
    ale_py = importlib.import_module("ale_py")
    if not hasattr(ale_py, "ALEVectorInterface"):
        return f"ale-py {ale_py.__version__} has no vector interface; install 0.11 or newer"
    return None


class AtariVector:
    """Games that never restart by themselves; `renew` takes a mask.

    Args:
        env_id: A game for which `why_no_atari_vector` knows no reason.
        env_kwargs: See `make_env`.
        seeds: The S seeds, for messages.
        num_envs: n, how many for each seed.
        threads: Emulators that work at the same time; 0 lets all of them.
    """

    kind: ClassVar[str] = "atari_vector"

    def __init__(
        self,
        env_id: str,
        env_kwargs: Mapping[str, Any],
        seeds: Sequence[int],
        num_envs: int,
        threads: int = 0,
    ) -> None:
        options = wrapper_options(env_id, env_kwargs.get("wrappers")).atari
        assert options is not None
        self._env_id, self._seeds, self._options = env_id, tuple(seeds), options
        self._shape = (len(seeds), num_envs)
        count = len(seeds) * num_envs
        self._all = list(range(count))
        self.threads = min(count, threads or count)
        keywords = gym.registry[env_id].kwargs | emulator_kwargs(options) | dict(env_kwargs)
        self._lanes = [_interface(keywords, options) for _ in range(count)]
        meanings = [action.name for action in self._lanes[0].get_action_set()]
        self._num_actions = len(meanings)
        self._fires = options.fire_reset and meanings[FIRE] == "FIRE"
        self._sticky = float(keywords["repeat_action_probability"]) > 0.0
        self._max_frames = int(keywords.get("max_num_frames_per_episode") or _NEVER)
        self._max_steps = int(env_kwargs.get("max_episode_steps") or _NEVER)
        size = options.screen_size
        self._frames = [np.zeros((count, size, size), np.uint8) for _ in range(options.frame_stack)]
        self._rewards = np.zeros(count, np.float32)
        self._over = np.ones(count, np.bool_)
        """Whether the game of a lane has ended, and not only a life."""
        self._lives = np.zeros(count, np.int64)
        self._frame_numbers = np.zeros(count, np.int64)
        self._steps = np.zeros(count, np.int64)
        self._generators: list[np.random.Generator] = []
        self._game_seeds = [-1] * count
        self._sent = [bytearray() for _ in range(count)]
        """The actions held since a lane's game began, ours included."""
        self._traces = [0] * count
        """A checksum of all frames since then: one frame alone may be that of another game."""

    @property
    def note(self) -> str:
        """How the environments run."""
        threads = "one thread" if self.threads == 1 else f"{self.threads} threads"
        return f"native: all at once on {threads} of ALE's vector interface"

    @property
    def resume_level(self) -> ResumeLevel:
        """Games are played again, unless one is too long for that."""
        return weakest_level(self._level(lane) for lane in self._all)

    def _level(self, lane: int) -> ResumeLevel:
        return "restart" if len(self._sent[lane]) > MAX_REPLAY_ACTIONS else "replay"

    def _hold(self, lanes: Sequence[int], actions: Sequence[int]) -> Array:
        """Hold an action in each of some lanes; newest frames and rewards [len(lanes)] change."""
        newest, window = self._frames[-1], self.threads
        rewards = np.zeros(len(lanes), np.float32)
        for lane, action in zip(lanes[:window], actions[:window], strict=True):
            self._lanes[lane].send([action], _FULL_STRENGTH)
        for place, lane in enumerate(lanes):
            frames, reward, over, _, info = self._lanes[lane].recv()
            if place + window < len(lanes):
                following = self._lanes[lanes[place + window]]
                following.send([actions[place + window]], _FULL_STRENGTH)
            newest[lane] = frames[0, 0]
            rewards[place] = reward[0]
            self._over[lane] = over[0]
            self._lives[lane] = info["lives"][0]
            self._frame_numbers[lane] = info["episode_frame_number"][0]
            self._sent[lane].append(actions[place])
            self._traces[lane] = zlib.crc32(frames, self._traces[lane])
        return rewards

    def observations(self) -> Array:
        """The current observations, [S, n, K, H, H]."""
        stacked = np.stack(self._frames, axis=1)
        return stacked.reshape(*self._shape, *stacked.shape[1:])

    def reset(self, seeds: Sequence[int] | None) -> Array:
        """Begin new games everywhere, with new generators if there are seeds, S * n of them."""
        if seeds is not None:
            self._generators = [np.random.default_rng(seed) for seed in seeds]
        self._begin_games(self._all)
        return self.observations()

    def renew(self, ended: Array, obs: Array) -> Array:  # noqa: ARG002
        """Begin new episodes where `ended`, [S, n]: a game, or the next life by an idle step."""
        lanes = ended.ravel().nonzero()[0].tolist()
        alive = [lane for lane in lanes if not self._over[lane] and not self._is_cut_off(lane)]
        if alive:
            self._step_lanes(alive, [NOOP] * len(alive))
        self._begin_games([lane for lane in lanes if self._over[lane] or self._is_cut_off(lane)])
        self._fill_stacks(lanes)
        return self.observations()

    def _fill_stacks(self, lanes: Sequence[int]) -> None:
        for frame in self._frames[:-1]:
            frame[lanes] = self._frames[-1][lanes]

    def _is_cut_off(self, lane: int) -> bool:
        return bool(
            self._steps[lane] >= self._max_steps or self._frame_numbers[lane] >= self._max_frames
        )

    def _begin_games(self, lanes: Sequence[int]) -> None:
        """Begin games with idle holds, and with FIRE where a game waits for it."""
        idle = {}
        for lane in lanes:
            generator = self._generators[lane]
            seed = int(generator.integers(2**31)) if self._sticky else -1
            most = self._options.noop_max // self._options.frame_skip
            idle[lane] = int(generator.integers(most + 1))
            self._start(lane, seed)
        for past in range(max(idle.values(), default=0)):
            self._hold_at_start([lane for lane in lanes if idle[lane] > past], NOOP)
        if self._fires:
            self._hold_at_start(lanes, FIRE)
        self._fill_stacks(list(lanes))

    def _start(self, lane: int, seed: int) -> None:
        """Begin the game of one lane, without what precedes the agent's first step."""
        frames, info = self._lanes[lane].reset([0], [seed] if self._sticky else _NO_SEED)
        self._game_seeds[lane] = seed
        self._sent[lane], self._traces[lane] = bytearray(), zlib.crc32(frames)
        self._frames[-1][lane] = frames[0, 0]
        self._over[lane], self._steps[lane] = False, 0
        self._lives[lane] = info["lives"][0]
        self._frame_numbers[lane] = info["episode_frame_number"][0]

    def _hold_at_start(self, lanes: Sequence[int], action: int) -> None:
        self._hold(lanes, [action] * len(lanes))
        for lane in lanes:
            if self._over[lane]:
                self._start(lane, self._game_seeds[lane])

    def _step_lanes(self, lanes: Sequence[int], actions: Sequence[int]) -> tuple[Array, Array]:
        """One agent step in some lanes: rewards, and whether a life was lost, [len(lanes)]."""
        before = self._lives[lanes]
        rewards = self._hold(lanes, actions)
        lost = self._lives[lanes] < before
        if self._fires and lost.any():
            # After the agent's own action, as in AtariFrames: a replay holds what was done.
            places = (lost & ~self._over[lanes]).nonzero()[0]
            waiting = [lanes[place] for place in places]
            rewards[places] += self._hold(waiting, [FIRE] * len(waiting))
            lost = self._lives[lanes] < before
        self._steps[lanes] += 1
        return rewards, lost

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array]:
        """One step of all environments with actions [S, n]; ended ones wait for `renew`."""
        chosen: list[int] = actions.ravel().tolist()
        # The interface would wait for ever for the answer to an action that the game does not have.
        if min(chosen) < 0 or max(chosen) >= self._num_actions:
            raise ValueError(f"the game has actions 0 to {self._num_actions - 1}, got {chosen}")
        self._frames.append(self._frames.pop(0))
        rewards, lost = self._step_lanes(self._all, chosen)
        terminated = self._over.copy()
        if self._options.episodic_life:
            terminated |= lost
        truncated = (self._steps >= self._max_steps) | (
            (self._frame_numbers >= self._max_frames) & ~self._over
        )
        return (
            self.observations(),
            rewards.reshape(self._shape),
            terminated.reshape(self._shape),
            truncated.reshape(self._shape),
        )

    def snapshot(self) -> list[State]:
        """What every seed's lanes were sent since their games began, and what they show."""
        n = self._shape[1]
        parts = [range(first, first + n) for first in range(0, len(self._lanes), n)]
        return [
            {
                "kind": self.kind,
                "level": weakest_level(self._level(lane) for lane in part),
                "obs": obs,
                "games": [self._lane_state(lane) for lane in part],
            }
            for part, obs in zip(parts, self.observations(), strict=True)
        ]

    def _lane_state(self, lane: int) -> State:
        level = self._level(lane)
        sent = self._sent[lane] if level == "replay" else b""
        return {
            "level": level,
            "sent": np.frombuffer(bytes(sent), np.uint8).copy(),
            "trace": self._traces[lane],
            "game_seed": self._game_seeds[lane],
            "steps": int(self._steps[lane]),
            "generator": encode(self._generators[lane]),
        }

    def restore(self, states: Sequence[State]) -> list[str | None]:
        """Play the games again up to where they were; says where that led elsewhere."""
        games: list[State] = [game for state in states for game in state["games"]]
        obs = np.concatenate([state["obs"] for state in states])  # [L, K, H, H]
        self._generators = [generator_from(game["generator"]) for game in games]
        replayed = [lane for lane, game in enumerate(games) if game["level"] == "replay"]
        for lane in replayed:
            self._start(lane, int(games[lane]["game_seed"]))
        logs = {lane: games[lane]["sent"].tolist() for lane in replayed}
        for place in range(max(map(len, logs.values()), default=0)):
            lanes = [lane for lane, log in logs.items() if place < len(log)]
            self._hold(lanes, [logs[lane][place] for lane in lanes])
        messages = [self._difference(lane, game) for lane, game in enumerate(games)]
        for lane, game in enumerate(games):
            self._steps[lane] = game["steps"]
        self._begin_games([lane for lane, message in enumerate(messages) if message is not None])
        for lane in (lane for lane, message in enumerate(messages) if message is None):
            for place, frame in enumerate(self._frames):
                frame[lane] = obs[lane, place]
        return messages

    def _difference(self, lane: int, game: State) -> str | None:
        if game["level"] != "replay":
            reason = f"its game was longer than {MAX_REPLAY_ACTIONS} actions"
        elif self._traces[lane] == game["trace"]:
            return None
        else:
            reason = "replaying its actions gave other frames (another version of ale-py?)"
        seed, index = divmod(lane, self._shape[1])
        return (
            f"environment {self._env_id} (index {index}, seed {self._seeds[seed]}): {reason}; a "
            "new game was begun"
        )

    def blame(self, error: Exception | SystemExit) -> tuple[int, object]:
        """Which environment failed, and why."""
        return 0, error

    def close(self) -> None:
        """End the emulators and their threads."""
        self._lanes = []


def _interface(keywords: Mapping[str, Any], options: AtariOptions) -> Any:
    """An emulator that does nothing but hold an action for some frames and shrink the screen."""
    ale_py = importlib.import_module("ale_py")
    roms = importlib.import_module("ale_py.roms")
    return ale_py.ALEVectorInterface(
        rom_path=roms.get_rom_path(keywords["game"]),
        num_envs=1,
        frame_skip=options.frame_skip,
        stack_num=1,
        img_height=options.screen_size,
        img_width=options.screen_size,
        grayscale=True,
        maxpool=True,
        noop_max=0,
        use_fire_reset=False,
        episodic_life=False,
        life_loss_info=False,
        reward_clipping=False,
        max_episode_steps=_NEVER,
        repeat_action_probability=float(keywords["repeat_action_probability"]),
        full_action_space=bool(keywords.get("full_action_space", False)),
        batch_size=0,
        num_threads=1,
        thread_affinity_offset=-1,
        autoreset_mode="NextStep",
    )
