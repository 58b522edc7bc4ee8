"""A job of Slurm, on its batch host: starts the ranks, says how they ended, and has the job requeued if it may be."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from cluster_ddp import processes
from cluster_ddp.agent import grid, notes, outcome, place, threads
from cluster_ddp.agent.job import ranks_and_gpus, report, requeue, step, tasks
from cluster_ddp.agent.job.hearing import Hearing
from cluster_ddp.agent.job.restart import fence
from cluster_ddp.agent.job.restart import nodes as allocated
from cluster_ddp.agent.job.restart.history import History
from cluster_ddp.agent.job.restart.recovery import Recovery
from cluster_ddp.agent.job.restart.verdict import Verdict
from cluster_ddp.agent.job.tasks import Tasks
from cluster_ddp.agent.notes import Notes
from cluster_ddp.agent.options import Options
from cluster_ddp.agent.outcome import Outcome
from cluster_ddp.contract import RESTART, Env, Then
from cluster_ddp.errors import SpecError
from cluster_ddp.slurm.variables import Variables, node_name

_ASK_S = 60.0


class Job:
    """A job of Slurm, from one requeue to the next.

    Args:
        options: of the job.
        env: the environment of the batch script, or of a shell of salloc, completed.
        is_on_node: whether this process is on the job's first node, as a batch script is.

    Raises:
        ClusterDDPError: the environment contradicts itself, or all ports for the rendezvous are in use.
    """

    def __init__(self, options: Options, env: Mapping[str, str], *, is_on_node: bool = True) -> None:
        self.label = Variables(env).job_label()
        self.folder = place.run_dir(options, self.label)
        self.options = options._replace(command=tuple(grid.filled(options.command, options.grid, env)))
        self._host, self._is_on_node = node_name(env), is_on_node
        self._requeues = int(env.get("SLURM_RESTART_COUNT") or 0)  # unset at first; 0 from Slurm 26.11 on
        self.size = place.shape(options, env)
        self.added = {
            **place.on_slurm(options, self.size, self.label),
            **place.meeting(env, self._host, self._requeues),
        }
        """Variables that the tasks get beside those of the batch script."""
        self.env = {**env, **self.added}
        # Without --run-dir, a script may have set the variable itself: the ranks' records are there, but no logs.
        self._records = self.folder or (Path(env[Env.RUN_DIR]) if env.get(Env.RUN_DIR) else None)
        self._tasks_number = self.size.world_size if options.launcher == "srun" else self.size.nodes
        self._early: list[int] = []  # signals that came before the ranks were started
        self._left_logs: list[Path] = []  # of tasks that nobody can end

    def run(self) -> int:
        """Start the ranks, wait for their end, and do what follows from it. Returns the exit status.

        Raises:
            SpecError: srun would refuse to start so many ranks, or is not there.
        """
        if remark := ranks_and_gpus.remark(self.size, self.options):
            report.say(remark)
        if shutil.which("srun", path=self.env.get("PATH")) is None:
            hint = "after module purge, load Slurm's module again; or extend the PATH"
            raise SpecError("Starting the ranks of the job:", "srun is not on the PATH.", hint)
        history = History(self._records, is_first=not self._requeues, shared=self.options.share)
        self._start = self._requeues + history.restarts
        if self._requeues:
            report.say(f"{RESTART}{self._start} of job {self.env['SLURM_JOB_ID']}.")
        for number in tasks.HELD:
            signal.signal(number, lambda number, frame: self._early.append(number))
        with notes.folder() as folder, self._job_times(folder / "job-times"):
            _leave_nothing(folder, ranks_too=self.env.get("ENVIRONMENT") != "BATCH")
            self.env |= step.staged(self.options, self.size, self.env)
            ended, follows, recovery = self._run(Notes(folder), history)
        step.clean_up(self.options, self.env, ended.status)
        self._finish(ended, follows, recovery)
        report.show_how_to_resume(ended.status, self.env)
        return ended.status

    def _run(self, noted: Notes, history: History) -> tuple[Outcome, Verdict, Recovery]:
        """Start the ranks, again as often as they may be. Returns how the last start ended, and what follows."""
        ignore_warnings, ports = step.configuration(self.env)
        stays = self.options.restarts > 0
        nodes = allocated.of_job(self.env, self.options.spare_nodes) if stays else None
        recovery = Recovery(self.options, self.env, history, nodes)
        with contextlib.closing(Tasks(noted, self.env, ports, stays=stays, note_gone=recovery.note_gone)) as running:
            # Nodes may not know a login node by its name; Slurm tells each task where srun was started.
            self.env[Env.CHANNEL] = f"{self._host if self._is_on_node else ''}:{running.port}"
            recovery.examine = running.examine
            self._watch_spares(running, recovery)
            on, starts_again = self._on(recovery), False
            while True:
                recovery.begin()
                hearing = Hearing(self.options.launcher, self.size.world_size, self.folder, tasks=self._tasks_number)
                self._begin(running, hearing, on, recovery, ignore_warnings, starts_again=starts_again)
                self._status = running.wait()
                ended = hearing.judge(Outcome(self.label, self._start, "COMPLETED", self._status))
                ended = ended._replace(lost_nodes=recovery.lost(hearing) or ended.lost_nodes)
                report.show(ended, hearing.log_of(ended.first), self.env)
                follows = Verdict(Then.END)
                if ended.state == "FAILED":
                    follows = recovery.after(ended, self._start, hearing)
                self._left_logs = hearing.logs_of_gone()
                starts_again = (
                    follows.then == Then.RESTART and running.can_start_again and self._on(recovery).nodes == on.nodes
                )
                if not starts_again:
                    running.end()
                if follows.then != Then.RESTART:
                    return ended, follows, recovery
                self._note(ended._replace(requeued=True))
                on, self._start = self._on(recovery)._replace(is_beside=True), self._start + 1

    def _on(self, recovery: Recovery) -> step.On:
        return step.On(() if recovery.nodes is None else recovery.nodes.training)

    def _begin(
        self,
        running: Tasks,
        hearing: Hearing,
        on: step.On,
        recovery: Recovery,
        ignore_warnings: bool,
        *,
        starts_again: bool,
    ) -> None:
        """Begin a start: in the step that runs, or in a new one."""
        host = on.nodes[0] if on.nodes else self._host
        self.env |= place.meeting(self.env, host, self._start)
        if starts_again:
            running.again(hearing, self.env)
            return
        if self._records is not None:
            with contextlib.suppress(OSError):  # such as on a full disk
                fence.take_over(self._records, self.env, logs=self._left_logs)
        options = self.options._replace(doctor=self.options.doctor and not on.is_beside)
        command = step.srun(
            options, self.size, self.folder, ignore_warnings=ignore_warnings, on=on, stays=running.stays
        )
        env = step.step_env(self.options, self.size, self.env, on)
        running.start(command, env, hearing, self._early)
        self._early = []

    def _watch_spares(self, running: Tasks, recovery: Recovery) -> None:
        if recovery.nodes is not None and (spares := recovery.nodes.spares):
            on = step.On(spares)
            env = step.step_env(self.options, self.size, self.env, on)
            running.watch(step.spares(self.options, self.size, spares), env, spares)

    def _finish(self, ended: Outcome, follows: Verdict, recovery: Recovery) -> None:
        """Have the job requeued, if it may be."""
        why = f"Failed with status {ended.status}" if follows.then == Then.REQUEUE else ""
        if ended.state == "STOPPED" and self._status == 0:
            report.say(requeue.NOT_FINISHED)
        elif ended.state == "STOPPED" and requeue.may_restart(self._requeues, self.options.max_requeues):
            why = "Stopped in time"
        if why:
            self._note(ended._replace(requeued=True))
            leave, nodes = recovery.left_behind(follows), recovery.nodes_given_back
            if requeue.ask_for(self.label, why, self._start + 1, self.env, leave=leave, nodes=nodes):
                return
        self._note(ended)

    def _note(self, ended: Outcome) -> None:
        if self._records is not None:
            with contextlib.suppress(OSError):  # a full disk must not cost the requeue
                outcome.write(self._records, ended, shared=self.options.share)

    def command(self, *, ignore_warnings: bool = False) -> list[str]:
        """Return the command that starts the tasks; see `task.run`."""
        return step.srun(self.options, self.size, self.folder, ignore_warnings=ignore_warnings)

    @contextlib.contextmanager
    def _job_times(self, path: Path) -> Iterator[None]:
        """During the body, ask Slurm for the job's start and end, which may change; rank 0 reads the answer."""
        over = threading.Event()
        said = requeue.ask_times(self.label, self.env, tries=3)
        if times := requeue.parse_times(said):
            self.env |= {"SLURM_JOB_START_TIME": str(times[0]), "SLURM_JOB_END_TIME": str(times[1])}
        self.env[Env.JOB_TIMES] = str(path)

        def write(answer: str) -> None:
            with contextlib.suppress(OSError):  # a full disk: the ranks know the times of the start
                path.write_text(f"{answer}\n")

        def ask() -> None:
            while not over.wait(_ASK_S):
                if answer := requeue.ask_times(self.label, self.env):
                    write(answer)

        write(said)
        threads.start(ask, "times")
        try:
            yield
        finally:
            over.set()


def _leave_nothing(folder: Path, *, ranks_too: bool) -> None:
    """TERM ends this process as it did before, but removes a folder first.

    Args:
        folder: to remove.
        ranks_too: whether srun gets TERM, too, and kills the ranks. Of a batch job Slurm itself ends them, and gives
            them more time; an allocation of salloc goes on.
    """

    def end(number: int, frame: object) -> None:
        for child in processes.children(os.getpid()) if ranks_too else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)
        shutil.rmtree(folder, ignore_errors=True)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, end)
