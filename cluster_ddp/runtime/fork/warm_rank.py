"""`python -m cluster_ddp.runtime.fork.warm_rank FD …`: imports torch, waits, becomes a rank when its agent says so.

The words after FD are those of the rank: `script.py ARGUMENTS …` or `-m module ARGUMENTS …`. FD is a connected socket.
On it, this process says that it is ready; or why it can't be, and ends. The agent sends one line of JSON, with the
words of the rank, changes of the environment, and its own standard streams; until then this process prints nothing. If
the agent ends, or needs no rank, the connection ends, and so does this process. See agent/task/warm_process.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster_ddp import processes
from cluster_ddp.agent.task import signals
from cluster_ddp.agent.task.warm_process import READY
from cluster_ddp.errors import ForkError, SpecError
from cluster_ddp.run.names import Env
from cluster_ddp.runtime.fork import forked_program
from cluster_ddp.runtime.fork.forked_program import ForkedProgram

_MOST = 4096
_FORKS = ["-m", "cluster_ddp.runtime.fork"]
_OWN_MEMORY = Path("/proc/self/oom_score_adj")
_IMPORTS_TORCH = re.compile(r"^\s*(import|from)\s+torch\b", re.MULTILINE)


def main() -> None:
    """Import, wait, and run what the agent says."""
    for number in signals.WARNINGS:  # Slurm may tell all processes: this one has nothing to save
        signal.signal(number, signal.SIG_IGN)
    own_score = _kill_first()
    with socket.socket(fileno=int(sys.argv[1])) as agent:
        if why := _imported(sys.argv[2:]):
            agent.sendall(why.encode(errors="replace"))
            sys.exit(1)
        agent.sendall(READY)
        said = _heard(agent)
    _kill_first(own_score)
    os.environ.update(said["env"])
    for number in signals.WARNINGS:
        signal.signal(number, signal.SIG_IGN if said["ignore_warnings"] else signal.SIG_DFL)
    if said["words"][:2] != _FORKS:
        processes.rename(f"rank {os.environ['RANK']}")
        forked_program.set_blas_threads(len(os.sched_getaffinity(0)))
    program = ForkedProgram.parse(said["words"])
    program.prepare()
    program.run()


def _kill_first(score: str = "1000") -> str:
    """Let the kernel end this process first when memory is short (proc(5), oom_score_adj). Returns its score before."""
    before = ""
    with contextlib.suppress(OSError):
        before = _OWN_MEMORY.read_text()
        _OWN_MEMORY.write_text(score)
    return before


def _imported(words: Sequence[str]) -> str:
    """Import what a rank needs. Returns why that can't be, or would change what the rank does; empty if it is done."""
    forks = words[:2] == _FORKS
    try:
        program = ForkedProgram.parse(words[words.index("--") + 1 :] if forks else words)
        if why := "" if program.is_module else _not_as_anew(Path(program.name)):
            return why
        program.prepare()  # its folder comes first where modules are looked for
        forked_program.load(os.environ.get(Env.PRELOAD, "").split(), forks=forks)
    except (ForkError, SpecError) as error:
        return error.found
    except Exception as error:  # such as a broken torch: the rank's own Python says it, if it needs that
        return f"{type(error).__name__}: {error}"
    return ""


def _not_as_anew(script: Path) -> str:
    """Why a script must begin in a new Python; empty if it need not."""
    if zipfile.is_zipfile(script) or script.suffix == ".pyc":
        return f"{script} is no source file"
    text = script.read_text(errors="replace")
    first = _IMPORTS_TORCH.search(text)
    if first and "environ" in text[: first.start()]:
        return f"{script} uses os.environ before it imports torch, which reads it"
    return ""


def _heard(agent: socket.socket) -> Any:
    """Wait for the line, and take the standard streams that come with it.

    Raises:
        SystemExit: none comes.
    """
    line, streams, _, _ = socket.recv_fds(agent, _MOST, 3)
    for stream, descriptor in enumerate(streams):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    while not line.endswith(b"\n"):
        line += (more := agent.recv(_MOST))
        if not more:
            sys.exit(1)
    return json.loads(line)


if __name__ == "__main__":
    main()
