"""What the verbs that read run directories share: an option, colours, and a line that stays at the bottom."""

from __future__ import annotations

import os
import re
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from cluster_ddp.errors import printable
from cluster_ddp.submission.cli.parser import Parser

_COLOURS = {"COMPLETED": 32, "RUNNING": 36, "COMPLETING": 36, "PENDING": 33, "CONFIGURING": 33, "STOPPED": 33}
_FAILED = 31
_REPEAT_S = 60.0
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")


def parser(program: str, description: str | None) -> Parser:
    """Return a parser with the option --runs-dir.

    Args:
        program: name of the command.
        description: text for --help, shown as it is.
    """
    made = Parser(program, description=description)
    folder = "folder of the run directories (default: runs)"
    made.add_argument("--runs-dir", type=Path, default=Path("runs"), metavar="PATH", help=folder)
    return made


def printable_line(line: str) -> str:
    """Return a line of a log without what could change the terminal: colours are removed, tabs stay."""
    return "\t".join(map(printable, _COLOUR.sub("", line).split("\t")))


def coloured_state(state: str, text: str) -> str:
    """Return a text in the colour of a job's state, if stdout is a terminal and NO_COLOR is not set.

    https://no-color.org: any value of NO_COLOR but the empty one counts.
    """
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not sys.stdout.isatty():
        return text
    if state in ("", "unknown"):
        return text
    return f"\x1b[{_COLOURS.get(state, _FAILED)}m{text}\x1b[0m"


class BottomLine:
    """Prints lines, and keeps a last line that changes: in its place on a terminal, elsewhere once a minute.

    A context manager.
    """

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._stack, self._last, self._again_s = ExitStack(), "", 0.0

    def show(self, line: str) -> None:
        """Print a line, above the last one."""
        if self._is_terminal:
            self._live.console.out(line, highlight=False)
        else:
            print(line, flush=True)

    def update(self, text: str) -> None:
        """Change the last line."""
        if self._is_terminal:
            self._live.update(self._text(text, no_wrap=True, overflow="ellipsis", style="bold"), refresh=True)
        elif text not in ("", self._last) and time.monotonic() >= self._again_s:
            print(text, flush=True)
            self._last, self._again_s = text, time.monotonic() + _REPEAT_S

    def __enter__(self) -> BottomLine:
        if self._is_terminal:
            from rich.live import Live
            from rich.text import Text

            self._text = Text
            self._live = self._stack.enter_context(Live("", auto_refresh=False, transient=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
