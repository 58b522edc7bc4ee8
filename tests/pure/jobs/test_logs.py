"""`cluster-ddp logs` and `cancel`: run directories as a submission makes them, Slurm as a stand-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from slowness import LIMIT_S, scaled
from stand_ins import FakeSlurm, fake_slurm

from cluster_ddp.cli import cancel, logs, report, status
from cluster_ddp.doctor import __main__ as doctor
from cluster_ddp.jobs import find_runs, run_record, watch
from cluster_ddp.run import journal
from cluster_ddp.run.names import Then
from cluster_ddp.run.outcome import Failure, Outcome
from cluster_ddp.runtime.failure import hang_verdict
from cluster_ddp.submission import job, planning, resume, submit_plan
from cluster_ddp.submission.spec import JobSpec

__all__ = ["fake_slurm"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_slurm: FakeSlurm) -> Path:
    path = tmp_path / "it's a folder"
    path.mkdir()
    monkeypatch.chdir(path)
    monkeypatch.setattr(watch, "_LOG_POLL_S", 0.0)
    monkeypatch.setattr(job, "_FIRST_POLL_S", 0.0)
    return path


def submit(**fields) -> list[Path]:
    spec = JobSpec(name="fit", command=("true",), **fields)
    return [one.run_dir for one in submit_plan.submit(planning.Plan(spec=spec))]


def printed(run_dir: Path, **texts: str) -> None:
    for name, text in texts.items():
        (run_dir / f"{name.replace('_', '-')}.log").write_text(text)


def slurm_says(fake_slurm: FakeSlurm, state: str, *, exit_code: str = "0:0", tasks: tuple[int, ...] = ()) -> None:
    ids = [f"JobId={13 + task} ArrayJobId=12 ArrayTaskId={task}" for task in tasks] or ["JobId=12"]
    rest = f"JobName=fit UserId=u(1) JobState={state} Reason=None RunTime=00:01:30 Restarts=0 ExitCode={exit_code}"
    lines = "\n".join(f"{one} {rest} StdOut=x" for one in ids)
    fake_slurm.command("scontrol", f"cat <<'X'\n{lines}\nX")


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    assert logs.main(argv) == 0
    return capsys.readouterr().out.splitlines()


def refused(capsys: pytest.CaptureFixture[str], main, *argv: str) -> str:
    with pytest.raises(SystemExit) as raised:
        main(argv)
    assert raised.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_rank_0_and_the_batch_script_or_all_tasks_or_one(capsys) -> None:
    (run_dir,) = submit(gpus_per_node=2)
    printed(run_dir, job="begins\n", task_0="zero\nno end", task_1="one\n")
    assert shown(capsys, "12") == shown(capsys, "runs/fit-12") == shown(capsys, "runs/latest")
    assert shown(capsys, "12") == ["zero", "no end", "begins"]
    assert shown(capsys, "12", "--all") == ["zero", "no end", "[task-1] one", "begins"]
    assert shown(capsys, "12", "--rank", "1") == ["one"]
    assert shown(capsys, "12", "--rank", "0") == ["zero", "no end"]


@pytest.mark.parametrize("words", [(), ("-f",), ("--all",)])
def test_the_last_line_is_what_failed_first(capsys, fake_slurm: FakeSlurm, words: tuple[str, ...]) -> None:
    (run_dir,) = submit(gpus_per_node=2)
    verdict = "Failed first, with status 137: rank 1 on n1: killed by SIGKILL"
    lost = "RuntimeError: Connection closed by peer\n"
    printed(run_dir, job=f"srun: error: n1: task 1: Killed\n{verdict}\n", task_0=lost, task_1=lost)
    slurm_says(fake_slurm, "FAILED", exit_code="137:0")
    logs.main(["12", *words])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.endswith(lost.strip()) or line == verdict][-1] == verdict
    assert find_runs.of_run(run_record.read(run_dir)).logs().endswith(f"{verdict}\n")


@pytest.mark.parametrize("as_well", [(), ("job.jsonl",), ("run.json",)])
def test_the_logs_of_a_launch_are_read_in_its_run_directory(capsys, folder: Path, as_well: tuple[str, ...]) -> None:
    run_dir = folder / "my train-12"
    run_dir.mkdir()
    printed(run_dir, task_0="zero\n", task_1="one\n")
    for name in as_well:
        (run_dir / name).write_text("{}")
    assert shown(capsys, "my train-12") == ["zero"]
    assert shown(capsys, "my train-12", "--all") == ["zero", "[task-1] one"]
    assert shown(capsys, "my train-12", "--rank", "1") == ["one"]
    assert "submit did not start it" in refused(capsys, logs.main, "my train-12", "-f")
    assert "submit did not start it" in refused(capsys, cancel.main, "my train-12")


@pytest.mark.parametrize(
    ("rank", "then", "start", "is_shown"),
    [
        (1, Then.END, {"ranks": 2, "time": 5.0}, True),
        (1, Then.REQUEUE, {"ranks": 2, "time": 5.0}, False),
        (0, Then.END, {"ranks": 2, "time": 5.0}, False),
        (7, Then.END, {"ranks": 2, "time": 5.0}, False),
        (None, Then.END, {"ranks": 2, "time": 5.0}, False),
        (1, Then.END, {"ranks": 8, "time": 5.0}, False),  # not all have one
        (1, Then.END, {"ranks": 2, "time": 20.0}, False),  # a later start runs, or has ended well
    ],
)
def test_the_log_of_the_rank_that_failed_first_is_shown(
    capsys, folder: Path, rank: int | None, then: str, start: dict[str, float], is_shown: bool
) -> None:
    (run_dir := folder / "runs" / "train-3").mkdir(parents=True)
    printed(run_dir, task_0="stopped: rank 1 on n1 failed (see its error).\n", task_1="its error\n")
    (run_dir / "starts.jsonl").write_text(json.dumps({"kind": "start", **start}) + "\n")
    failed = Failure(rank, "n1", 1, "ValueError: x")
    journal.append_end(run_dir, Outcome("3", 0, "FAILED", 1, failed, then=then, time=10.0), shared=False)
    more = ["[task-1] its error"] if is_shown else []
    assert shown(capsys, str(run_dir)) == ["stopped: rank 1 on n1 failed (see its error).", *more]


def test_a_silent_rank_is_said_to_be(capsys) -> None:
    (run_dir,) = submit(gpus_per_node=2)
    printed(run_dir, task_0="zero\n", task_1="")
    assert logs.main(["12", "--rank", "1"]) == 0
    assert capsys.readouterr() == ("", "Rank 1 has printed nothing so far.\n")
    assert logs.main(["12", "--all"]) == 0
    assert capsys.readouterr().err == ""
    printed(run_dir, task_0="")
    assert logs.main(["12"]) == 0
    assert capsys.readouterr().err == "Job 12 has printed nothing so far.\n"


def test_a_job_that_was_resumed_is_said_and_the_new_one_shown(capsys, fake_slurm: FakeSlurm) -> None:
    (run_dir,) = submit()
    printed(run_dir, task_0="of 12\n")
    slurm_says(fake_slurm, "FAILED")
    fake_slurm.command("sbatch", "echo 15")
    earlier = resume.find("12", Path("runs"))
    submit_plan.submit(planning.Plan(spec=JobSpec(name="fit", command=("true",)), earlier=earlier))
    printed(run_dir, task_0="of 15\n")
    for name, file in (("mine", "run.json"), ("damaged", "spec.json")):  # by others who can write here, and later
        Path("runs", name, "job-12").mkdir(parents=True)
        Path("runs", name, file).write_text("{}")
        os.utime(Path("runs", name, "job-12"), (4e9, 4e9))
    capsys.readouterr()
    assert logs.main(["12"]) == 0
    said = f"Job 12 was resumed as job 15. Its own logs: runs/{run_dir.name}/job-12\n"
    assert capsys.readouterr() == ("of 15\n", said)
    assert status.main(["12"]) == 0
    _, row, *said_below = capsys.readouterr().out.splitlines()
    assert row.split()[:2] == ["15", "fit"]
    assert said_below == ["Job 12 was resumed as job 15."]
    assert report.main(["12"]) == 0
    assert "fit, job 15: " in (shown := capsys.readouterr().out) and "  Job 12 was resumed as this one.\n" in shown
    assert "no run directory" in refused(capsys, logs.main, "13")
    assert "no run in runs has this name" in refused(capsys, logs.main, "*")


TRACEBACK = """[rank {rank} node1] Traceback (most recent call last):
  File "t.py", line 1, in <module>
    raise ValueError({what!r})
    ^^^^^^^^^^^^^^^^
