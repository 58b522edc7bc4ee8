"""The errors that cluster_ddp raises for wrong input, or for a cluster that can't do what was requested.

    ClusterDDPError
    ├── TopologyError      an environment that does not describe a consistent world of ranks; a hostlist that is none
    ├── RendezvousError    ranks that could not find each other in time
    ├── DeviceError        GPUs that don't match the ranks
    ├── CommunicatorError  a connection between ranks that broke
    ├── DataError          a dataset that is missing, damaged or too small; an invalid batch size
    ├── RunDirError        a run directory that can't be written, or is in use
    ├── CheckpointError    a checkpoint that is missing, damaged or of another training; a failed save
    ├── NonFiniteError     a non-finite loss or gradient (NaN or Inf)
    ├── SpecError          a job, an option or a settings file that is not valid
    ├── JobError           a job that ended without a result
    ├── SlurmError         a Slurm command that failed
    │   └── JobNotFoundError   a job that Slurm does not know, or has forgotten
    ├── RemoteError        a machine behind ssh that can't be reached or used
    └── SandboxError       a sandbox that can't be made, found or removed here

Each error states what was asked for, what was found, and a hint that fixes it. Entry points print it as one short block
and exit with status 2 (`exit_on_error`). A traceback from this package means a bug.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

USAGE_EXIT_STATUS = 2
_NAMED = 3  # names in a message
_LONGEST = 300


class ClusterDDPError(Exception):
    """Root of the package's errors.

    Args:
        asked: what the caller wanted.
        found: what the cluster (or file, or environment) says.
        hint: what to do about it.

    Each is text without a trailing newline, and is kept as an attribute.
    """

    def __init__(self, asked: str, found: str, hint: str) -> None:
        super().__init__(asked, found, hint)
        self.asked, self.found, self.hint = asked, found, hint

    def __str__(self) -> str:
        text = f"{self.asked}\n  {self.found}\n  Hint: {self.hint}"
        first, *lines = text.splitlines()  # those of another program may begin anywhere
        return "\n".join([first, *(line if line.startswith("  ") else f"  {line}" for line in lines if line.strip())])


class TopologyError(ClusterDDPError):
    """An environment that does not describe a consistent world of ranks."""


class RendezvousError(ClusterDDPError):
    """Ranks that could not find each other in time."""


class DeviceError(ClusterDDPError):
    """GPUs that don't match the ranks."""


class CommunicatorError(ClusterDDPError):
    """A connection between ranks that broke, or a rank that is gone."""


class DataError(ClusterDDPError):
    """A dataset that is missing, damaged or too small for the ranks; an invalid batch size."""


class RunDirError(ClusterDDPError):
    """A run directory that can't be written, or that another job is using."""


class CheckpointError(ClusterDDPError):
    """A checkpoint that is missing, damaged or of another training; a state that can't be saved."""


class NonFiniteError(ClusterDDPError):
    """A non-finite loss or gradient (NaN or Inf)."""


class SpecError(ClusterDDPError):
    """A job or an option that is not valid."""

    meant: object = None
    """The value of a job's field that was probably meant, if that is clear."""
    fields: tuple[str, ...] = ()
    """The fields of a job that it is about, so that it can be said where they are set."""

    def about(self, *fields: str, meant: object = None) -> SpecError:
        """Note the fields of a job that it is about, and the value that was probably meant. Returns itself."""
        self.fields, self.meant = fields, meant
        return self


class JobError(ClusterDDPError):
    """A job that ended without a result."""


class SlurmError(ClusterDDPError):
    """A Slurm command that failed."""


class JobNotFoundError(SlurmError):
    """A job that Slurm does not know, or has forgotten."""


class RemoteError(ClusterDDPError):
    """A machine behind ssh that can't be reached, or lacks what is needed."""


class SandboxError(ClusterDDPError):
    """A sandbox that can't be made, found or removed here."""


