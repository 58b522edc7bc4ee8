"""One training under faults: its job, or jobs one after the other, and its run directory."""

from __future__ import annotations

import contextlib
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

from chaos import faults
from chaos.goodput import HeldTime
from chaos.training import SLOW_DISK
from cluster_ddp.run import journal
from cluster_ddp.run.names import Env, File, Then
from cluster_ddp.runtime.checkpoint import checkpoint_file, folder
from cluster_ddp.runtime.checkpoint.sharded import pieces_file
from cluster_ddp.runtime.failure import sick_nodes
from cluster_ddp.sandbox import cluster
from cluster_ddp.sandbox.layout import Layout
from cluster_ddp.slurm import commands, job_status
from cluster_ddp.submission.render import agent_options, render
from cluster_ddp.submission.spec import JobSpec

DISK = "disk"
"""The run directories' file system, in the folder of all of a chaos' files."""
SCRIPT = Path(__file__).with_name("training.py")
POLL_S = 0.3
KEEP = 3
LAST_EPOCHS = 3
ORPHAN_S = 40.0
"""How long after a cut node is back the srun of the former start may end a step, at most: it waits KillWait and 2 s."""
TAIL_LINES = 40


class ViolationError(Exception):
    """What must not happen has happened; the text says what, and what to look at."""


