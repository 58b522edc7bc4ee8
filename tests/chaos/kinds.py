"""The kinds of faults: what a bad day on a cluster has to offer."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from chaos import disk, faults
from chaos.run import Run
from cluster_ddp import processes
from cluster_ddp.errors import SlurmError
from cluster_ddp.slurm.port import candidates

# slurmctld saves its state some seconds after a change: that a younger job has started may be forgotten, and it is
# started again, which is Slurm's business.
_SAVED_AFTER = "00:00:08"
_START_TIMEOUT_S = 300.0
_NEXT_JOBS = 3
"""How many job ids ahead ports are stolen: other jobs may be submitted before the next of ours."""


@dataclass(frozen=True)
class Fault:
    """One kind."""

    name: str
    """For people."""
    make: Callable[[Run, random.Random], str | None]
    """Makes it and says on what; None where there was nothing to disturb."""
    is_fatal: bool = True
    """Whether the job must end, or be started again, of it."""
    is_warning: bool = False
    """Whether the job is asked to stop and to queue itself again."""
    needs_disk: bool = False
    """Whether the run directories must be on a file system of their own."""
    often: bool = False
    """Whether it is quick enough to be made twice as often."""


def kill_rank(run: Run, rng: random.Random) -> str | None:
    """SIGKILL, as from the kernel when memory is short."""
    if not (ranks := run.ranks()):
        return None
    victim = rng.choice(ranks)
    faults.send([victim.pid], signal.SIGKILL)
    return f"rank {victim.rank} on {victim.node}"


def kill_all(run: Run, rng: random.Random) -> str | None:
    """SIGKILL to all ranks at once."""
    if not (ranks := run.ranks()):
        return None
    faults.send([rank.pid for rank in ranks], signal.SIGKILL)
    return f"{len(ranks)} ranks"


def hold_rank(run: Run, rng: random.Random) -> str | None:
    """One rank stands still for a while."""
    if not (ranks := run.ranks()):
        return None
    victim, for_s = rng.choice(ranks), rng.uniform(0.5, 3)
    faults.hold(victim.pid, for_s=for_s)
    return f"rank {victim.rank} on {victim.node} for {for_s:.1f} s"


def lose_node(run: Run, rng: random.Random) -> str | None:
    """A node dies. Two times of three the site's health check tells the controller at once, else it must find out."""
    if not (ranks := run.ranks()):
        return None
    node, told = rng.choice(sorted({rank.node for rank in ranks})), rng.random() < 2 / 3
    faults.lose_node(run.layout, node)
    run.lost_nodes.append(node)
    if told:
        run.slurm("scontrol", "update", f"nodename={node}", "state=down", "reason=chaos")
    return f"{node}{', which slurmctld is told' if told else ''}"


def bad_node(run: Run, rng: random.Random) -> str | None:
    """A node is found at fault, as the doctor notes it, and a rank dies there: the job leaves the node behind."""
    if not (ranks := run.ranks()):
        return None
    victim = rng.choice(ranks)
    if not run.note_bad_node(victim.node):
        return None
    faults.send([victim.pid], signal.SIGKILL)
    return victim.node


def cut_node_for_a_moment(run: Run, rng: random.Random) -> str | None:
    """A node's link is down for some seconds, and its ranks live on. With --restarts, it is lost after four."""
    if not (ranks := run.ranks()):
        return None
    node, for_s = rng.choice(ranks).node, rng.uniform(1, 6 if run.way == "requeued" else 3)
    faults.cut_node(run.layout, node, for_s=for_s)
    return f"{node} for {for_s:.1f} s"


def cut_node(run: Run, rng: random.Random) -> str | None:
    """A node's link is down until slurmctld gives the node up; its ranks live on, beside those of the next start."""
    if not (ranks := run.ranks()):
        return None
    node, begun_s = rng.choice(ranks).node, time.monotonic()
    faults.cut_node(run.layout, node)
    run.note_orphan()
    return f"{node}, given up and back after {time.monotonic() - begun_s:.0f} s"


def controller_away(run: Run, rng: random.Random) -> str | None:
    """slurmctld is away when the job wants to be queued again."""
    while (status := run.status()).elapsed < _SAVED_AFTER and not status.ended:
        time.sleep(0.5)
    if not (ranks := run.ranks()):
        return None
    away_s = rng.uniform(20, 60)
    faults.lose_controller(run.layout)
    faults.send([rank.pid for rank in ranks], signal.SIGUSR1)
    time.sleep(away_s)
    faults.bring_back_controller(run.layout)
    return f"for {away_s:.0f} s after a warning"


