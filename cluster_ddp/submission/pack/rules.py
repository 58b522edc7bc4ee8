"""What the fields of a packed array say of each other."""

from __future__ import annotations

import re
from typing import Any

from cluster_ddp.agent.launch_options import mebibytes
from cluster_ddp.errors import counted
from cluster_ddp.option_form import flag
from cluster_ddp.submission.validation import field_error


def check(asked: Any, *, tasks: int) -> None:
    """Check the fields of a packed array, which has so many tasks.

    Raises:
        SpecError: one contradicts another.
    """
    if asked.pack is None:
        return
    for name, value, alone in (("nodes", asked.node_range, "1"), ("spare_nodes", asked.spare_nodes, 0)):
        if value != alone:
            hint = f"{flag(name)} {alone}; or leave out --pack: each task is then a job"
            raise field_error(name, value, f"{alone} with pack: the tasks of a job share one node", hint=hint)
    if mebibytes(asked.max_mem):
        legal = "left out with pack: a job has the memory of several tasks"
        raise field_error("max_mem", asked.max_mem, legal, hint="leave out --max-mem or --pack")
    _check_shares(asked, tasks)
    if asked.mem is not None and not int(asked.mem.rstrip("KMGT")):
        raise field_error("mem", asked.mem, "a task's part of the node's memory with pack", hint="--mem 8G")
    if asked.signal is not None and not re.match(r"(R:)?(SIG)?(USR1|USR2|10|12)(@|$)", asked.signal):
        raise field_error("signal", asked.signal, "USR1 or USR2 with pack: srun passes on only those")


def _check_shares(asked: Any, tasks: int) -> None:
    pack, jobs = asked.pack, asked.jobs or 1
    numbers, percent, _ = asked.array.partition("%")
    if percent:
        hint = f"--array {numbers} --pack {pack} --jobs {jobs}: {pack * jobs} at a time"
        raise field_error("array", asked.array, "without % and a number with pack", hint=hint)
    if jobs > tasks:
        hint = f"--jobs {max(1, tasks // pack)}"
        raise field_error("jobs", jobs, f"at most the number of tasks, {tasks}", hint=hint)
    most = -(-tasks // jobs)
    if pack > most:
        legal = f"at most {most}, the number of tasks in a job ({tasks} in {counted(jobs, 'job')})"
        raise field_error("pack", pack, legal, hint=f"--pack {most}")
