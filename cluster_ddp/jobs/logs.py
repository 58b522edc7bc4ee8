"""The logs of a job: what its batch script and its tasks have printed, read once or again and again."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from cluster_ddp.run.files import LOG_BYTES, LONGEST_LINE, open_regular, why
from cluster_ddp.run.names import File
from cluster_ddp.submission.job import Job

PLAIN = (File.JOB_LOG, File.TASK_LOG.format(0))
"""The logs of the batch script and of task 0. Their lines are shown as they are; of all logs, others get a prefix."""

_TRACEBACK = "Traceback (most recent call last):"
# How Python begins the message of a script that it can't compile: without the line above.
_SYNTAX_ERROR = re.compile(r'  File ".*", line \d+')
# What torch puts before each line of a traceback once the process group is there.
_TORCHS_PREFIX = re.compile(r"\[rank(\d+)\]: ")


class LogReader:
    """Shows the lines of a job's logs that are new since the last time. Of equal tracebacks, only the first is shown.

    It reads the logs of these names; without names, all. One alone gets no prefix, nor do those of `PLAIN`.
    """

    def __init__(self, show: Callable[[str], None], job: Job, names: Collection[str] = ()) -> None:
        self._show, self._job, self._names = show, job, names
        self._read: dict[Path, int] = {}
        self._tracebacks: dict[tuple[Path, str], list[str]] = {}
        """Of each file, and each rank that torch names there, the lines of a traceback whose end is not read yet."""
        self._shown: dict[tuple[str, ...], str] = {}
        """The tracebacks that were shown, and the rank or the log that each is from."""

    def files(self) -> list[Path]:
        """Return the logs that exist so far."""
        return [path for path in self._job.log_files() if not self._names or path.name in self._names]

    def show_new(self, *, to_the_end: bool = False) -> None:
        """Show what is new. An unfinished line is shown once it is whole, or `to_the_end`."""
        for path in self.files():
            prefix = "" if path.name in PLAIN or len(self._names) == 1 else f"[{path.stem}] "
            for line in self._new_lines(path, to_the_end=to_the_end):
                for folded in self._folded(path, line):
                    self._show(prefix + folded)
            unfinished = [key for key in self._tracebacks if key[0] == path] if to_the_end else []
            for line in (line for key in unfinished for line in self._tracebacks.pop(key)):
                self._show(prefix + line)

    def _new_lines(self, path: Path, *, to_the_end: bool) -> Iterator[str]:
        try:
            file = open_regular(path)
        except OSError as error:
            if path not in self._read:
                self._read[path] = 0
                yield f"{path.name} can't be read: {why(error)}."
            return
        with file:
            if path not in self._read:
                self._read[path] = max(0, os.fstat(file.fileno()).st_size - LOG_BYTES)
                if left_out := self._read[path] >> 20:
                    yield f"[… the first {left_out} MiB of {path} are left out]"
            file.seek(self._read[path])
            while line := file.readline(LONGEST_LINE):
                if not (to_the_end or line.endswith(b"\n") or len(line) == LONGEST_LINE):
                    return
                self._read[path] += len(line)
                yield from line.decode(errors="replace").splitlines()

    def _folded(self, path: Path, line: str) -> list[str]:
        """What to show once this line is read: nothing within a traceback, then all of it, or where it was shown."""
        named = _TORCHS_PREFIX.match(line)
        key, text = (path, named[1]) if named else (path, ""), line[named.end() :] if named else line
        if key not in self._tracebacks:
            if _TRACEBACK not in line and not _SYNTAX_ERROR.fullmatch(line):
                return [line]
            self._tracebacks[key] = []
        block = self._tracebacks[key]
        block.append(line)
        if not text.strip() or text[0].isspace() or _TRACEBACK in line:
            return []
        del self._tracebacks[key]
        # The first line may name the rank.
        lines = tuple(_TORCHS_PREFIX.sub("", one, count=1) for one in block[1:])
        source = f"rank {named[1]}" if named else path.stem
        shown_before = self._shown.setdefault(lines, source)
        return block if shown_before == source else [f"The same traceback as in {shown_before}: {text}"]
