"""Progress of an epoch: a bar where somebody watches, plain regular lines where a file does."""

from __future__ import annotations

import sys
from types import TracebackType

from cluster_ddp.runtime.output import say


class Progress:
    """A bar on a terminal, else the lines themselves.

    Args:
        title: before the bar.
        total: the value of `update` at which it is full.
        enabled: False on the ranks that stay silent.
    """

    def __init__(self, title: str, *, total: int, enabled: bool) -> None:
        self.enabled = enabled
        self._bar = None
        if enabled and sys.stdout.isatty():
            from rich.progress import Progress as Bar

            self._bar = Bar(transient=True)
            self._task = self._bar.add_task(title, total=total)

    def update(self, done: int, line: str) -> None:
        """Show that `done` of the total is done; `line` says it in words."""
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