def early_warning(run: Run, rng: random.Random) -> str | None:
    """The job is started again, and warned before its ranks are there, or before they can stop."""
    if not (ranks := run.ranks()):
        return None
    pids, after_s = {rank.pid for rank in ranks}, rng.uniform(0, 5)
    run.slurm("scontrol", "requeue", str(run.job_id))
    run.wait_until(lambda: run.was_brought_down(pids) and run.state == "RUNNING", _START_TIMEOUT_S, "a new start")
    run.begin_again(should_requeue=False)
    time.sleep(after_s)
    try:
        run.slurm("scancel", "--signal=USR1", str(run.job_id))
    except SlurmError:
        if not run.status().ended:  # all epochs were done
            raise
    return f"{after_s:.1f} s after a new start"


def full_disk(run: Run, rng: random.Random) -> str | None:
    """No room is left, until the job has ended. A save under way has its room, and then frees an old one."""
    if not run.ranks():
        return None
    run.full_disk.enter_context(disk.kept_full(run.disk))
    return "until the job's end"


def blocked_disk(run: Run, rng: random.Random) -> str | None:
    """Whatever writes waits for a while."""
    for_s = rng.uniform(1, 10)
    disk.block(run.disk, for_s=for_s)
    return f"for {for_s:.1f} s"


def preempt(run: Run, rng: random.Random) -> str | None:
    """A job of more priority wants one of the nodes."""
    if not (ranks := run.ranks()):
        return None
    node = rng.choice(ranks).node
    run.submit_urgent(node)
    return f"on {node}"


def port_theft(run: Run, rng: random.Random) -> str | None:
    """The ports that the next start will try first are taken on all nodes; then all ranks are killed."""
    if not run.ranks():
        return None
    run.thieves.close()
    ports = [candidates(run.job_id + i)[0] for i in range(_NEXT_JOBS + 1)]
    for node in run.layout.node_names:
        for port in ports:
            try:
                run.thieves.enter_context(faults.squatted_port(run.layout, node, port))
            except OSError:  # the ranks are meeting there at this moment
                run.thieves.close()
                return None
    kill_all(run, rng)
    return f"{ports[0]} to {ports[-1]} on all nodes, then all ranks killed"


def slow_disk(run: Run, rng: random.Random) -> str | None:
    """Every fsync takes long, until after one of the next faults."""
    seconds = rng.uniform(0.2, 2)
    run.slow_disk.write_text(f"{seconds:.2f}")
    return f"{seconds:.2f} s for each fsync"


def restart_controller(run: Run, rng: random.Random) -> str | None:
    """slurmctld dies and is started again."""
    while (status := run.status()).elapsed < _SAVED_AFTER and not status.ended:
        time.sleep(0.5)
    after_s = rng.uniform(0, 3)
    faults.restart_controller(run.layout, after_s=after_s)
    return f"down for {after_s:.1f} s"


def cancel_step(run: Run, rng: random.Random) -> str | None:
    """The step of the ranks is cancelled, and the job is not."""
    if not (ranks := run.ranks()):
        return None
    step = f"{run.job_id}.{processes.environment(ranks[0].pid).get('SLURM_STEP_ID', '0')}"
    run.slurm("scancel", step)
    return f"scancel {step}"


def _slurm(*argv: str) -> Callable[[Run, random.Random], str | None]:
    """A fault that is one of Slurm's commands, with the job's id for JOB."""

    def make(run: Run, rng: random.Random) -> str | None:
        if not run.ranks():
            return None
        command = [word.replace("JOB", str(run.job_id)) for word in argv]
        try:
            run.slurm(*command)
        except SlurmError:
            if run.status().ended:
                return None
            raise
        return " ".join(command)

    return make


FAULTS = (
    Fault("rank killed", kill_rank, often=True),
    Fault("all ranks killed", kill_all, often=True),
    Fault("rank held", hold_rank, is_fatal=False, often=True),
    Fault("node lost", lose_node),
    Fault("preempted", preempt),
    Fault("bad node", bad_node),
    Fault("requeued", _slurm("scontrol", "requeue", "JOB")),
    Fault("warned", _slurm("scancel", "--signal=USR1", "JOB"), is_warning=True, often=True),
    Fault("warned early", early_warning, is_warning=True),
    Fault("step cancelled", cancel_step),
    Fault("job cancelled", _slurm("scancel", "JOB")),
    Fault("controller restarted", restart_controller, is_fatal=False),
    Fault("node cut for a moment", cut_node_for_a_moment, is_fatal=False),
    Fault("node cut", cut_node),
    Fault("controller away at the requeue", controller_away, is_warning=True),
    Fault("disk full to the end", full_disk, needs_disk=True),
    Fault("file system blocked", blocked_disk, is_fatal=False, needs_disk=True),
    Fault("port stolen", port_theft),
    Fault("slow disk", slow_disk, is_fatal=False, often=True),
)
