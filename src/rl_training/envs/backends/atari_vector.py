"""Atari games on ALE's vector interface: every emulator in a thread of its own.

`ale_py.AtariVectorEnv` steps all its games or none, restarts a whole game after a lost life and
cannot save an emulator. So each lane here has such an interface to itself, told to do nothing but
hold an action: frames, the larger of the last two screens, and the resize. Actions are sent to all
lanes before an answer is awaited (or to as many as the user allows at a time), and a lane that
needs more than one hold continues while others work. To begin a game takes longer than to step all
lanes, so each lane has a second emulator that begins its next game while the first is played.
Lives, FIRE, idle starts, limits and frame stacks are ours, as in `rl_training.envs.atari`, which
`tests/envs/test_atari_vector.py` compares frame by frame.

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
import re
import zlib
from collections import Counter, deque
from collections.abc import Container, Generator, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import gymnasium as gym
import numpy as np

from rl_training.envs.atari import FIRE, NOOP, AtariOptions, emulator_kwargs
from rl_training.envs.backends.lanes import Transition
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
_RESTART = -1
_PATIENCE = {_RESTART: 12}
"""Steps after which an order to a waiting emulator is surely carried out; 2 for a hold."""
_FULL_STRENGTH = [1.0]

_Turn: TypeAlias = Generator[int, None, None]


def why_no_atari_vector(env_id: str, env_kwargs: Mapping[str, Any]) -> str | None:
    """Why a game cannot run here with such keywords; None if it can."""
    options = wrapper_options(env_id, env_kwargs.get("wrappers")).atari
    if options is None:
        return "env_kwargs.wrappers.atari is not set, and its preprocessing is built in there"
    if not options.grayscale:
        return "env_kwargs.wrappers.atari.grayscale is false, and frames are grey there"
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
    version = ale_py.__version__
    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < (0, 12):
        return f"it needs ale-py 0.12 or newer, and {version} is installed"
    return None


class _Game:
    """The emulator of one lane, and the rules around it.

    A turn is a generator of orders, an action to hold or `_RESTART`, which continues when the
    emulator has carried out the last one. So the lanes of a step need not wait for each other.
    """

    def __init__(self, keywords: Mapping[str, Any], options: AtariOptions, max_steps: int) -> None:
        self._interface = _interface(keywords, options)
        meanings = [action.name for action in self._interface.get_action_set()]
        self.num_actions = len(meanings)
        self._options = options
        self._fires = options.fire_reset and meanings[FIRE] == "FIRE"
        self._sticky = float(keywords["repeat_action_probability"]) > 0.0
        self._max_frames = int(keywords.get("max_num_frames_per_episode") or _NEVER)
        self._max_steps = max_steps
        self._restarted: tuple[Array, dict[str, Array]] | None = None
        self._last_order = NOOP
        self.seed = -1
        """Seed of the emulator in this game; -1 where nothing is drawn in it."""
        self.sent = bytearray()
        """The actions held since the game began, ours included."""
        self.trace = 0
        """Checksum of all frames since then: one frame alone may be that of another game."""
        self.frame: Array = np.zeros(0, np.uint8)
        """What is seen now, [H, H]."""
        self.lives = self.frame_number = self.steps = 0
        self.over = False
        """Whether the game has ended, and not only a life."""
        self._reward = 0.0
        self.final_frame: Array = self.frame
        """What was seen after the agent's last action, before a new episode."""
        self.outcome = (0.0, False, False)
        """Reward, terminated and truncated of the agent's last action."""

    def send(self, order: int) -> None:
        """Let the emulator begin to carry out an order."""
        self._last_order = order
        if order != _RESTART:
            self._interface.send([order], _FULL_STRENGTH)
        elif self.over and not self._sticky:
            self._interface.send([NOOP], _FULL_STRENGTH)  # after the end, this begins a game
        else:
            self._restarted = self._interface.reset([0], [self.seed])

    def receive(self) -> None:
        """Wait until the order is carried out."""
        if self._restarted is not None:
            (frames, info), over = self._restarted, False
            self._restarted = None
        else:
            frames, reward, ended, _, info = self._interface.recv()
            self._reward += float(reward[0])
            over = bool(ended[0])
        if self._last_order == _RESTART:
            self.sent, self.trace, self.steps = bytearray(), 0, 0
        else:
            self.sent.append(self._last_order)
        self.frame, self.over = frames[0, 0], over
        self.lives = int(info["lives"][0])
        self.frame_number = int(info["episode_frame_number"][0])
        self.trace = zlib.crc32(frames.data, self.trace)

    @property
    def _truncated(self) -> bool:
        frames_are_up = self.frame_number >= self._max_frames and not self.over
        return self.steps >= self._max_steps or frames_are_up

    def turn(self, action: int) -> _Turn:
        """One step of the agent, and the next life where it loses one."""
        before = self.lives
        yield from self._step(action)
        lost = self._options.episodic_life and self.lives < before
        terminated, truncated = self.over or lost, self._truncated
        self.outcome = (self._reward, terminated, truncated)
        self.final_frame = self.frame
        if not (terminated or truncated):
            return
        if not (self.over or truncated):
            yield from self._step(NOOP)  # on to the next life, as in AtariLives

    @property
    def is_finished(self) -> bool:
        """Whether another game must follow this one."""
        return self.over or self._truncated

    def _step(self, action: int) -> _Turn:
        before, self._reward = self.lives, 0.0
        yield action
        if self._fires and self.lives < before and not self.over:
            # After the agent's own action, as in AtariFrames: a replay holds what was done.
            yield FIRE
        self.steps += 1

    def begin(self, generator: np.random.Generator) -> _Turn:
        """A new game with idle holds, and with FIRE where a game waits for it."""
        self.seed = int(generator.integers(2**31)) if self._sticky else -1
        most = self._options.noop_max // self._options.frame_skip
        idle = int(generator.integers(most + 1))
        return self._begin(idle)

    def _begin(self, idle: int) -> _Turn:
        yield _RESTART
        for action in (*[NOOP] * idle, *[FIRE] * self._fires):
            yield action
            if self.over:
                yield _RESTART

    def replay(self, state: State) -> _Turn:
        """Everything that a snapshot's game was sent."""
        self.seed = int(state["seed"])
        yield _RESTART
        yield from state["sent"].tolist()

    @property
    def level(self) -> ResumeLevel:
        """Games are played again, unless one is too long for that."""
        return "restart" if len(self.sent) > MAX_REPLAY_ACTIONS else "replay"

    def snapshot(self) -> State:
        """What `replay` needs, and how to tell that it arrived."""
        sent = self.sent if self.level == "replay" else b""
        return {
            "level": self.level,
            "sent": np.frombuffer(bytes(sent), np.uint8).copy(),
            "trace": self.trace,
            "seed": self.seed,
            "steps": self.steps,
        }

    def difference(self, state: State) -> str | None:
        """Why the game is not where a snapshot's was; None if it is."""
        if state["level"] != "replay":
            return f"its game was longer than {MAX_REPLAY_ACTIONS} actions"
        if self.trace != state["trace"]:
            return "replaying its actions gave other frames (another version of ale-py?)"
        return None