ValueError: {what}
"""


def test_equal_tracebacks_are_shown_once(capsys) -> None:
    (run_dir,) = submit(gpus_per_node=4)
    same = {f"task_{rank}": f"begins\n{TRACEBACK.format(rank=rank, what='no data')}ends\n" for rank in range(3)}
    printed(run_dir, **same, task_3=TRACEBACK.format(rank=3, what="other"))
    said = shown(capsys, "12", "--all")
    again = "The same traceback as in task-0: ValueError: no data"
    assert said[:7] == [*same["task_0"].splitlines()]
    assert said[7:13] == [f"[task-{rank}] {line}" for rank in (1, 2) for line in ("begins", again, "ends")]
    assert said[13:] == [f"[task-3] {line}" for line in TRACEBACK.format(rank=3, what="other").splitlines()]
    assert shown(capsys, "12", "--rank", "1") == same["task_1"].splitlines()


@pytest.mark.parametrize("shares_log", [False, True])
def test_equal_tracebacks_as_torch_prints_them_are_shown_once(capsys, shares_log: bool) -> None:
    """It names the rank in each line. Ranks that a script starts itself write into one log, line by line."""
    (run_dir,) = submit(gpus_per_node=2)
    lines = TRACEBACK.partition("] ")[2].format(what="no data").splitlines()
    zero, one = ([f"[rank{rank}]: {line}" for line in lines] for rank in (0, 1))
    if shares_log:
        printed(run_dir, task_0="\n".join(line for pair in zip(zero, one) for line in pair))
    else:
        printed(run_dir, task_0="\n".join(zero), task_1="\n".join(one))
    again = "The same traceback as in rank 0: ValueError: no data"
    assert shown(capsys, "12", "--all") == [*zero, again if shares_log else f"[task-1] {again}"]


SYNTAX_ERROR = """  File "t.py", line 2
    def f(:
          ^
SyntaxError: invalid syntax
"""


def test_a_script_that_python_cannot_compile_is_shown_once(capsys) -> None:
    """Its message has no first line that says Traceback."""
    (run_dir,) = submit(gpus_per_node=3)
    printed(run_dir, **{f"task_{rank}": SYNTAX_ERROR for rank in range(3)})
    again = "The same traceback as in task-0: SyntaxError: invalid syntax"
    assert shown(capsys, "12", "--all") == [*SYNTAX_ERROR.splitlines(), f"[task-1] {again}", f"[task-2] {again}"]


def test_a_traceback_without_an_end_is_shown(capsys) -> None:
    (run_dir,) = submit()
    lines = TRACEBACK.format(rank=0, what="x").splitlines()[:2]
    printed(run_dir, task_0="\n".join(lines))
    assert shown(capsys, "12") == lines


def test_following_ends_as_the_job_ends(capsys, fake_slurm: FakeSlurm) -> None:
    (run_dir,) = submit(gpus_per_node=2)
    printed(run_dir, task_0="zero\n", task_1="one\n")
    slurm_says(fake_slurm, "FAILED", exit_code="3:0")
    assert logs.main(["12", "-f", "--rank", "1"]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["one", "job 12: FAILED after 00:01:30, exit status 3"]


def test_what_has_no_log(capsys, folder: Path, fake_slurm: FakeSlurm) -> None:
    submit(array="0-1")
    assert "Job" not in refused(capsys, logs.main, "99")
    assert (
        "The logs of job 12:\n  it is an array with 2 tasks, 12_0 to 12_1.\n  Hint: name one: cluster-ddp logs 12_0"
        in (refused(capsys, logs.main, "12"))
    )
    assert "it has printed nothing so far" in refused(capsys, logs.main, "12_1")
    assert "its ranks are 0 to 0" in refused(capsys, logs.main, "12_1", "--rank", "1")
    (folder / "runs" / "by-hand").mkdir()
    (folder / "runs" / "by-hand" / "run.json").write_text("{}")
    assert "cluster-ddp submit did not start it" in refused(capsys, logs.main, "runs/by-hand")
    (folder / "runs" / "by-hand" / "run.json").write_text('{"topology": {"job_id": 12}}')
    slurm_says(fake_slurm, "RUNNING")
    assert "Hint: read x\n" in refused(capsys, logs.main, "runs/by-hand")


@pytest.mark.parametrize(
    ("words", "shown"),
    [("logs 12 | head -1", "line\n"), ("submit --show-config | :", ""), ("status | :", ""), ("env --export | :", "")],
)
def test_a_reader_that_leaves_first(folder: Path, words: str, shown: str) -> None:
    (run_dir,) = submit()
    printed(run_dir, task_0="line\n" * 100_000)
    root = str(Path(__file__).parents[3])
    command = f'set -o pipefail; "{sys.executable}" -m cluster_ddp {words}'
    env = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, timeout=scaled(LIMIT_S))
    assert (done.returncode, done.stdout, done.stderr) == (141, shown, "")


def test_a_job_is_cancelled(capsys, fake_slurm: FakeSlurm) -> None:
    submit()
    slurm_says(fake_slurm, "RUNNING")
    assert cancel.main(["runs/fit-12"]) == 0
    assert capsys.readouterr().out == "Cancelled job 12 (fit). To see how it ends: cluster-ddp status runs/fit-12\n"
    assert fake_slurm.calls("scancel") == [["12"]]
    slurm_says(fake_slurm, "COMPLETED")
    assert "it has ended already: COMPLETED." in refused(capsys, cancel.main, "12")
    assert len(fake_slurm.calls("scancel")) == 1


def test_an_array_is_cancelled_at_once_and_a_task_alone(capsys, fake_slurm: FakeSlurm) -> None:
    submit(array="0-1")
    slurm_says(fake_slurm, "RUNNING", tasks=(0, 1))
    assert cancel.main(["12"]) == cancel.main(["12_1"]) == 0
    assert fake_slurm.calls("scancel") == [["12"], ["12_1"]]
    assert "Cancelled job 12_0 to 12_1 (fit)." in capsys.readouterr().out


def test_a_job_of_a_script_of_ones_own_is_cancelled(capsys, fake_slurm: FakeSlurm, folder: Path) -> None:
    """sbatch jobs/mnist_2node.sbatch"""
    (folder / "runs" / "mnist-31").mkdir(parents=True)
    (folder / "runs" / "mnist-31" / "run.json").write_text('{"topology": {"job_id": 31}}')
    assert cancel.main(["runs/mnist-31"]) == cancel.main(["31"]) == 0
    assert fake_slurm.calls("scancel") == [["31"], ["31"]]
    assert capsys.readouterr().out == "Cancelled job 31.\n" * 2


def test_a_job_without_a_run_directory_is_slurms(capsys, fake_slurm: FakeSlurm) -> None:
    assert cancel.main(["99"]) == 0
    assert capsys.readouterr().out == "Cancelled job 99.\n"
    assert fake_slurm.calls("scancel") == [["99"]]
    slurm_says(fake_slurm, "COMPLETED")  # scancel would say nothing, too
    assert "it has ended already: COMPLETED." in refused(capsys, cancel.main, "12")
    assert len(fake_slurm.calls("scancel")) == 1
    fake_slurm.command("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    fake_slurm.command("sacct", "exit 1")
    assert "Invalid job id specified" in refused(capsys, cancel.main, "99")
    assert len(fake_slurm.calls("scancel")) == 1


def test_a_job_that_holds_packed_tasks_is_not_taken_for_one_of_them(capsys, fake_slurm: FakeSlurm) -> None:
    """From another folder, 12_0 could be a task's name, or that of Slurm's job."""
    line = "JobId=13 ArrayJobId=12 ArrayTaskId=0 JobName=fit UserId=u(1) JobState=RUNNING Reason=None RunTime=00:01:30"
    record = f"{line} Restarts=0 ExitCode=0:0 StdOut=/data/it's runs/fit-1/pack-0.log"
    fake_slurm.command("scontrol", f"cat <<'X'\n{record}\nX")
    said = refused(capsys, cancel.main, "12_0")
    assert "for Slurm this is a job that holds several tasks of the array, of /data/it's runs/fit-1_*." in said
    assert """cluster-ddp cancel --runs-dir '/data/it'"'"'s runs' 12_0, to cancel task 12_0 alone""" in said
    assert fake_slurm.calls("scancel") == []


HOSTILE = "\x1b]0;title\x07\x1b[2Ja\tb\x1b[31mred\x1b[0m\u202e\x9b1A"


@pytest.mark.parametrize("words", [(), ("-f",), ("--all",)])
def test_a_log_does_nothing_to_the_terminal_but_raw(capsys, fake_slurm: FakeSlurm, words: tuple[str, ...]) -> None:
    (run_dir,) = submit()
    printed(run_dir, task_0=f"{HOSTILE}\n")
    slurm_says(fake_slurm, "COMPLETED")
    assert any(line.endswith("?]0;title??[2Ja\tbred??1A") for line in shown(capsys, "12", *words))
    assert any(line.endswith(HOSTILE) for line in shown(capsys, "12", "--raw", *words))


def test_an_autopsy_does_nothing_to_the_terminal(capsys, tmp_path: Path) -> None:
    answer = hang_verdict.Answer(rank=0, host="n1\x1b[2J", where=HOSTILE)
    (tmp_path / "stack-rank0.txt").write_text(f"{answer.text()}\n")
    assert doctor.main(["--autopsy", str(tmp_path)]) == 0
    (tmp_path / "hang.txt").write_text(f"all wait\n{HOSTILE}\n")
    assert doctor.main(["--autopsy", str(tmp_path)]) == 0
    assert all(line.isprintable() for line in capsys.readouterr().out.splitlines())
    with pytest.raises(SystemExit):
        doctor.main(["--autopsy", str(tmp_path / HOSTILE)])
    assert all(line.isprintable() for line in capsys.readouterr().err.splitlines())


def test_without_a_job_the_newest_run_is_meant_but_not_by_cancel(capsys, fake_slurm: FakeSlurm) -> None:
    """Which it is stands on stderr."""
    for verb in (logs, report, cancel):
        assert "no job is named, and there is no run in runs." in refused(capsys, verb.main)
    assert "no job is named, and there is no run in runs." in refused(capsys, status.main, "--watch")
    (older,) = submit()
    printed(older, job="older\n")
    fake_slurm.command("sbatch", "echo 13")
    (newer,) = submit()
    printed(newer, job="newer\n")
    slurm_says(fake_slurm, "COMPLETED")
    fake_slurm.command("squeue", "exit 1")
    for verb, argv in ((logs, []), (report, []), (status, ["--watch"])):
        assert verb.main(argv) == 0
        found = capsys.readouterr()
        assert "13" in found.out or "newer" in found.out
        assert "older" not in found.out and found.err == "The newest run is job 13 (fit).\n"
    said = refused(capsys, cancel.main)
    assert "no job is named. The newest run is job 13 (fit)." in said and "Hint: cluster-ddp cancel 13" in said


def test_the_newest_run_may_be_an_array(capsys, fake_slurm: FakeSlurm) -> None:
    submit(array="0-1")
    slurm_says(fake_slurm, "COMPLETED", tasks=(0, 1))
    assert "it is an array with 2 tasks, 12_0 to 12_1." in refused(capsys, logs.main)
    assert report.main([]) == 0
    assert "12_1" in capsys.readouterr().out
