"""What cluster_ddp raises when what it was given can't work.

    ClusterDDPError
    ├── HostlistError      text that is no Slurm hostlist
    ├── TopologyError      an environment that describes no consistent world of ranks
    ├── RendezvousError    ranks that could not find each other in time
    ├── DeviceError        GPUs that don't match the ranks
    ├── ForkError          a process in a state that must not be forked
    ├── DataError          a dataset that is missing or damaged
    ├── RunDirError        a run directory that can't be written, or is in use
    ├── CheckpointError    a checkpoint that is missing, damaged, or of another training
    ├── NonFiniteError     a non-finite loss or gradient (NaN or Inf)
    ├── SpecError          a job that can't be asked for
    │   └── ProfileError       a settings file that can't be used
    ├── JobError           a job that ended without a result
    ├── SlurmError         a Slurm command that failed
    │   └── JobNotFoundError   a job that Slurm does not know, or has forgotten
    └── SandboxError       a sandbox that can't be made, found or removed here

Each says what was asked for, what was found, and a hint that mends it. Doors print it as one short
block and exit with status 2 (`exit_on_error`); a traceback from this package means a bug.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

USAGE_EXIT_STATUS = 2


class ClusterDDPError(Exception):
    """Root of the package's errors.

    `asked` is what the caller wanted, `found` is what the cluster (or file, or environment) says,
    `hint` is what to do about it. All are whole sentences or commands, without a trailing newline.
    """

    def __init__(self, asked: str, found: str, hint: str) -> None:
        super().__init__(asked, found, hint)
        self.asked, self.found, self.hint = asked, found, hint

    def __str__(self) -> str:
        return f"{self.asked}\n  {self.found}\n  Hint: {self.hint}"


class HostlistError(ClusterDDPError):
    """Text that is no Slurm hostlist."""


class TopologyError(ClusterDDPError):
    """An environment that describes no consistent world of ranks."""


class RendezvousError(ClusterDDPError):
    """Ranks that could not find each other in time."""


class DeviceError(ClusterDDPError):
    """GPUs that don't match the ranks."""


class ForkError(ClusterDDPError):
    """A process in a state that must not be forked."""


class DataError(ClusterDDPError):
    """A dataset that is missing or damaged."""


class RunDirError(ClusterDDPError):
    """A run directory that can't be written, or that another job is using."""


class CheckpointError(ClusterDDPError):
    """A checkpoint that is missing, damaged, or of another training; a state that can't be saved."""


class NonFiniteError(ClusterDDPError):
    """A non-finite loss or gradient (NaN or Inf)."""


class SpecError(ClusterDDPError):
    """A job that can't be asked for."""


class ProfileError(SpecError):
    """A settings file that can't be used."""


class JobError(ClusterDDPError):
    """A job that ended without a result."""


class SlurmError(ClusterDDPError):
    """A Slurm command that failed."""


class JobNotFoundError(SlurmError):
    """A job that Slurm does not know, or has forgotten."""


class SandboxError(ClusterDDPError):
    """A sandbox that can't be made, found or removed here."""


def nearest(word: str, legal: Iterable[str]) -> str:
    """Such as " Did you mean gpu?", with the legal name that is nearest to `word`; empty where none is near."""
    import difflib  # only where something is wrong

    matches = difflib.get_close_matches(word, list(legal), n=1)
    return f" Did you mean {matches[0]}?" if matches else ""


def printable(text: str) -> str:
    """Text from elsewhere, as a terminal may have it: control characters would move its cursor or change its title."""
    return "".join(character if character.isprintable() else "?" for character in text)


@contextmanager
def exit_on_error(program: str) -> Iterator[None]:
    """Print a `ClusterDDPError` of the body as one block on stderr and exit with status 2."""
    try:
        yield
    except ClusterDDPError as error:
        print(f"{program}: error: {error}", file=sys.stderr, flush=True)
        sys.exit(USAGE_EXIT_STATUS)
