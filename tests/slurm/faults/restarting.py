"""Jobs of a user's own batch script, `cluster-ddp launch --restarts`, that are to meet faults."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections.abc import Mapping
from pathlib import Path

from chaos import faults
from chaos.faults import Rank
from cluster import POLL_S, Place, output
from paced_run import PACED, TRAINING, Run
from slowness import wait_until

from cluster_ddp import processes
from cluster_ddp.run import journal
from cluster_ddp.run.journal import Failed
from cluster_ddp.slurm import commands
from cluster_ddp.slurm.job_status import JobStatus

SCRIPT = """#!/bin/bash
#SBATCH --job-name=restarts --ntasks-per-node=1 --cpus-per-task=1 --time=20 --output=/dev/null
run_dir="$PWD/{name}-$SLURM_JOB_ID"
mkdir -p "$run_dir" && exec >>"$run_dir/job.log" 2>&1
exec cluster-ddp launch --run-dir "$run_dir" {launch}
"""


class Job(Run):
    """A job of a user's own script, with a run directory."""

    def end(self) -> JobStatus:
        """Wait for its end."""
        wait_until(lambda: self.status().ended, said=lambda: f"{self.status()}\n{output(self.path)}", pause_s=POLL_S)
        return self.status()

    def failures(self) -> list[Failed]:
        """Those of the run's last job."""
        return journal.failures(self.path)

    def wait_for_failures(self, count: int) -> Failed:
        """Wait until a start has failed so often; returns the last failure."""
        self.wait_for(lambda: len(self.failures()) >= count)
        return self.failures()[-1]

    def ranks(self, start: int, *, count: int = 2) -> list[Rank]:
        """Wait until the ranks of a start train; returns their processes. Those of earlier starts may still live."""
        self.wait_for(lambda: len(self._ranks(start)) == count)
        return self._ranks(start)

    def _ranks(self, start: int) -> list[Rank]:
        begun = {one["start"]: one["time"] for one in journal.events(self.path) if one["event"] == "start"}
        if start not in begun:
            return []
        found = faults.ranks(self.place.slurm.layout, int(self.job))  # those that are forked have another environment
        return [rank for rank in found if begun[start] <= began_s(rank.pid) < begun.get(start + 1, float("inf"))]

    def batch_host(self) -> str:
        """The node of the batch script."""
        return self._asked(r"BatchHost=(\S+)")

    def nodes_asked_for(self) -> int:
        """How many nodes the job has, or asks for while it is pending."""
        return int(self._asked(r"NumNodes=(\d+)"))

    def _asked(self, pattern: str) -> str:
        found = re.search(pattern, commands.run(["scontrol", "show", "job", self.job], env=self.place.slurm.env))
        assert found, self.status()
        return found[1]


def began_s(pid: int) -> float:
    """When a process was started, in seconds of UNIX time; 0 if it has ended."""
    up_s = float(Path("/proc/uptime").read_text().split()[0])
    found = processes.running(pid)
    return 0.0 if found is None else time.time() - up_s + found.ticks / os.sysconf("SC_CLK_TCK")


def launch(
    place: Place,
    *options: str,
    command: tuple[str, ...] = (*PACED, *TRAINING),
    nodes: int = 2,
    sbatch: tuple[str, ...] = ("--gres=gpu:1",),
    launcher: str = "",
    name: str = "restarts",
    env: Mapping[str, object] = {},
) -> Job:
    """Submit a command with options of `launch`; `env` becomes environment variables, in JSON unless they are texts."""
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in env.items()}
    launched = ("--launcher", launcher or place.slurm.launcher, *options, "--", *command)
    script = SCRIPT.format(name=name, launch=shlex.join(launched))
    where = (f"--chdir={place.folder}", f"--nodes={nodes}", *sbatch)
    submitted = commands.submit(text=script, options=where, env={**place.slurm.env, **texts})
    return Job(place, place.folder / f"{name}-{submitted.job_id}")
