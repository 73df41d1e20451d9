"""Files that come with the package."""

from __future__ import annotations

from pathlib import Path

from rl_training.errors import ConfigError
from rl_training.validation import suggest

ASSETS = Path(__file__).resolve().parent / "assets"


def find_packaged_asset(name: str) -> Path:
    """Return the path of a packaged file, such as `configs/sac/pendulum.yaml`.

    Raises:
        ConfigError: When no such file is packaged, with the nearest match.
    """
    path = (ASSETS / name).resolve()
    if not path.is_file() or ASSETS not in path.parents:
        names = [str(p.relative_to(ASSETS)) for p in ASSETS.rglob("*.yaml")]
        raise ConfigError(f"{name} is not a packaged file{suggest(name, names)}")
    return path


def preset_names() -> list[str]:
    """Return the names of all presets, such as `sac/pendulum`.

    `sac/pendulum.gate.yaml` is not a preset: it says what `sac/pendulum` must learn.
    """
    root = ASSETS / "configs"
    files = (path for path in root.rglob("*.yaml") if not path.name.endswith(".gate.yaml"))
    return sorted(str(path.relative_to(root).with_suffix("")) for path in files)


def preset_path(source: str | Path) -> Path:
    """Return the file meant by a path or by a preset's name.

    Raises:
        ConfigError: When it is neither, with the nearest preset.
    """
    path = Path(source)
    if path.is_file():
        return path
    name = path.as_posix().removeprefix("configs/").removesuffix(".yaml")
    if name in preset_names():
        return ASSETS / "configs" / f"{name}.yaml"
    of_method = [preset for preset in preset_names() if preset.startswith(f"{name}/")]
    near = f" (those of {name}: {', '.join(of_method)})" if of_method else ""
    raise ConfigError(
        f"{source} is neither a file nor a preset{near or suggest(name, preset_names())}; "
        "`rl-training list presets` shows all"
    )
