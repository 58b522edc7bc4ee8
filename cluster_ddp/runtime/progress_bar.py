"""Progress of an epoch: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType

from cluster_ddp.runtime.safe_print import say


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
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
