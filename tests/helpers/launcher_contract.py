"""What every launcher must do, whoever starts the ranks and supervises them: `launchers.py` has the jobs.

A user's view alone: the states that `cluster-ddp status` shows, exit statuses, logs, `ps`, and job.jsonl.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster import label_of
from launchers import HELPERS, SIGNALS, Job
from slowness import scaled, wait_until


def completed(job: Job) -> None:
    assert (job.end["state"], job.end["exit_status"]) == ("COMPLETED", 0), job.logs
    assert not job.end["failure"], job.logs
    assert "Failed first" not in job.log
    assert "have not met" not in job.logs and "trained alone" not in job.logs, job.logs


def failed(status: int, how: str = "", *, never: str = "nothing") -> Callable[[Job], None]:
    """The job ends with rank 1's status and names it alone, in its log and in `status`; and the log that says more."""

    def check(job: Job) -> None:
        assert (job.end["state"], job.end["exit_status"]) == ("FAILED", status), job.logs
        found = re.findall(r"^Failed first, with status (\d+): (.*)\n  Its log: (.*)$", job.log, re.MULTILINE)
        assert [one[0] for one in found] == [str(status)], job.logs
        (_, said, log), (_, host) = found[0], job.rank(1)
        assert re.match(rf"rank 1 on {re.escape(host)}(: .*)?{re.escape(how)}$", said), said
        assert never not in said, said
        assert said == job.end["failure"]
        assert "rank 1, start" in Path(log).read_text()

    return check


def names_rank_1(job: Job) -> None:
    """Or its node, where nobody is left who could tell more: not a rank that others have ended."""
    assert job.end["state"] == "FAILED" and job.end["exit_status"] != 0, job.logs
    (said,) = re.findall(r"^Failed first, with status \d+: (.*)$", job.log, re.MULTILINE) or [""]
    assert re.search(rf"\b(rank|task) 1\b|\b{job.rank(1)[1]}\b", said), job.logs
    assert not re.search(r"\b(rank|task) 0\b", said), job.logs
    assert said == job.end["failure"]


def lost_parent(job: Job) -> None:
    names_rank_1(job)
    if job.launcher.startswith("local"):
        nothing_is_left(job)


def lost_keeper(job: Job) -> None:
    if not job.launcher.startswith("local"):
        names_rank_1(job)
    assert job.end["state"] == "FAILED", job.logs
    if job.launcher != "srun":
        nothing_is_left(job)


def nothing_is_left(job: Job) -> None:
    """On a cluster Slurm ends the ranks; the sandbox's, without control groups, may lose sight of an orphan."""
    pids = [pid for pid, _ in map(job.rank, (0, 1))]
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), said=lambda: "ranks are left behind")


def lost_node(job: Job) -> None:
    assert job.end["state"] == "NODE_FAIL", job.logs
    said = f"{job.rank(1)[1]} is lost (node failure)"
    assert said in job.end["failure"], job.end
    assert "rank 0" not in job.end["failure"], job.end


def started_again(job: Job) -> None:
    """All ranks have saved, the slower one, too; the logs go on."""
    assert job.launcher.startswith("local") or job.end["requeues"] == 1, job.end  # `--local` counts none
    assert {path.name for path in job.run_dir.glob("saved-*")} == {"saved-0", "saved-1"}
    assert {path.name for path in job.run_dir.glob("begun1-*")} == {"begun1-0", "begun1-1"}
    for start in (0, 1):
        assert all(job.logs.count(f"rank {rank}, start {start}\n") == 1 for rank in (0, 1)), job.logs


def cancelled(job: Job) -> None:
    assert job.end["state"] == "CANCELLED", job.logs
    assert not job.end["requeues"], job.end
    assert not job.end["failure"] and "Failed first" not in job.log, job.logs


def ended(job: Job) -> None:
    """TERM waits for no handler."""
    assert (job.end["state"], job.end["exit_status"], job.end["requeues"]) == ("FAILED", 143, 0), job.logs


def logs(job: Job) -> None:
    """Each rank has a file of its own."""
    said = {path.name: path.read_text() for path in job.run_dir.glob("task-*.log")}
    assert sorted(said) == ["task-0.log", "task-1.log"], said
    for rank in (0, 1):
        begun = [one for one in (0, 1) if f"rank {one}, start 0\n" in said[f"task-{rank}.log"]]
        assert begun == [rank], said


