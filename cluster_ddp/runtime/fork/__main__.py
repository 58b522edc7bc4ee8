"""`python -m cluster_ddp.runtime.fork --ranks N -- script.py …`: one process imports torch, then forks N ranks.

srun --ntasks-per-node=1 python -m cluster_ddp.runtime.fork --ranks 8 -- train.py --epochs 3     on every node
python -m cluster_ddp.runtime.fork --ranks 2 -- -m package.module --epochs 3                     on this machine

Importing torch needs a second of CPU time or more; ranks that share few CPUs wait for the imports of all. Here modules
are imported once. Each rank has the environment that srun would give it, and runs the script as `python script.py`
would. `cluster-ddp submit --launcher fork` uses this program. CLUSTER_DDP_PRELOAD names more modules to import once.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster_ddp.contract import Env, File
from cluster_ddp.errors import exit_on_error
from cluster_ddp.files import open_own
from cluster_ddp.runtime.fork import affinity, preload, rank_exit
from cluster_ddp.runtime.fork.agent import SIGNALS, WARNINGS, Agent
from cluster_ddp.runtime.fork.target import Target
from cluster_ddp.slurm.rank_env import NodeRanks

PROGRAM = "python -m cluster_ddp.runtime.fork"
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # prctl(2)


def main(argv: Sequence[str] | None = None) -> None:
    """Fork the ranks, watch them, and exit with the status of `Agent.watch`. In a rank, run the script."""
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--") if "--" in words else len(words)
    arguments = _parser().parse_args(words[:at])
    with exit_on_error(PROGRAM):
        target = Target.parse(words[at + 1 :])
        node = NodeRanks.from_environ(os.environ, arguments.ranks)
        node.environ(0, os.getpid())  # report its errors once, not in each rank
        # They were ignored: importing this package has changed that.
        begin_ignored = [number for number in WARNINGS if signal.getsignal(number) != signal.SIG_DFL]
        if node.num_nodes == 1:
            os.environ.setdefault(Env.SECRET, os.urandom(32).hex())
        _keep(*WARNINGS)
        target.prepare()
        preload.load(os.environ.get(Env.PRELOAD, "").split())
    terminated = signal.getsignal(signal.SIGTERM)
    _keep(*SIGNALS)
    early = _came()
    for number in WARNINGS:  # ranks start with the agent's own dispositions; they are blocked here
        signal.signal(number, signal.SIG_IGN if number in begin_ignored else signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    pids: dict[int, int] = {}
    shared = dict(sys.modules)
    for local_rank in range(arguments.ranks):
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            _die_with(parent)
            signal.signal(signal.SIGTERM, terminated)
            _become(node, local_rank, arguments.log_dir)
            rank_exit.after(target.run, shared)
        pids[pid] = node.rank(local_rank)
    _keep(*WARNINGS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the ranks, which decide
    status = Agent(pids, os.environ, early).watch()
    os._exit(status)  # nothing is left to clean up, and torch's own cleanup is slow


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage="%(prog)s --ranks N [--log-dir PATH] -- SCRIPT | -m MODULE [ARGUMENTS …]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--ranks", type=_count, required=True, metavar="N", help="number of ranks on each node")
    parser.add_argument("--log-dir", type=Path, metavar="PATH", help="append each rank's output to PATH/task-RANK.log")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def _keep(*numbers: signal.Signals) -> None:
    """Block signals until the agent takes them. The handler shows other processes, in /proc, that they are caught."""
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    for number in numbers:
        signal.signal(number, lambda number, frame: None)


def _came() -> list[int]:
    """The warnings that have come so far. The agent passes them on."""
    came = []
    while received := signal.sigtimedwait(WARNINGS, 0):
        came.append(received.si_signo)
    return came


def _die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _become(node: NodeRanks, local_rank: int, log_dir: Path | None) -> None:
    """Make this process a rank: set its environment, log, CPUs, signals and random numbers."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, f"rank {node.rank(local_rank)}".encode())  # what ps and top show
    for name, value in node.environ(local_rank, os.getpid()).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if log_dir is not None:
        log = open_own(log_dir / File.TASK_LOG.format(node.rank(local_rank)), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
    cpus = affinity.share(os.sched_getaffinity(0), local_rank, node.ranks, os.environ)
    os.sched_setaffinity(0, cpus)
    preload.reinit_after_fork(len(cpus))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


if __name__ == "__main__":
    main()
