"""Processes of ranks: started with an environment of their own, watched, and ended in any case. Standard library only.

`local` starts them on this machine, `through_srun` starts one srun, whose tasks are the ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_POLL_S = 0.05
_OURS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK")
_PREFIXES = ("SLURM_", "MASTER_", "TORCHELASTIC_", "SUBMITIT_", "CLUSTER_DDP_")


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How some processes ended."""

    statuses: list[int | None]
    """As the shell tells them (128 + n where a signal ended it); None of one that was killed here."""
    outputs: list[str]
    """What each wrote to stdout and stderr."""
    ended_at: float
    """When the last one ended by itself: seconds of UNIX time."""
    timed_out: bool


def local(
    command: Sequence[str],
    ranks: int,
    folder: Path,
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    hangs: Collection[int] = (),
) -> Ended:
    """Run a command once for each rank, all on this machine.

    Args:
        command: the same for all.
        ranks: how many; one alone has no world in its environment.
        folder: for their output.
        timeout_s: after which all are killed.
        env: variables to set besides.
        hangs: ranks that won't end; they are killed once the others have ended.
    """
    common = {**_without_world(os.environ), "PYTHONPATH": str(ROOT), **(env or {})}
    places = [{}] if ranks == 1 else _places(ranks)
    return _run([list(command)] * ranks, [{**common, **place} for place in places], folder, timeout_s, hangs)


def through_srun(
    arguments: Sequence[str], command: Sequence[str], folder: Path, *, timeout_s: float, env: Mapping[str, str]
) -> Ended:
    """Run a command as the tasks of one srun; its status and its output are the only ones."""
    srun = ["srun", "--label", "--unbuffered", "--kill-on-bad-exit=1", *arguments, *command]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return _run([srun], [{**os.environ, "PYTHONPATH": path, **env}], folder, timeout_s, ())


def output_of(command: Sequence[str], *, timeout_s: float, in_job: bool = False) -> str:
    """What a command prints, or why it prints nothing; with Slurm's variables where it is to be a step of this job."""
    env = dict(os.environ) if in_job else _without_world(os.environ)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=env)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return (done.stdout + done.stderr).strip()


def _run(
    commands: list[list[str]],
    environments: list[dict[str, str]],
    folder: Path,
    timeout_s: float,
    hangs: Collection[int],
) -> Ended:
    folder.mkdir(parents=True, exist_ok=True)
    logs = [folder / f"output-{i}.txt" for i in range(len(commands))]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command, environment, log in zip(commands, environments, logs):
            processes.append(_start(command, environment, log))
        awaited = [process for i, process in enumerate(processes) if i not in hangs]
        timed_out = not _wait(awaited, time.monotonic() + timeout_s)
        ended_at = time.time()
        codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            _kill(process)
    statuses = [None if code is None else code if code >= 0 else 128 - code for code in codes]
    outputs = [log.read_text(errors="replace") for log in logs]
    return Ended(statuses=statuses, outputs=outputs, ended_at=ended_at, timed_out=timed_out)


def _start(command: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with open(log, "wb") as file:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )


def _wait(processes: list[subprocess.Popen[bytes]], deadline: float) -> bool:
    """Whether all have ended by then."""
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started; where it has ended already, what it has left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _without_world(env: Mapping[str, str]) -> dict[str, str]:
    """Without another world's ranks and without Slurm's: what is started here is no task of a step."""
    return {name: value for name, value in env.items() if name not in _OURS and not name.startswith(_PREFIXES)}


def _places(ranks: int) -> list[dict[str, str]]:
    """The environment of each rank, as one would set it by hand."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return [{**world, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def python(script: str, *arguments: str) -> list[str]:
    """The command that runs one of `scripts/`."""
    return [sys.executable, str(Path(__file__).parent / "scripts" / script), *arguments]
