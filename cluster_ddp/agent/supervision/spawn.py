"""Start a command as a shell would: found on the PATH of its own environment, with the default effects of signals.

`agent` is the command of this program itself.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster_ddp.run.files import open_own

# Python ignores them, and what is ignored stays ignored in a command: `yes | head` would not end.
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
# This process's first limit of open files, if it is another one now.
_first_files: list[int] = []


def allow_many_files() -> None:
    """Let this process open many files: each task's connection is one. Commands keep the limit that it had."""
    first, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        _first_files.append(first)


def spawn(
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    log: Path | None = None,
    silent: bool = False,
    default: Sequence[int] = (),
    ignored: Sequence[int] = (),
) -> int:
    """Start a command, in which no signal is blocked. Returns its process id.

    Args:
        command: program and arguments.
        env: its environment.
        log: where its output is appended; None for this process's own.
        silent: whether it has neither input nor output.
        default: signals that have their default effect in it.
        ignored: signals that it ignores, until it has a handler. They must be blocked here, and have a handler that
            may be replaced by one that does nothing. What is pending of them is lost.

    Raises:
        OSError: the log can't be written, or there is no such program.
    """
    nowhere = range(3) if silent else range(0 if log is None else 1)
    actions: list[Any] = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_RDWR, 0) for stream in nowhere]
    target = None if log is None else open_own(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    actions += [] if target is None else [(os.POSIX_SPAWN_DUP2, target, stream) for stream in (1, 2)]
    more = {"file_actions": actions, "setsigmask": (), "setsigdef": {*default, *_IGNORED_BY_PYTHON} - {*ignored}}
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)  # it is blocked: one that comes now is held nevertheless
    try:
        return _started(command, env, more)
    finally:
        for number in ignored:
            signal.signal(number, lambda number, frame: None)
        if target is not None:
            os.close(target)


def _started(command: Sequence[str], env: Mapping[str, str], more: Mapping[str, Any]) -> int:
    """posix_spawnp(3) would look on the PATH of this process. An error that says more than "not found" counts."""
    program = command[0]
    error: OSError | None = None
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _first_files:  # srun gives its limits to the ranks; files that are open stay open meanwhile
        resource.setrlimit(resource.RLIMIT_NOFILE, (_first_files[0], files[1]))
    try:
        for folder in [""] if "/" in program else os.get_exec_path(env):  # an empty one is the working folder
            path = f"{folder}/{program}" if folder else program
            try:
                return os.posix_spawn(path, list(command), dict(env), **more)
            except (FileNotFoundError, NotADirectoryError) as found:
                if "/" in program or Path(path).exists():  # a script whose interpreter is missing
                    error = error or found
            except PermissionError as found:
                error = found
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
    raise error or FileNotFoundError(errno.ENOENT, "not on the PATH", program)


def agent() -> list[str]:
    """Return the command of this program, for its tasks: the frozen one, or the installed package's."""
    archive = getattr(__spec__.loader, "archive", None)  # of zipimport
    if archive is not None:
        return [sys.executable, "-I", "-S", str(Path(archive).absolute())]
    # Its folder: with -m, modules in the working folder would come before Python's own.
    return [sys.executable, str(Path(__file__).absolute().parents[1])]
