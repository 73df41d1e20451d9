"""Colours that are read on a white and on a black terminal alike.

Of the sixteen that a terminal has, yellow, cyan and green vanish on white and blue on black; red
and magenta hold on both, and dim text on neither.  So words that matter are bold, labels are red or
magenta, and only the empty part of a bar is dim.
"""

from __future__ import annotations

ERROR = "bold red"
NOTE = "bold magenta"
STRONG = "bold"
EMPTY = "dim"
BAR = "magenta"


def style_help() -> None:
    """Give the help of the commands these colours; typer's own are cyan, green and yellow."""
    from typer import rich_utils

    plain = (
        *("STYLE_HELPTEXT", "STYLE_TYPES", "STYLE_OPTION_DEFAULT", "STYLE_OPTION_ENVVAR"),
        *("STYLE_OPTIONS_PANEL_BORDER", "STYLE_COMMANDS_PANEL_BORDER"),  # their titles too
    )
    strong = ("STYLE_OPTION", "STYLE_SWITCH", "STYLE_USAGE", "STYLE_COMMANDS_TABLE_FIRST_COLUMN")
    for names, style in ((plain, ""), (strong, STRONG), (("STYLE_REQUIRED_LONG",), "red")):
        for name in names:
            if hasattr(rich_utils, name):  # older versions have other names for some
                setattr(rich_utils, name, style)