def command_lines(job: Job) -> None:
    """A rank's is the user's own; a forked one's ends so. None above it holds a program's text."""
    assert job.commands, job.logs
    *python, script, word = job.commands[0]
    assert (script, word) == ("the ranks.py", "hears"), job.commands
    assert "fork" in job.launcher or [Path(one).name for one in python] == ["python"], job.commands
    assert not [word for words in job.commands for word in words if "\n" in word], job.commands


def heard(*when: str) -> Callable[[Job], None]:
    """Both ranks got the signals that were sent then."""

    def check(job: Job) -> None:
        sent = {f"{name} {one}" for one in when for name in SIGNALS[job.launcher, job.name][one]}
        assert sent <= job.heard, f"not {sorted(sent - job.heard)}\n{job.logs}"

    return check


def record(job: Job) -> None:
    """job.jsonl, as everybody reads it: the end of the last start."""
    from cluster_ddp.run import journal

    found = journal.last_end(job.run_dir)
    assert found is not None
    assert found.job == label_of(job.run_dir)
    assert (found.state, found.status) == (job.end["state"], job.end["exit_status"])
    assert found.start == (1 if job.name == "stops" else 0)
    assert found.failure == (job.end["failure"] or "")
    assert (found.first is None) == (job.name == "meets") and (found.first is None or found.first.rank == 1)


@dataclass(frozen=True)
class Check:
    """What is asked of a job."""

    job: str
    holds: Callable[[Job], None]
    sent: str = ""
    """The signals that it needs."""

    def is_asked(self, launcher: str) -> bool:
        return not self.sent or self.sent in SIGNALS[launcher, self.job]


CHECKS = {
    "status 0": Check("meets", completed),
    "logs": Check("raises", logs),
    "exception": Check("raises", failed(1, "ValueError: the one that matters")),
    "status 3": Check("exits", failed(3)),
    "SIGKILL": Check("killed", failed(137, "killed by SIGKILL")),
    "SIGSEGV": Check("crashes", failed(139, "killed by SIGSEGV")),
    "SIGABRT at exit": Check("aborts", failed(134)),
    "memory": Check("memory", failed(137, "killed by the kernel for memory")),
    "status 0 while others compute": Check("leaves", names_rank_1),
    "a rank's parent is killed": Check("parent", lost_parent),
    "a node's keeper is killed": Check("keeper", lost_keeper),
    "a node is lost": Check("lost", lost_node),
    "TERM before a handler": Check("ended", ended),
    "a warning before a handler": Check("stops", heard("before"), "before"),
    "a warning and TERM": Check("stops", heard("after", "finally"), "after"),
    "status 75": Check("stops", started_again),
    "a second start fails in another way": Check("stops", failed(3, never="ValueError")),
    "HUP, ALRM before a handler": Check("hears", heard("before"), "before"),
    "HUP, INT, ALRM": Check("hears", heard("after"), "after"),
    "the batch process is warned": Check("hears", heard("to the batch process"), "to the batch process"),
    "status 0 after signals": Check("hears", completed),
    "ps": Check("hears", command_lines),
    "cancelled": Check("cancelled", cancelled),
    "a training that is warned early": Check("trains", completed),
    "job.jsonl": Check("meets", record),
    "job.jsonl of a failure": Check("raises", record),
    "job.jsonl of a second start": Check("stops", record),
}


def parameters(launchers: dict[str, tuple[str, ...]], *marks: pytest.MarkDecorator) -> Iterator[object]:
    """Launchers and what is asked of each."""
    for launcher, jobs in launchers.items():
        for name, check in CHECKS.items():
            if check.job in jobs and check.is_asked(launcher):
                yield pytest.param(launcher, name, id=f"{launcher}: {name}", marks=marks)


def programs(folder: Path) -> None:
    """Put what the ranks run into the folder that jobs are submitted from."""
    scaled(1)  # it measures once: now, and not beside the jobs or in each thread
    (folder / "the ranks.py").write_text((HELPERS / "launched.py").read_text())
    (folder / "mypkg").mkdir()
    (folder / "mypkg" / "train.py").write_text((HELPERS / "launched_training.py").read_text())
