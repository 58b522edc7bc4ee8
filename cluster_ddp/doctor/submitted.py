"""The doctor as a job of its own, with the options of the job that it is asked about."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cluster_ddp.argument_parser import Parser
from cluster_ddp.errors import SpecError
from cluster_ddp.jobs.watch import follow
from cluster_ddp.submission import submit_plan
from cluster_ddp.submission.cli import command_line
from cluster_ddp.submission.planning import Plan
from cluster_ddp.submit import ReferenceJob

_NOT_FOR_IT = ("--array", "--resume", "--on", "--watch", "--test-only")
# With these, the job's own Python is the first on its PATH.
_OTHER_PYTHON = ("--venv", "--conda-env", "--modules", "--setup", "--container", "--container-image")
_TIME_MIN = "10"


def examine(options: Sequence[str], own: Sequence[str], parser: Parser) -> int:
    """Submit the doctor, follow it, and return its exit status.

    Raises:
        ClusterDDPError: the options are wrong, or the cluster can't run such a job.
    """
    names = [word.partition("=")[0] for word in options]
    for name in _NOT_FOR_IT:
        if name in names:
            raise SpecError(
                f"Submitting the doctor with {name}:", "it is one job, which is followed.", f"leave out {name}"
            )
    python = "python" if set(names) & set(_OTHER_PYTHON) else sys.executable
    chosen = [
        *([] if "--name" in names else ["--name", "doctor"]),
        *([] if "--time" in names else ["--time", _TIME_MIN]),
        *("--restarts", "0", "--spare-nodes", "0", "--hang-restart-s", "0"),  # what it finds is its result
    ]
    words = [*options, *chosen, "--", python, "-m", "cluster_ddp.doctor", *own]

    def submit(plan: Plan, watch: bool) -> int:
        jobs = submit_plan.submit(plan)
        return follow(jobs, show=lambda line: print(line, flush=True))

    return command_line.run(
        words,
        program=parser.prog,
        description=str(__doc__),
        reference=ReferenceJob(),
        submit=submit,
        others=parser.option_names(),
    )
