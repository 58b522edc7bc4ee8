"""The callers of Slurm's commands, against executables on a temporary PATH: real quoting, real exit codes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from slow_commands import until_named

from cluster_ddp.errors import SlurmError
from cluster_ddp.slurm import commands, job_status


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))

    def make(name: str, script: str) -> None:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return make


@pytest.mark.parametrize(("answer", "job_id", "cluster"), [("12", 12, None), ("34;far", 34, "far")])
def test_submit_reads_the_job_id(fake, tmp_path: Path, answer: str, job_id: int, cluster: str | None) -> None:
    fake("sbatch", f'printf "%s\\n" "$@" >{tmp_path}/arguments; echo "{answer}"')
    script = "my 'job'\n$(touch x).sbatch"
    assert commands.submit(script, options=["--hold"], arguments=["a b", "$x"]) == commands.Submitted(
        job_id=job_id, cluster=cluster
    )
    arguments = (tmp_path / "arguments").read_text()
    assert arguments == f"--parsable\n--hold\n{script}\na b\n$x\n"


def test_what_sbatch_says_is_in_the_error(fake) -> None:
    fake("sbatch", "echo 'sbatch: error: Invalid account' >&2; exit 1")
    with pytest.raises(SlurmError, match="Invalid account"):
        commands.submit("x")


@pytest.mark.parametrize(
    ("lines", "found", "hint"),
    [
        (
            "sbatch: error: Name an account.\n\nsbatch: error: Batch job submission failed: Unspecified error\n",
            "sbatch: error: Name an account.; sbatch: error: Batch job submission failed: Unspecified error",
            "try sbatch in your shell; if it fails there, too, ask your cluster's support",
        ),
        (
            "sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\n"
            "sbatch: error: fetch_config: DNS SRV lookup failed\n"
            "sbatch: error: _establish_config_source: failed to fetch config\n"
            "sbatch: fatal: Could not establish a configuration source\n",
            "sbatch: fatal: Could not establish a configuration source",
            "is this a login node? Elsewhere, name the cluster's slurm.conf: export SLURM_CONF=PATH",
        ),
    ],
)
def test_several_lines_of_sbatch_are_one(fake, lines: str, found: str, hint: str) -> None:
    fake("sbatch", f"printf '{lines}' >&2; exit 1")
    with pytest.raises(SlurmError) as error:
        commands.submit("x")
    assert str(error.value) == f"Running sbatch --parsable x:\n  {found}\n  Hint: {hint}"


def test_a_missing_command_is_named(fake) -> None:
    with pytest.raises(SlurmError, match="there is no sbatch on the PATH"):
        commands.submit("x")


def test_a_silent_controller_is_not_waited_for_for_ever(fake) -> None:
    fake("squeue", "exec /bin/sleep 30")
    with pytest.raises(SlurmError, match=r"no answer within 0\.2 s"):
        commands.run(["squeue"], timeout_s=0.2)


def test_a_configuration_file_that_is_gone_is_not_waited_for(
    fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake("squeue", "echo answer")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "it's gone"))
    for env in (None, dict(os.environ)):
        with pytest.raises(SlurmError, match=r"(?s)SLURM_CONF names a file that is not there: .*it's gone.*unset"):
            commands.run(["squeue"], env=env)
    assert commands.run(["squeue"], env={**os.environ, "SLURM_CONF": str(tmp_path)}) == "answer\n"


def test_job_statuses_are_read_from_scontrol(fake) -> None:
    record = (
        "JobId={} ArrayJobId=7 ArrayTaskId={} JobName=a b UserId=u(1) JobState={} Reason={} Dependency=(null) "
        "ExitCode={} StdOut=/tmp/a b/x-7_{}.out Power="
    )
    lines = [record.format(8, 0, "COMPLETED", "None", "0:0", 0), record.format(7, 1, "FAILED", "Prolog", "2:9", 1)]
    fake("scontrol", "/bin/cat <<'X'\n" + "\n".join(lines) + "\nX")
    first, second = job_status.job_statuses(7)
    assert (first.job_id, first.state, first.exit_code, first.ended) == (8, "COMPLETED", 0, True)
    assert first.stdout == "/tmp/a b/x-7_0.out"
    assert (second.job_id, second.state, second.reason, second.exit_code, second.signal) == (
        7,
        "FAILED",
        "Prolog",
        2,
        9,
    )


def test_a_run_time_that_makes_no_sense_is_unknown(fake) -> None:
    """Slurm writes INVALID where the job began later than now, by a clock that was set back."""
    fake("scontrol", "echo 'JobId=7 JobName=x UserId=u JobState=RUNNING RunTime=INVALID'")
    assert [status.elapsed for status in job_status.job_statuses(7)] == [""]


def test_words_of_users_are_no_records_and_no_states(fake) -> None:
    """As 22.05 shows a job whose comment and name were given with line breaks, and 26.05 its command."""
    record = (
        "JobId=7 JobName=n JobState=TIMEOUT\nReason=x UserId=u(1) JobState=RUNNING Reason=None ExitCode=0:0 "
        "SubmitLine=sbatch --wrap a\nJobId=8 JobState=FAILED\nJobId=7 JobState=FAILED\nJobId=nine b "
        "WorkDir=/tmp Comment=c JobState=FAILED\n\n"
        "StdOut=/evil ExitCode=9:0 StdErr=/tmp/x StdIn=/dev/null StdOut=/tmp/a  b.out Power="
    )
    fake("scontrol", f"/bin/cat <<'X'\n{record}\nX")
    (status,) = job_status.job_statuses(7)
    assert (status.state, status.reason, status.exit_code, status.stdout) == ("RUNNING", "None", 0, "/tmp/a  b.out")


@pytest.mark.parametrize("on_terminal", [False, True])
def test_a_command_that_does_not_answer_is_named_on_a_terminal(
    fake, monkeypatch, capsys, tmp_path: Path, on_terminal: bool
) -> None:
    fake("squeue", f"{until_named(monkeypatch, tmp_path, on_terminal=on_terminal)}; echo done")
    assert commands.run(["squeue"]) == "done\n"
    assert capsys.readouterr().err == ("Waiting for squeue to answer …\n" if on_terminal else "")
