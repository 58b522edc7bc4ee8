"""What the verbs that read run directories share: an option, and colours."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

_COLOURS = {"COMPLETED": 32, "RUNNING": 36, "COMPLETING": 36, "PENDING": 33, "CONFIGURING": 33}
_FAILED = 31


def parser(program: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the option --runs-dir.

    Args:
        program: name of the command.
        description: text for --help, shown as it is.
    """
    made = argparse.ArgumentParser(
        prog=program, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    folder = "folder of the run directories (default: runs)"
    made.add_argument("--runs-dir", type=Path, default=Path("runs"), metavar="PATH", help=folder)
    return made


def coloured_state(state: str, text: str) -> str:
    """Return a text in the colour of a job's state, if stdout is a terminal and NO_COLOR is not set.

    https://no-color.org: any value of NO_COLOR but the empty one counts.
    """
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not sys.stdout.isatty():
        return text
    if state in ("", "unknown"):
        return text
    return f"\x1b[{_COLOURS.get(state, _FAILED)}m{text}\x1b[0m"