class _Lane:
    """The game that is played, and the next one, which begins meanwhile on another emulator."""

    def __init__(self, playing: _Game, waiting: _Game) -> None:
        self.playing, self._waiting = playing, waiting
        self.acted_in = playing
        """The game of the agent's last action."""
        self._generator = np.random.default_rng(0)
        self._before: State = {}
        """The generator's state before the next game drew from it."""
        self._turn: _Turn | None = None
        self._patience = 0
        """Steps until the answer of the waiting emulator is awaited; 0 if none is due."""

    def draw_from(self, generator: np.random.Generator) -> None:
        """Draw games from this generator; one that has begun already is given up."""
        if self._patience:
            self._waiting.receive()
        self._generator, self._turn, self._patience = generator, None, 0

    def send(self, order: int) -> None:
        """Let the emulator in play begin to carry out an order."""
        self.playing.send(order)

    def receive(self) -> None:
        """Wait until the order is carried out."""
        self.playing.receive()

    def turn(self, action: int) -> _Turn:
        """One step of the agent, and the next game where it ends one."""
        self.acted_in = self.playing
        yield from self.playing.turn(action)
        if self.playing.is_finished:
            yield from self.begin()

    def begin(self) -> _Turn:
        """Go over to the next game; what is left of its beginning is done now."""
        turn = self._turn or self._waiting.begin(self._generator)
        self.playing, self._waiting = self._waiting, self.playing
        if self._patience:
            self.playing.receive()
        yield from turn
        self._turn, self._patience = None, 0

    def prepare(self) -> None:
        """Continue with the beginning of the next game, without waiting for its emulator."""
        if self._turn is None:
            self._before = encode(self._generator)
            self._turn = self._waiting.begin(self._generator)
        elif self._patience == 0:
            return  # it has begun
        elif self._patience > 1:
            self._patience -= 1
            return
        else:
            self._waiting.receive()
        order = next(self._turn, None)
        if order is None:
            self._patience = 0
        else:
            self._waiting.send(order)
            self._patience = _PATIENCE.get(order, 2)

    def snapshot(self) -> State:
        """The game that is played, and what the next one is drawn from."""
        drawn = self._turn is not None
        return self.playing.snapshot() | {
            "generator": self._before if drawn else encode(self._generator)
        }