class Run:
    """A training in a folder of its own, and the job that it is at the moment.

    Args:
        layout: of the sandbox.
        folder: for the run directory and the jobs' output.
        epochs: to train.
        ranks_per_node: on each of two nodes.
        kind: of `chaos.training.KINDS`.
        restarts, spare_nodes: of the job.
    """

    def __init__(
        self,
        layout: Layout,
        folder: Path,
        epochs: int,
        ranks_per_node: int,
        kind: str,
        *,
        restarts: int = 0,
        spare_nodes: int = 0,
    ) -> None:
        self.layout, self.folder, self.disk = layout, folder, folder.parent / DISK
        self._restarts_asked, self._spare_nodes = restarts, spare_nodes
        self.run_dir = self.disk / folder.name
        folder.mkdir()
        self.epochs, self.ranks_per_node, self.kind = epochs, ranks_per_node, kind
        self.run_dir.mkdir(parents=True)
        self.slow_disk = self.run_dir / SLOW_DISK
        self.job_id = 0
        self.state = ""
        """Of the job, when it was last asked for."""
        self.since_s = time.time()
        """When it was started, or started again, as far as was seen."""
        self.restarts, self.held = 0, HeldTime()
        self.lost_nodes: list[str] = []
        self.thieves = ExitStack()
        """Held ports."""
        self.full_disk = ExitStack()
        """Keeps the disk full."""
        self.not_requeued: list[Path] = []
        """Output of jobs that stopped in time, and whose scripts should have queued them again."""
        self.bad_node = ""
        """Noted since the last start."""
        self.left_behind = ""
        """The node that the job may not get any more."""
        self.in_job = self._in_this_job = 0
        """How often its ranks were started again in their allocation, as far as was seen."""
        self._restarts_of_job, self._told, self._orphan_until_s = 0, 0, 0.0
        self._env = {**cluster.environment(layout.name), "CLUSTER_DDP_RUN_DIR": str(self.run_dir)}
        self._env["PATH"] = f"{Path(sys.executable).parent}:{self._env['PATH']}"  # with cluster-ddp

    @contextmanager
    def open(self) -> Iterator[None]:
        """Give all ports and the disk's room back in the end."""
        with self.thieves, self.full_disk:
            yield

    @property
    def way(self) -> str:
        """How it is started again after a failure, in words."""
        if not self._restarts_asked:
            return "requeued"
        return "restarts with a spare" if self._spare_nodes else "restarts"

    # The job

    def submit(self) -> None:
        """Submit it, again with the same run directory if it was there before."""
        spec = JobSpec(
            name="chaos",
            command=(sys.executable, str(SCRIPT), str(self.epochs), self.kind),
            nodes=2,
            gpus_per_node=self.ranks_per_node,
            requeue=True,
            max_requeues=1000,
            restarts=self._restarts_asked,
            spare_nodes=self._spare_nodes,
        )
        options = [f"--output={self.folder}/job-%j.log", f"--chdir={SCRIPT.parents[2]}"]
        text = render(spec, agent_options(spec), source="make chaos")
        self.job_id = commands.submit(text=text, options=options, env=self._env).job_id
        self._restarts_of_job, self._told, self.since_s = 0, 0, time.time()
        self.bad_node = self.left_behind = ""
        self._in_this_job = 0

    def note_bad_node(self, node: str) -> bool:
        """Note a node as the doctor does; False on a full disk."""
        sick_nodes.note({Env.RUN_DIR: str(self.run_dir)}, node, "chaos")
        with contextlib.suppress(FileNotFoundError):
            if f"{node} chaos\n" in (self.run_dir / File.SICK_NODES).read_text():
                self.bad_node = node
        return self.bad_node == node

    @property
    def output(self) -> Path:
        """Of the job."""
        return self.folder / f"job-{self.job_id}.log"

    def slurm(self, *argv: str) -> None:
        """Run one of Slurm's commands on the sandbox."""
        commands.run(argv, env=self._env)

    def submit_urgent(self, node: str) -> None:
        """A job of a second that takes a node from whoever is there."""
        options = ["--partition=urgent", f"--nodelist={node}", "--exclusive", "--output=/dev/null"]
        commands.submit(text="#!/bin/sh\nsleep 1\n", options=options, env=self._env)

    def status(self) -> job_status.JobStatus:
        """Of the job, now."""
        (status,) = job_status.job_statuses(self.job_id, env=self._env)
        self.state = status.state
        self.held.saw(status.state, time.monotonic())
        return status

    def note_orphan(self) -> None:
        """Note that a cut node is back, where srun may have outlived its job: only proctrack/cgroup ends it, too.

        When it gives its step up, it ends the next start's, which has the same number.
        """
        self._orphan_until_s = time.monotonic() + ORPHAN_S

    def ended(self) -> bool:
        """Whether nothing more happens to the job. One that Slurm starts again without a reason is a violation.

        A restart in its allocation since the last fault is noted, so that the next fault is not taken for its reason.
        """
        status = self.status()
        if status.restarts > self._restarts_of_job and time.monotonic() > self._orphan_until_s:
            self.fail(f"job {self.job_id} was started again, and no fault had been made that explains it")
        if self.was_restarted(status) and not status.ended:
            self.begin_again(should_requeue=False)
        return status.ended

    def was_brought_down(self, pids: set[int]) -> bool:
        """Whether the job has ended or was queued again, since it was last begun, and these ranks are gone.

        Slurm counts a restart before the ranks have heard of it: they may go on for some seconds.
        """
        status = self.status()
        return (status.ended or self.was_restarted(status)) and not (
            status.state == "COMPLETING" or {rank.pid for rank in self.ranks()} & pids
        )

    def was_restarted(self, status: job_status.JobStatus) -> bool:
        """Whether the job was queued again, or its ranks were started again in it, since it was last begun."""
        return status.restarts > self._restarts_of_job or self._restarts_in_job() > self._in_this_job

    def begin_again(self, *, should_requeue: bool) -> None:
        """After a fault: note that Slurm starts it again, or submit it again; not if it has completed.

        Args:
            should_requeue: a job that has said that it stops in time should have been queued again by its script.
        """
        status = self.status()
        before, self._in_this_job = self._in_this_job, self._restarts_in_job()
        self.in_job += self._in_this_job - before
        if status.state == "COMPLETED":
            self._restarts_of_job = status.restarts  # it may have been queued again and completed since
            return
        self.restarts += 1
        if status.ended:
            if should_requeue and "Stopped after step" in self.output.read_text(errors="replace")[self._told :]:
                self.not_requeued.append(self.output)
            is_over = status.state == "CANCELLED" or "not started again" in self.output.read_text(errors="replace")
            if self.bad_node and not self.left_behind and self._restarts_asked and not is_over:
                self.fail(f"job {self.job_id} was not requeued without {self.bad_node}")
            self.submit()
        elif self._in_this_job > before and status.restarts == self._restarts_of_job:
            self.since_s = time.time()
        else:
            has_others = "it may start on" not in self.output.read_text(errors="replace")
            if self._restarts_asked and not self._spare_nodes and has_others:  # a spare may be what is left
                self.left_behind = self.left_behind or self.bad_node
            self.bad_node = ""
            self._restarts_of_job, self.since_s = status.restarts, time.time()
            self._told = len(self.output.read_text(errors="replace")) if self.output.exists() else 0

    def _restarts_in_job(self) -> int:
        return sum(one.then == Then.RESTART for one in journal.failures(self.run_dir, str(self.job_id)))

    def ranks(self) -> list[faults.Rank]:
        """The ranks that run Python now."""
        found = faults.ranks(self.layout, self.job_id)
        if self.left_behind in {rank.node for rank in found}:
            self.fail(f"job {self.job_id} is on {self.left_behind} again, which it had left behind")
        return found

    def wait_until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Wait for it; a violation if it takes longer than that."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                self.fail(f"job {self.job_id} ({self.status()}): waited {timeout_s:g} s in vain for {what}")
            time.sleep(POLL_S)

    # Its files

    def records(self) -> list[dict[str, Any]]:
        """The whole lines of metrics.jsonl, without those of times: their number differs."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [record for record in found if record["kind"] != "steps"]

    def steps_s(self) -> float:
        """How long its steps took, if it was not disturbed: from the first record to the last."""
        records = self.records()
        return float(records[-1]["time"] - records[0]["time"])

    def has_progress(self) -> bool:
        """Whether it has recorded anything since it was last begun. If so, held ports are given back."""
        if not self.has_trained_for(0, since_s=self.since_s):
            return False
        self.thieves.close()
        return True

    def has_trained_for(self, seconds: float, *, since_s: float) -> bool:
        """Whether it has recorded for so long since a UNIX time, from its first record then: a start may be slow."""
        times = [record["time"] for record in self.records() if record["time"] >= since_s]
        return bool(times) and bool(times[-1] - times[0] >= seconds)

    def is_nearly_done(self) -> bool:
        """Whether it is in its last epochs, so that a fault may come too late to disturb it."""
        records = self.records()
        return bool(records) and records[-1].get("epoch", self.epochs) >= self.epochs - LAST_EPOCHS

    def where(self) -> str:
        """How far it is, in words."""
        if not (records := self.records()):
            return "before the first record"
        last = {key: records[-1][key] for key in ("epoch", "step") if key in records[-1]}
        said = " ".join(f"{key} {value}" for key, value in last.items())
        return f"{time.time() - records[-1]['time']:.1f} s after {records[-1]['kind']} {said}".rstrip()

    def check_checkpoints(self) -> None:
        """The newest checkpoint must be whole, and none must ever have been found damaged."""
        where = self.run_dir / File.CHECKPOINTS
        if damaged := sorted(where.glob("*.damaged")):
            self.fail(f"damaged checkpoints: {', '.join(map(str, damaged))}")
        if files := folder.CheckpointFolder(where, keep=KEEP).files():
            try:
                checkpoint_file.digest(files[0])
                pieces_file.check_all(files[0])
            except (checkpoint_file.DamagedError, OSError) as error:
                self.fail(f"the newest checkpoint, {files[0]}, can't be read: {error}")

    def leftovers(self) -> list[str]:
        """Temporary files, and pieces files without a checkpoint."""
        pieces = self.run_dir.rglob(f"*{pieces_file.SUFFIX}")
        orphans = (path for path in pieces if not path.with_suffix(".pt").exists())
        return [path.name for path in (*self.run_dir.rglob("*.tmp"), *orphans)]

    def clean_up_after_fault(self, rng: random.Random) -> None:
        """Lost nodes come back after a while, a full disk has room again, and a slow disk recovers or not."""
        for node in self.lost_nodes:
            time.sleep(rng.uniform(0, 4))
            faults.bring_back_node(self.layout, node)
        self.lost_nodes.clear()
        self.full_disk.close()
        if rng.random() < 0.5:
            with contextlib.suppress(FileNotFoundError):
                self.slow_disk.unlink()

    def fail(self, what: str) -> NoReturn:
        """Raise the violation, with the end of the job's output."""
        lines = self.output.read_text(errors="replace").splitlines() if self.output.exists() else ["(none)"]
        end = "\n".join(f"    {line}" for line in lines[-TAIL_LINES:])
        raise ViolationError(f"{self.folder.name}: {what}\n  {self.output} ends with:\n{end}")
