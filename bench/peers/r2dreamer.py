"""r2dreamer, a DreamerV3 in PyTorch whose sources are a folder and no package.

    python -m bench.peers.r2dreamer FOLDER --size 12M --seconds 5

Train steps a second of its own `update` with its decoder (`rep_loss=dreamer`), its compiler and its
float16, on images of noise that are on the device already: sampling costs it nothing.  Compare with
`python -m bench gpu-dreamer`, whose figures include sampling.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

BATCH, LENGTH, ACTIONS = 16, 64, 6


class Settings(dict[str, Any]):
    """A mapping whose entries are attributes too, as its own reader gives."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class Batch(dict[str, Any]):
    """Named tensors `[B, T, ...]` with the shape that its code asks for."""

    shape = (BATCH, LENGTH)


def _settings(value: Any, names: dict[str, Any]) -> Any:
    """Resolve `${model.x}` and numbers such as `4e-5`, which YAML 1.1 takes for text."""
    if isinstance(value, dict):
        return Settings({key: _settings(inner, names) for key, inner in value.items()})
    if not isinstance(value, str):
        return value
    reference = re.fullmatch(r"\$\{(.+)\}", value)
    if reference:
        return names[reference.group(1)]
    try:
        return float(value)
    except ValueError:
        return value


def _config(folder: Path, size: str, device: str, compile_it: bool) -> Any:
    known: dict[str, Any] = {}
    for name in ("_base_", f"size{size}"):
        text = (folder / "configs" / "model" / f"{name}.yaml").read_text(encoding="utf-8")
        known |= yaml.safe_load(text)
    known.pop("defaults", None)
    names = {f"model.{key}": value for key, value in known.items()} | {"device": device}
    names |= {f"env.{part}.mlp_keys": "$^" for part in ("encoder", "decoder")}
    names |= {f"env.{part}.cnn_keys": "image" for part in ("encoder", "decoder")}
    ours = {"rep_loss": "dreamer", "compile": compile_it, "device": device}
    return _settings(known | ours, names)


def _stand_in(name: str, **contents: Any) -> None:
    """Put an empty module in place of one that is imported but not used here."""
    module = types.ModuleType(name)
    vars(module).update(contents)
    sys.modules.setdefault(name, module)


class Replay:
    """Gives out the same noise again and again."""

    def __init__(self, device: str, deter: int, latents: tuple[int, int]) -> None:
        generator = torch.Generator().manual_seed(0)
        lead = (BATCH, LENGTH)
        actions = torch.randint(ACTIONS, lead, generator=generator)
        first = torch.zeros(*lead, dtype=torch.bool)
        first[:, 0] = True
        never = torch.zeros(*lead, 1, dtype=torch.bool)
        self.data = {
            "image": torch.randint(256, (*lead, 64, 64, 3), dtype=torch.uint8, generator=generator),
            "action": torch.nn.functional.one_hot(actions, ACTIONS).float(),
            "reward": torch.randn(*lead, 1, generator=generator),
            "is_first": first,
            "is_last": never,
            "is_terminal": never,
        }
        self.data = {name: tensor.to(device) for name, tensor in self.data.items()}
        self.initial = (
            torch.zeros(BATCH, *latents, device=device),
            torch.zeros(BATCH, deter, device=device),
        )

    def sample(self) -> tuple[Batch, None, tuple[torch.Tensor, torch.Tensor]]:
        """Return a batch, no places, and the first state."""
        return Batch(self.data), None, self.initial

    def update(self, *_: Any) -> None:
        """Forget the states."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", default="12M")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--eager", action="store_true", help="without its compiler")
    options = parser.parse_args()
    sys.path.insert(0, str(options.folder))
    _stand_in("tensordict", TensorDict=dict)
    _stand_in("torch.utils.tensorboard", SummaryWriter=object)
    config = _config(options.folder, options.size, options.device, not options.eager)
    image = types.SimpleNamespace(shape=(64, 64, 3))
    spaces = types.SimpleNamespace(spaces={"image": image})
    actions = types.SimpleNamespace(n=ACTIONS, discrete=True)
    torch.set_float32_matmul_precision("high")
    agent = importlib.import_module("dreamer").Dreamer(config, spaces, actions)
    agent = agent.to(options.device)
    rssm = config.rssm
    replay = Replay(options.device, rssm.deter, (rssm.stoch, rssm.discrete))
    wait: Callable[[], object] = torch.cuda.synchronize if options.device == "cuda" else int
    start = time.perf_counter()
    for _ in range(3):
        agent.update(replay)
    wait()
    prepared = time.perf_counter() - start
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < options.seconds:
        agent.update(replay)
        wait()
        count += 1
    rate = count / (time.perf_counter() - start)
    print(f"r2dreamer {options.size}: {rate:.2f} train steps/s, {prepared:.1f} s to prepare")


if __name__ == "__main__":
    main()
