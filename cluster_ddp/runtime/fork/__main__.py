"""`python -m cluster_ddp.runtime.fork --ranks N -- script.py …`: one process imports torch, then forks N ranks.

srun --ntasks-per-node=1 python -m cluster_ddp.runtime.fork --ranks 8 -- train.py --epochs 3     on every node
python -m cluster_ddp.runtime.fork --ranks 2 -- -m package.module --epochs 3                     on this machine

Importing torch needs a second of CPU time or more; ranks that share few CPUs wait for the imports of all. Here modules
are imported once. Each rank has the environment that srun would give it, and runs the script as `python script.py`
would. `cluster-ddp submit --launcher fork` uses this program. CLUSTER_DDP_PRELOAD names more modules to import once.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from cluster_ddp import processes
from cluster_ddp.agent.channel import Client
from cluster_ddp.agent.option_types import count
from cluster_ddp.agent.rank_end import End
from cluster_ddp.agent.rank_notes import Notes
from cluster_ddp.agent.task import signals
from cluster_ddp.agent.task.no_process_group import GroupCheck
from cluster_ddp.agent.task.supervisor import Supervisor, say
from cluster_ddp.errors import exit_on_error
from cluster_ddp.run.names import EXIT_STOPPED, Env, File
from cluster_ddp.runtime import process_exit
from cluster_ddp.runtime.device import binding
from cluster_ddp.runtime.fork import forked_program
from cluster_ddp.runtime.fork.forked_program import ForkedProgram
from cluster_ddp.runtime.fork.rank_environments import NodeRanks
from cluster_ddp.runtime.run_dir.fenced_writes import open_own
from cluster_ddp.slurm.variables import node_name

PROGRAM = "python -m cluster_ddp.runtime.fork"


def main(argv: Sequence[str] | None = None) -> None:
    """Fork the ranks, keep them, and exit with the status of `Supervisor.keep`. In a rank, run the script."""
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--") if "--" in words else len(words)
    arguments = _parser().parse_args(words[:at])
    with exit_on_error(PROGRAM):
        program = ForkedProgram.parse(words[at + 1 :])
        node = NodeRanks.from_environ(os.environ, arguments.ranks)
        node.environ(0, os.getpid())  # report its errors once, not in each rank
        # They were ignored: importing this package has changed that. From here on, one that comes waits.
        ignored = [number for number in signals.WARNINGS if signal.getsignal(number) != signal.SIG_DFL]
        if node.num_nodes == 1:
            os.environ.setdefault(Env.SECRET, os.urandom(32).hex())
        signals.hold(signals.WARNINGS)
        if Env.NOTES in os.environ:  # started by an agent, which may be killed
            processes.end_with_parent(signal.SIGTERM, os.getppid())
        program.prepare()
        forked_program.load(os.environ.get(Env.PRELOAD, "").split())
    handlers = {number: signal.SIG_IGN if number in ignored else signal.SIG_DFL for number in signals.WARNINGS}
    _fork(node, program, arguments.log_dir, handlers)


def _fork(
    node: NodeRanks, program: ForkedProgram, log_dir: Path | None, handlers: Mapping[signal.Signals, Any]
) -> NoReturn:
    client = Client.of_job(os.environ)
    ranks = [node.rank(local_rank) for local_rank in range(node.ranks)]
    client.say("hello", ranks=ranks, host=node_name(os.environ), task=None)
    signals.hold()
    early = signals.taken(signals.WARNINGS)
    for number, handler in handlers.items():  # now: a rank seems to catch what this process does when it is forked
        signal.signal(number, handler)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    shared, pids = dict(sys.modules), dict[int, int]()
    for local_rank, rank in enumerate(ranks):
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            client.close()
            processes.end_with_parent(signal.SIGKILL, parent)
            _become(node, local_rank, log_dir)
            signals.let_come()
            process_exit.after(program.run, shared)
        pids[rank] = pid
    notes = Notes(Path(os.environ.get(Env.NOTES) or os.devnull))
    world_size = node.num_nodes * node.ranks
    checks = {rank: GroupCheck(pid, rank, world_size, notes, client) for rank, pid in pids.items()}
    supervisor = Supervisor(notes, lambda end: _ended(client, checks, end))
    for rank, pid in pids.items():
        supervisor.adopt(rank, pid)
    for number in early:
        supervisor.received(number)
    status = supervisor.keep(lambda: min(check.look() for check in checks.values()))
    os._exit(status)  # nothing is left to clean up, and torch's own cleanup is slow


def _ended(client: Client, checks: Mapping[int, GroupCheck], end: End) -> None:
    """Tell the job and, since its log may be all that one reads, say how a rank failed."""
    if end.status == 0 and end.rank is not None:
        checks[end.rank].ended()
    client.say("ended", **end._asdict())
    if end.status not in (0, EXIT_STOPPED, 128 + signal.SIGTERM):
        say(f"rank {end.rank} {end.how}.")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage="%(prog)s --ranks N [--log-dir PATH] -- SCRIPT | -m MODULE [ARGUMENTS …]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--ranks", type=count, required=True, metavar="N", help="number of ranks on each node")
    parser.add_argument("--log-dir", type=Path, metavar="PATH", help="append each rank's output to PATH/task-RANK.log")
    return parser


def _become(node: NodeRanks, local_rank: int, log_dir: Path | None) -> None:
    """Make this process a rank: set its environment, log, CPUs, signals and random numbers."""
    processes.rename(f"rank {node.rank(local_rank)}")
    for name, value in node.environ(local_rank, os.getpid()).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if log_dir is not None:
        log = log_dir / File.TASK_LOG.format(node.rank(local_rank))
        processes.write_output_to(open_own(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT))
    cpus = binding.share_of_cpus(os.sched_getaffinity(0), local_rank, node.ranks, os.environ)
    os.sched_setaffinity(0, cpus)
    forked_program.reinit_after_fork(len(cpus))


if __name__ == "__main__":
    main()