def check_options(
    options: Iterable[str], call: str, function: Callable[..., Any], *, chosen: Mapping[str, tuple[str, str]]
) -> None:
    """Check the names of keyword arguments that a call passes on to a function of another library.

    Args:
        options: the names.
        call: the call, such as "world.wrap(model, {}=…)".
        function: the class or function that they are passed on to.
        chosen: what the call chooses itself, with what the error says and its hint.

    Raises:
        SpecError: the function has no such argument, or the call chooses it.
    """
    import inspect  # torch has it by then

    legal = [name for name in inspect.signature(function).parameters if name not in chosen]
    for name in options:
        asked = f"{call.format(name)}:"
        if name in chosen:
            raise SpecError(asked, *chosen[name])
        if name not in legal:
            found = f"{function.__name__} has no such option.{nearest(name, legal)}"
            raise SpecError(asked, found, f"its options are {', '.join(legal)}")


def nearest(word: str, legal: Iterable[str]) -> str:
    """Return a suggestion such as " Did you mean gpu?" with the legal name nearest to `word`, or "" if none is near."""
    near = nearest_name(word, legal)
    return "" if near is None else f" Did you mean {near}?"


def nearest_name(word: str, legal: Iterable[str]) -> str | None:
    """Return the legal name nearest to `word`; None if none is near."""
    import difflib  # needed for errors only

    matches = difflib.get_close_matches(word, list(legal), n=1)
    return matches[0] if matches else None


def hours(duration_s: float) -> str:
    """Return a duration as H:MM:SS."""
    minutes, rest_s = divmod(round(duration_s), 60)
    whole_h, minutes = divmod(minutes, 60)
    return f"{whole_h}:{minutes:02}:{rest_s:02}"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: "1 GPU", "2 GPUs"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def first_of(names: Sequence[str]) -> str:
    """Return the first names of many: "0.weight, 0.bias, 2.weight and 9 more"."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def printable(text: str) -> str:
    """Replace what is not printable by "?": control characters could move the cursor or change a terminal's title."""
    return "".join(character if character.isprintable() else "?" for character in text)


def one_line(text: str) -> str:
    """Return a text in one line of at most 300 characters, without any that a terminal would obey."""
    return printable(" ".join(text.split())[:_LONGEST])


def aligned(rows: Sequence[Sequence[str]], pad: Callable[[str, int], str] = str.ljust) -> list[list[str]]:
    """Return the cells of a table's rows, each as wide as the widest of its column."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [[pad(cell, width) for cell, width in zip(row, widths)] for row in rows]


@contextmanager
def exit_on_error(program: str) -> Iterator[None]:
    """Print a `ClusterDDPError` of the body as one block on stderr and exit with status 2.

    A full disk is such an error, too. What is printed to a closed stdout or stderr is dropped. End quietly, as other
    programs do, if the reader of stdout leaves first: `cluster-ddp status | head -1`.
    """
    _open_closed_streams()
    try:
        yield
        sys.stdout.flush()
    except ClusterDDPError as error:
        _exit(program, error)
    except BrokenPipeError:
        _drop_stdout()
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _drop_stdout()
        asked, hint = f"Writing {error.filename or 'to stdout'}:", "free space there: df -h, quota"
        _exit(program, ClusterDDPError(asked, f"{error.strerror}.", hint))


def _exit(program: str, error: ClusterDDPError) -> NoReturn:
    lines = f"{program}: error: {error}".splitlines()  # they may quote what others wrote
    print("\n".join(map(printable, lines)), file=sys.stderr, flush=True)
    sys.exit(USAGE_EXIT_STATUS)


def _drop_stdout() -> None:
    """Its buffer's rest would fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_closed_streams() -> None:
    """Open /dev/null where a standard stream is closed (`>&-`): a file opened later would get what is printed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            if (opened := os.open(os.devnull, os.O_RDWR)) != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
