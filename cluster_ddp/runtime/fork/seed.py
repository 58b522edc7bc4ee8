"""The process that imports torch once, and forks a rank whenever its agent says so. See agent/task/seed_process.py.

Its words are a descriptor, and those of the ranks: `script.py ARGUMENTS …` or `-m module ARGUMENTS …`. The descriptor
is a connected socket. On it, this process says that it is ready; or why it can't be, and ends. For each rank, the agent
sends one line of JSON, with its words, changes of the environment, its CPUs, and its standard streams; this process
answers with its process id. If the agent ends, or needs no more ranks, the connection ends, and so does this process.

Importing torch needs a second of CPU time or more: ranks that share few CPUs wait for the imports of all.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import socket
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from cluster_ddp import processes
from cluster_ddp.agent.supervision import signals
from cluster_ddp.agent.task.seed_process import READY
from cluster_ddp.errors import SpecError
from cluster_ddp.run.names import SEED, Env
from cluster_ddp.runtime import process_exit
from cluster_ddp.runtime.fork import forked_program
from cluster_ddp.runtime.fork.forked_program import ForkedProgram

_MOST = 4096
_IMPORTS_TORCH = re.compile(r"^\s*(import|from)\s+torch\b", re.MULTILINE)
_USES_ENVIRON = re.compile(r"\b(environ|putenv|getenv)\b")
_POLL_S = 0.001


def main() -> None:
    """Import, and fork what the agent asks for."""
    agents = os.getppid()
    processes.rename(SEED)
    for number in (*signals.WARNINGS, signal.SIGINT):  # all processes may be told: this one has nothing to save
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as agent:
        if why := _imported(sys.argv[2:]):
            agent.sendall(why.encode(errors="replace"))
            sys.exit(1)
        shared = dict(sys.modules)
        agent.sendall(READY)
        while (asked := _heard(agent)) is not None:
            rank, streams = asked
            begin = functools.partial(_begin, agent, rank, streams, agents, shared)
            agent.sendall(f"{_forked(begin)}\n".encode())
            for stream in streams:
                os.close(stream)


def _begin(
    agent: socket.socket,
    rank: Any,
    streams: Sequence[int],
    agents: int,
    shared: Mapping[str, ModuleType],
    parent: int,
) -> NoReturn:
    """Become a rank of an agent, whose process id is `agents`, once the parent has ended; run the script."""
    agent.close()
    _become(rank, streams)
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    processes.end_with_parent(signal.SIGKILL, agents)
    program = ForkedProgram.parse(rank["words"])
    program.prepare()
    process_exit.after(program.run, shared)


def _imported(words: list[str]) -> str:
    """Import what a rank needs. Returns why that can't be, or would change what the rank does; empty if it is done."""
    try:
        program = ForkedProgram.parse(words)
        if why := "" if program.is_module else _not_as_anew(Path(program.name)):
            return why
        program.prepare()  # its folder comes first where modules are looked for
        return forked_program.load(os.environ.get(Env.PRELOAD, "").split())
    except SpecError as error:
        return error.found
    except Exception as error:  # such as a broken torch: the rank's own Python says it, if it needs that
        return f"{type(error).__name__}: {error}"


def _not_as_anew(script: Path) -> str:
    """Why a script must begin in a new Python; empty if it need not."""
    if zipfile.is_zipfile(script) or script.suffix == ".pyc":
        return f"{script} is no source file"
    text = script.read_text(errors="replace")
    first = _IMPORTS_TORCH.search(text)
    if first and _USES_ENVIRON.search(text, 0, first.start()):
        return f"{script} uses os.environ before it imports torch, which reads it"
    return ""


def _heard(agent: socket.socket) -> tuple[Any, list[int]] | None:
    """Wait for a line, and the standard streams that come with it; None if no more comes."""
    line, streams, _, _ = socket.recv_fds(agent, _MOST, 3)
    while not line.endswith(b"\n"):
        line += (more := agent.recv(_MOST))
        if not more:
            return None
    return json.loads(line), streams


def _forked(begin: Callable[[int], NoReturn]) -> str:
    """Fork a process whose parent ends at once: then it is the agent's. Returns its process id, or why there is none.

    In that process, call `begin` with its parent's process id; it does not return.
    """
    mine, theirs = os.pipe()
    try:
        between = os.fork()
        if between == 0:
            parent = os.getpid()
            try:
                pid = os.fork()
            except OSError:
                os._exit(1)
            if pid == 0:
                os.close(mine)
                os.close(theirs)
                begin(parent)
            os.write(theirs, str(pid).encode())
            os._exit(0)
        os.waitpid(between, 0)
    except OSError:
        pass
    os.close(theirs)
    answer = os.read(mine, _MOST)
    os.close(mine)
    return answer.decode() or "no process can be forked"


def _become(rank: Any, streams: Sequence[int]) -> None:
    """Make this process a rank: its streams, environment, CPUs, signals and random numbers."""
    for stream, descriptor in enumerate(streams):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    for name, value in rank["env"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    # Without a blank: Slurm's proctrack/linuxproc finds no process whose name has one, so suspends and ends none.
    processes.rename(f"rank-{os.environ['RANK']}")
    os.sched_setaffinity(0, rank["cpus"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in signals.WARNINGS:
        signal.signal(number, signal.SIG_IGN if rank["ignore_warnings"] else signal.SIG_DFL)
    forked_program.reinit_after_fork(len(rank["cpus"]))
