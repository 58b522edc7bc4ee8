"""Where the ranks of a run hung, after the fact: from the files of its run directory. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from cluster_ddp.errors import ClusterDDPError, RunDirError, printable
from cluster_ddp.jobs import run_record
from cluster_ddp.jobs.find_runs import of_run
from cluster_ddp.run.files import tail
from cluster_ddp.run.names import File
from cluster_ddp.runtime.failure import hang_verdict
from cluster_ddp.submission.job import describe


def autopsy(run_dir: Path, *, as_json: bool = False) -> str:
    """Return the verdict of a run's last hang, and the file with each rank's stacks; as one line of JSON on request.

    Raises:
        RunDirError: it is no run directory, or no rank has written in it where it was.
    """
    asked = f"Where the ranks of {run_dir} hung:"
    if not run_dir.is_dir():
        raise RunDirError(asked, "there is no such directory.", "cluster-ddp status")
    answers = hang_verdict.read(run_dir)
    verdict = tail(run_dir / File.HANG).rstrip()  # which the ranks have written, unless one was aborted later
    if not answers and not verdict:
        found = f"no rank has written where it was. They do after --hang-warning-s without a step.{_state(run_dir)}"
        raise RunDirError(asked, found, f"see what the ranks printed: cluster-ddp logs {run_dir}")
    files = [run_dir / File.STACK.format(one.rank) for one in answers]
    verdict = verdict or f"{hang_verdict.verdict(answers)}."
    if as_json:
        ranks = [{**asdict(one), "stacks": str(file)} for one, file in zip(answers, files)]
        return json.dumps({"verdict": verdict, "ranks": ranks})
    stacks = (f"  stacks of rank {one.rank} on {one.host}: {file}" for one, file in zip(answers, files))
    return "\n".join(map(printable, [*verdict.splitlines(), *stacks]))


def _state(run_dir: Path) -> str:
    """What Slurm says of the job; "" without one."""
    try:
        job = of_run(run_record.read(run_dir))
        statuses = job.scheduler.statuses(job.id, job.cluster, run_dir)
    except ClusterDDPError:
        return ""
    return "".join(f"\n{describe(job.id, status)}." for status in statuses)