class _Schedule:
    """Carries out the turns of lanes, some at a time; groups of turns are waited for apart."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._waiting: deque[tuple[_Lane, _Turn, int]] = deque()
        self._busy: deque[tuple[_Lane, _Turn, int]] = deque()
        self._unfinished: Counter[int] = Counter()

    def begin(self, turns: Iterable[tuple[_Lane, _Turn]], group: int = 0) -> None:
        """Take the turns of some lanes, and send the first orders."""
        for lane, turn in turns:
            self._waiting.append((lane, turn, group))
            self._unfinished[group] += 1
        self._send()

    def finish(self, group: int = 0) -> None:
        """Wait until all turns of a group are carried out; those of others continue meanwhile."""
        while self._unfinished[group]:
            lane, turn, of_group = self._busy.popleft()
            lane.receive()
            self._continue(lane, turn, of_group)
            self._send()

    def run(self, turns: Iterable[tuple[_Lane, _Turn]]) -> None:
        """Carry out turns from beginning to end."""
        self.begin(turns)
        self.finish()

    def _send(self) -> None:
        while self._waiting and len(self._busy) < self._at_once:
            self._continue(*self._waiting.popleft())

    def _continue(self, lane: _Lane, turn: _Turn, group: int) -> None:
        order = next(turn, None)
        if order is None:
            self._unfinished[group] -= 1
        else:
            lane.send(order)
            self._busy.append((lane, turn, group))


class AtariVector:
    """Games in threads; where one ends, the next has begun already.

    Args:
        env_id: A game for which `why_no_atari_vector` knows no reason.
        env_kwargs: See `make_env`.
        seeds: The S seeds, for messages.
        num_envs: n, how many for each seed.
        threads: Emulators that work at the same time; 0 is all, on whatever cores there are. With
            one for each core, an emulator that is done would wait until its answer is taken.
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
        self._env_id, self._seeds = env_id, tuple(seeds)
        self._shape = (len(seeds), num_envs)
        count = len(seeds) * num_envs
        self.threads = min(count, threads or count)
        self._schedule = _Schedule(self.threads)
        keywords = gym.registry[env_id].kwargs | emulator_kwargs(options) | dict(env_kwargs)
        max_steps = int(env_kwargs.get("max_episode_steps") or _NEVER)
        games = [_Game(keywords, options, max_steps) for _ in range(2 * count)]
        self.lanes = [_Lane(*games[2 * lane : 2 * lane + 2]) for lane in range(count)]
        half = num_envs // 2
        self.parts = (slice(0, half), slice(half, num_envs)) if half else (slice(0, num_envs),)
        numbers = np.arange(count).reshape(self._shape)
        self._numbers = [numbers[:, part].ravel().tolist() for part in self.parts]
        """The lanes of each part."""
        frames = (options.frame_stack, options.screen_size, options.screen_size)
        self._stacks = [
            np.zeros((len(seeds), part.stop - part.start, *frames), np.uint8) for part in self.parts
        ]
        """What each part sees now, [S, its n, K, H, H]; not written to once it was given away."""

    @property
    def note(self) -> str:
        """How the environments run."""
        threads = "one thread" if self.threads == 1 else f"{self.threads} threads"
        return f"native: all at once on {threads} of ALE's vector interface"

    @property
    def resume_level(self) -> ResumeLevel:
        """The weakest level of the games."""
        return weakest_level(lane.playing.level for lane in self.lanes)

    def observations(self) -> Array:
        """The current observations, [S, n, K, H, H]."""
        return np.concatenate(self._stacks, axis=1)

    def _show_starts(self, index: int, lanes: Container[int]) -> None:
        """Fill the stacks of a part's lanes whose games have begun with what those show."""
        stacks = self._stacks[index].copy()
        flat = stacks.reshape(-1, *stacks.shape[2:])
        for place, lane in enumerate(self._numbers[index]):
            if lane in lanes:
                flat[place] = self.lanes[lane].playing.frame
        self._stacks[index] = stacks

    def reset(self, seeds: Sequence[int] | None) -> Array:
        """Begin new games everywhere, with new generators if there are seeds, S * n of them."""
        for lane, seed in zip(self.lanes, seeds or (), strict=seeds is not None):
            lane.draw_from(np.random.default_rng(seed))
        self._schedule.run((lane, lane.begin()) for lane in self.lanes)
        for index, numbers in enumerate(self._numbers):
            self._show_starts(index, numbers)
        return self.observations()

    def begin(self, actions: Array, index: int) -> None:
        """Begin a step of the part of that number, with its actions [S, its n]."""
        chosen: list[int] = actions.ravel().tolist()
        # The interface would wait forever for the answer to an action that the game does not have.
        if min(chosen) < 0 or max(chosen) >= (most := self.lanes[0].playing.num_actions):
            raise ValueError(f"the game has actions 0 to {most - 1}, got {chosen}")
        lanes = [self.lanes[number] for number in self._numbers[index]]
        turns = ((lane, lane.turn(a)) for lane, a in zip(lanes, chosen, strict=True))
        self._schedule.begin(turns, index)

    def end(self, index: int) -> Transition:
        """Finish the step of a part, while the other part's may continue."""
        self._schedule.finish(index)
        lanes = [self.lanes[number] for number in self._numbers[index]]
        for lane in lanes:
            lane.prepare()
        before = self._stacks[index]
        stacks = np.empty_like(before)
        stacks[:, :, :-1] = before[:, :, 1:]
        newest = stacks.reshape(-1, *stacks.shape[2:])[:, -1]  # a view
        for place, lane in enumerate(lanes):
            newest[place] = lane.acted_in.final_frame
        self._stacks[index] = stacks
        shape = stacks.shape[:2]
        outcomes = (lane.acted_in.outcome for lane in lanes)
        reward, terminated, truncated = zip(*outcomes, strict=True)
        return (
            stacks,
            np.array(reward, np.float32).reshape(shape),
            np.array(terminated, np.bool_).reshape(shape),
            np.array(truncated, np.bool_).reshape(shape),
        )

    def renew_part(self, ended: Array, index: int) -> Array:
        """Show the episodes of a part that have begun where `ended`, [S, its n]."""
        flags = zip(self._numbers[index], ended.ravel().tolist(), strict=True)
        self._show_starts(index, {lane for lane, over in flags if over})
        return self._stacks[index]

    def step(self, actions: Array) -> Transition:
        """One step of all environments with actions [S, n]."""
        for index, part in enumerate(self.parts):
            self.begin(actions[:, part], index)
        ends = [self.end(index) for index in range(len(self.parts))]
        obs, reward, terminated, truncated = (
            np.concatenate(arrays, axis=1) for arrays in zip(*ends, strict=True)
        )
        return obs, reward, terminated, truncated

    def renew(self, ended: Array, obs: Array) -> Array:  # noqa: ARG002
        """Show the episodes that have begun where `ended`, [S, n]."""
        for index, part in enumerate(self.parts):
            self.renew_part(ended[:, part], index)
        return self.observations()

    def snapshot(self) -> list[State]:
        """What every seed's games were sent since they began, and what they show."""
        n = self._shape[1]
        parts = [self.lanes[first : first + n] for first in range(0, len(self.lanes), n)]
        return [
            {
                "kind": self.kind,
                "level": weakest_level(lane.playing.level for lane in part),
                "obs": obs,
                "games": [lane.snapshot() for lane in part],
            }
            for part, obs in zip(parts, self.observations(), strict=True)
        ]

    def restore(self, states: Sequence[State]) -> list[str | None]:
        """Play the games again up to where they were; says where that led elsewhere."""
        saved: list[State] = [game for state in states for game in state["games"]]
        pairs = list(zip(self.lanes, saved, strict=True))
        self._schedule.run((lane, lane.playing.replay(state)) for lane, state in pairs)
        for lane, state in pairs:
            lane.draw_from(generator_from(state["generator"]))
            lane.playing.steps = state["steps"]
        reasons = [lane.playing.difference(state) for lane, state in pairs]
        elsewhere = {lane for lane, reason in enumerate(reasons) if reason is not None}
        self._schedule.run((self.lanes[lane], self.lanes[lane].begin()) for lane in elsewhere)
        obs = np.stack([state["obs"] for state in states])  # [S, n, K, H, H]
        for index, part in enumerate(self.parts):
            self._stacks[index] = np.empty_like(self._stacks[index])
            self._stacks[index][...] = obs[:, part]
            self._show_starts(index, elsewhere)
        return [self._message(lane, reason) for lane, reason in enumerate(reasons)]

    def _message(self, lane: int, reason: str | None) -> str | None:
        if reason is None:
            return None
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
        self.lanes = []


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
