"""What a rank prints, and the bar that shows an epoch's progress.

A full disk or a closed pipe does not end a training.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType


def say(text: str, end: str = "\n") -> None:
    """Print a text and `end` at once. If stdout fails, say so once on stderr and drop all later lines."""
    try:
        try:
            print(text, end=end, flush=True)
        except UnicodeEncodeError:
            print(text.encode("ascii", "backslashreplace").decode(), end=end, flush=True)
    except (OSError, ValueError) as error:  # ValueError: somebody closed it
        # Its buffer would fail again at exit, and Python would end with status 120.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        complain(f"stdout takes no more output ({error}); training continues without it.")


def complain(text: str) -> None:
    """Write a line to stderr in one piece, so that lines of several ranks don't mix. Failures are ignored."""
    if sys.stderr is None:  # there was none when Python started
        return
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


class Progress:
    """A context manager that shows a bar on a terminal, and prints the lines of `update` elsewhere.

    Args:
        title: text before the bar.
        total: the value of `done` in `update` at which the bar is full.
        enabled: False on ranks that print nothing.
    """

    def __init__(self, title: str, *, total: int, enabled: bool) -> None:
        self.enabled = enabled
        self._bar = None
        if enabled and sys.stdout.isatty():
            from rich.progress import Progress as Bar

            self._bar = Bar(transient=True)
            self._task = self._bar.add_task(title, total=total)

    def update(self, done: int, line: str) -> None:
        """Show progress.

        Args:
            done: how much of the total is done.
            line: the same in words. With a bar it is printed only when the bar is full.
        """
        if self._bar is not None:
            self._bar.update(self._task, completed=done)
            if done == self._bar.tasks[0].total:
                self._bar.console.print(line, markup=False, highlight=False)
        elif self.enabled:
            say(line)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
