"""After a failed start: finds nodes that are lost or at fault, asks `failures` what follows, gives lost nodes back."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence

from cluster_ddp.agent import first_failure, launch_env
from cluster_ddp.agent.job import job_log, slurm_commands
from cluster_ddp.agent.job.restart import failures, job_nodes
from cluster_ddp.agent.job.restart.failures import Decision, History
from cluster_ddp.agent.job.restart.job_nodes import BEFORE, LOST, UNKNOWN, Nodes, Reason
from cluster_ddp.agent.job.task_reports import TaskReports
from cluster_ddp.agent.launch_options import AgentOptions, mebibytes
from cluster_ddp.agent.rank_end import End
from cluster_ddp.errors import counted
from cluster_ddp.run import outcome
from cluster_ddp.run.names import Kind, Then
from cluster_ddp.run.outcome import Failure, Outcome
from cluster_ddp.run.start import NO_CHECKPOINT, Failed
from cluster_ddp.slurm.variables import Variables

_LONGEST_REASON = 120
_LESS_MEMORY = """
  Hint: world.shard(…, global_batch=N) and world.accumulate let the next start halve the batches of each rank, and keep
  the updates; or give a smaller batch_size, or wrap the model with strategy="fsdp\""""


class Recovery:
    """What a job knows for its restarts. Its nodes are known only where a restart may choose among them.

    `examine` lets spares examine themselves; it returns node -> what is wrong, for those that can't be used.
    """

    def __init__(
        self,
        options: AgentOptions,
        env: Mapping[str, str],
        history: History,
        nodes: Nodes = UNKNOWN,
        slurmd_port: int = 0,
        examine: Callable[[Sequence[str]], Mapping[str, str]] = lambda nodes: {},
    ) -> None:
        self._options, self._env, self._history, self._slurmd_port = options, env, history, slurmd_port
        self._examine = examine
        before = {node: BEFORE for one in history.failures for node in one.without}
        # Of a range, all that Slurm has given: one that was lost may be back, and the requeue has excluded the others.
        self.nodes = (None if nodes.least else nodes.without(before)) or nodes
        """Those of the next start."""
        self._allocated = len(nodes.allocated)
        self.needed = nodes.least or self._allocated
        """With how many nodes a requeue may start."""
        self._requeues = Variables(env).requeues()

    def decide(self, ended: Outcome, reports: TaskReports) -> Decision:
        """Return what follows a start that failed, and note it."""
        out = {**self._new_sick(), **dict.fromkeys(filter(None, ended.lost_nodes), LOST)}  # lost, or at fault
        now = self._failed(ended, reports, out)
        self.give_back(ended.lost_nodes)  # at once: Slurm ends the job soon
        found = self._on_healthy_nodes(now, out)
        is_sruns = ended.first is not None and ended.first.host == first_failure.SRUN and not reports.has_begun
        if found.then == Then.RESTART and self.nodes.training and is_sruns:
            # Slurm makes no step. After a job was made smaller and requeued, 22.05 has forgotten its GPUs.
            found = Decision(Then.REQUEUE, left_out=found.left_out)
        if self._options.restarts:
            found = self._noted(found, now, ended)
            self._say(found, now)
        else:
            self._history.end(ended)
        if found.nodes is not None:
            self.nodes = found.nodes
        return found

    def lost(self, reports: TaskReports) -> tuple[str, ...]:
        """Return which nodes are lost: an agent is gone, and Slurm's daemon can't be reached."""
        gone = (node for node in reports.hosts_of_gone if node in self.nodes.training)
        return tuple(node for node in gone if not launch_env.listens(node, self._slurmd_port))

    def note_gone(self, spares: Sequence[str]) -> None:
        """Leave out spares whose agents are gone; give back those that are lost."""
        new = [node for node in spares if node in self.nodes.spares]
        lost = [node for node in new if not launch_env.listens(node, self._slurmd_port)]
        out = {node: LOST if node in lost else Reason(outcome.AGENT_KILLED) for node in new}
        self.nodes = self.nodes._replace(left_out={**self.nodes.left_out, **out})
        for node, why in out.items():
            job_log.say(f"Left out from now on: {node}, a spare: {why.words}")
        self.give_back(lost)

    def give_back(self, lost: Sequence[str]) -> None:
        """Take lost nodes out of the job: else Slurm would end it once it learns that they are lost."""
        if not (lost := [node for node in lost if node in self.nodes.allocated]):
            return
        left = self.nodes.losing(lost)
        if refusal := job_nodes.resize(left, self._env):
            job_log.say(
                f"warning: Slurm did not let job {self._env['SLURM_JOB_ID']} give {', '.join(lost)} back: {refusal}\n"
                "  It ends the job once it finds the node lost. The job is requeued then, if it may be."
            )
        else:
            self.nodes = left
            self._history.note_nodes(len(left.allocated))

    def left_behind(self, found: Decision) -> dict[str, str]:
        """Return which nodes a requeue is to exclude -> why. `found` is what follows the last start."""
        sick = {node: why for node, why in self.nodes.left_out.items() if why.is_at_fault}
        return {node: why.words for node, why in {**sick, **self._new_sick(), **found.left_out}.items()}

    def _new_sick(self) -> dict[str, Reason]:
        """Nodes of the job that its ranks have found at fault since the last call."""
        sick = self._history.new_sick_nodes()
        return {node: Reason(why) for node, why in sick.items() if node in self.nodes.allocated}

    def memory(self, start: int) -> int | None:
        """With how much memory of each node the job continues after this start, in MiB; None if that stays."""
        return next((one.mem_mb for one in self._history.failures[-1:] if one.start == start), None)

    @property
    def nodes_given_back(self) -> str | None:
        """How many nodes the job asks for in a requeue, if it has given some back: a number, or a range."""
        asked = self._options.nodes or str(self._allocated)
        return asked if len(self.nodes.allocated) < self._allocated else None

    def _on_healthy_nodes(self, now: Failed, out: Mapping[str, Reason]) -> Decision:
        """Return what follows, with spares that have examined themselves."""
        before, restarts = self._history.failures, self._options.restarts
        while True:
            found = failures.what_follows(now, before, out, restarts, self.nodes, self._has_others)
            new = [node for node in found.nodes.training if node not in self.nodes.training] if found.nodes else []
            if not (faults := self._examine(new) if new else {}):
                return found
            out = {**out, **{node: Reason(fault) for node, fault in faults.items()}}

    def _noted(self, found: Decision, now: Failed, ended: Outcome) -> Decision:
        """Note the failure, and what follows. Where it can't be noted, Slurm's count of requeues is the limit."""
        now = now._replace(then=found.then, without=tuple(found.left_out))
        is_noted = self._history.end(ended._replace(then=found.then), now)
        most = self._options.restarts
        if found.then != Then.REQUEUE or is_noted or self._requeues < most:
            return found
        why = f"requeued {self._requeues} times, and failures are not counted where they can't be noted"
        return Decision(Then.END, f"{why} (--restarts {most})")

    def _failed(self, ended: Outcome, reports: TaskReports, out: Mapping[str, Reason]) -> Failed:
        first, end = ended.first, reports.end_of(ended.first)
        checkpoint, lost_s = self._history.newest_checkpoint(reports.began)
        first = first or Failure(None, "", ended.status, ended.failure)
        node = "" if end is not None and end.speaks_for_all else first.host
        if out and (node not in out or first.kind == Kind.NODE):
            node = node if node in out else next(iter(out))  # those that wait for a node fail in its place
            first = first._replace(rank=None, words=out[node].words, kind=Kind.NODE)
        return Failed(
            time=ended.time,
            start=ended.start,
            node=node,
            rank=first.rank,
            words=first.words,
            kind=first.kind,
            step=None if end is None else end.step,
            checkpoint=checkpoint,
            on_all_ranks=reports.failed_everywhere(first.words),
            lost_s=None if lost_s is None else round(lost_s, 1),
            suspended=reports.is_just_resumed,
            micro_batch=self._smaller_micro_batch(end) if first.kind == Kind.GPU_MEMORY else None,
            mem_mb=self._more_memory() if first.kind == Kind.HOST_MEMORY else None,
        )

    def _smaller_micro_batch(self, end: End | None) -> int | None:
        return end and failures.smaller_micro_batch(end.micro_batch, self._history.micro_batch)

    def _more_memory(self) -> int | None:
        most_mb = mebibytes(self._options.max_mem)
        if not most_mb:
            return None
        had_mb = Variables(self._env).integer("SLURM_MEM_PER_NODE")
        if not had_mb:
            job_log.say("warning: --max-mem has no effect: the job asks for no memory per node (--mem).")
            return None
        return failures.more_memory(had_mb, most_mb, self._history.failures)

    def _has_others(self, out: Mapping[str, Reason]) -> bool:
        """Whether the job's partition may have nodes enough for it if these are left out, too."""
        before = {node for one in self._history.failures for node in one.without}
        usable = slurm_commands.usable_nodes(self._env)
        return usable is None or len(usable - {*out} - before) >= self.needed

    def _say(self, found: Decision, now: Failed) -> None:
        for node, why in found.left_out.items():
            job_log.say(f"Left out from now on: {node}: {why.words}")
        if now.kind == Kind.GPU_HARDWARE and now.node and "SLURM_JOB_ID" in self._env:
            reason = f"Reason={now.words[:_LONGEST_REASON]}"
            drain = shlex.join(["scontrol", "update", f"NodeName={now.node}", "State=DRAIN", reason])
            job_log.say(f"  For the support of your cluster: {drain}")
        if found.then == Then.RESTART:
            what = Failure(now.rank, now.node, 0, now.words).text.rstrip(".") or "the end of srun, which gave no reason"
            where = {NO_CHECKPOINT: ", from the beginning,", "": ""}.get(now.checkpoint, f", from {now.checkpoint},")
            if found.nodes is not None and len(found.nodes.training) < len(self.nodes.training):
                where = f", on {counted(len(found.nodes.training), 'node')}{where}"
            what += " (just after the job was suspended, which does not count)" if now.suspended else ""
            lost = "" if now.lost_s is None else f"; {now.lost_s:.0f} s of the training are lost"
            smaller = "" if now.micro_batch is None else f" Micro-batches have at most {now.micro_batch} samples now."
            job_log.say(f"Starting again in the allocation{where} after {what}{lost}.{smaller}")
        elif found.then == Then.REQUEUE and now.mem_mb is not None:
            job_log.say(f"The memory of a node was too small: the job continues with {now.mem_mb} MB.")
        elif found.why:
            has_none = now.kind == Kind.GPU_MEMORY and self._history.micro_batch is None
            hint = _LESS_MEMORY if has_none else ""
            job_log.say(f"error: {found.why}; not started again.{hint}")
