"""What a submission leaves and what it does not, with executables that stand in for Slurm's."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from slowness import LIMIT_S, scaled
from stand_ins import FakeSlurm, fake_slurm

from cluster_ddp.errors import JobError, JobNotFoundError, RunDirError, SlurmError, SpecError
from cluster_ddp.jobs import find_runs, run_record
from cluster_ddp.run import job_file, places, spec_file
from cluster_ddp.run.job_file import JobFile
from cluster_ddp.slurm import commands
from cluster_ddp.submission import resume, run_dirs, submit_plan
from cluster_ddp.submission.frozen import frozen_agent
from cluster_ddp.submission.job import Job
from cluster_ddp.submission.planning import Plan
from cluster_ddp.submission.spec import JobSpec

__all__ = ["fake_slurm"]

ROOT = Path(__file__).parents[3]
SPEC = JobSpec(name="fit", command=("echo", "it's $(touch pwned)"), nodes=2, gpus_per_node=2)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def submit(spec: JobSpec = SPEC, **options: Any) -> list[Job]:
    return submit_plan.submit(Plan(spec=spec, **options))


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


NAMED = r"fit-\d{8}-\d{6}-[0-9a-f]{6}"


def test_all_that_a_job_needs_is_there_before_it(fake_slurm: FakeSlurm, in_a_folder: Path) -> None:
    fake_slurm.command("sbatch", 'ls runs/* >"$0.seen"; echo 12')
    (job,) = submit()
    runs = in_a_folder / "runs"
    (call,) = fake_slurm.calls("sbatch")
    assert re.fullmatch(r"--comment=cluster_ddp-[0-9a-f]{16}", call.pop(1))
    assert call == ["--parsable", f"--output={job.run_dir}/job.log"]
    assert (fake_slurm.calls("scontrol"), fake_slurm.calls("scancel")) == ([], [])
    assert (fake_slurm.folder / "sbatch.seen").read_text() == "agent.pyz\njob.sbatch\nspec.json\n"
    assert re.fullmatch(NAMED, job.run_dir.name) and job.run_dir.parent == runs
    assert (job.run_dir / "job.sbatch").read_text() == fake_slurm.stdin("sbatch")
    assert (job.run_dir / "agent.pyz").read_bytes() == frozen_agent.content()
    assert (job.id, job.ranks) == ("12", 4)
    assert (runs / "fit-12").readlink() == (runs / "latest").readlink() == Path(job.run_dir.name)
    assert json.loads((runs / "fit-12" / "spec.json").read_text())["command"] == list(SPEC.command)
    assert json.loads((runs / "fit-12" / "job.json").read_text())["job"] == "12"


def test_a_start_time_of_the_users_own(fake_slurm: FakeSlurm) -> None:
    submit(JobSpec(name="fit", command=("t",), begin="now+2hours"))
    assert fake_slurm.calls("sbatch")[0][-1] == "--begin=now+2hours"


def test_the_last_one_is_latest(fake_slurm: FakeSlurm, in_a_folder: Path) -> None:
    submit()
    fake_slurm.command("sbatch", "echo 13")
    (job,) = submit()
    assert Path("runs/latest").readlink() == Path("runs/fit-13").readlink() == Path(job.run_dir.name)


def test_of_an_id_that_is_used_again_the_link_leads_to_the_last_job(fake_slurm: FakeSlurm) -> None:
    (first,), (second,) = submit(), submit()
    assert Path("runs/fit-12").resolve() == second.run_dir != first.run_dir
    assert spec_file.read(first.run_dir)["job"] == spec_file.read(second.run_dir)["job"] == "12"


def test_a_link_that_can_not_be_replaced_is_not_named(fake_slurm: FakeSlurm, in_a_folder: Path) -> None:
    """In a shared folder with the sticky bit, it may be another user's, of another cluster's job."""
    (in_a_folder / "runs").mkdir()
    (in_a_folder / "runs" / "fit-12").symlink_to("another")
    (job,) = submit()
    assert job.link == in_a_folder / "runs" / "fit-12"
    job.link.unlink()
    (in_a_folder / "runs" / "fit-12").symlink_to("another")
    assert job.link == job.run_dir


def test_a_run_is_listed_once(fake_slurm: FakeSlurm) -> None:
    (job,) = submit()
    tasks = submit(JobSpec(name="fit", command=("t",), array="0-1"))
    assert [one.run_dir for one in find_runs.in_folder(Path("runs").resolve())] == [
        one.run_dir for one in (job, *tasks)
    ]
    (by_link,) = find_runs.find("runs/latest", Path("runs"))
    assert by_link.run_dir.resolve() == tasks[0].run_dir


def test_a_submission_that_is_under_way_is_no_run_yet(fake_slurm: FakeSlurm) -> None:
    (job,) = submit()
    (job.run_dir / "job.json").unlink()
    assert find_runs.in_folder(Path("runs")) == []
    with pytest.raises(RunDirError, match="another submission is under way, or was killed"):
        resume.find(job.run_dir, Path("runs"))
    with pytest.raises(JobError, match=r"its submission is under way, or was killed .*\n  Hint: .* --name=fit"):
        find_runs.of_run(run_record.read(job.run_dir))


def test_a_run_whose_next_submission_was_killed_stays_and_can_be_resumed(fake_slurm: FakeSlurm) -> None:
    (job,) = submit()
    fake_slurm.command("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    fake_slurm.command("sacct", "true")
    fake_slurm.command("sbatch", "kill -KILL $PPID; sleep 1")
    words = [sys.executable, "-m", "cluster_ddp.submit", "--no-check", "--resume", str(job.run_dir)]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=scaled(LIMIT_S))
    assert done.returncode == -signal.SIGKILL
    assert [one.run_dir for one in find_runs.in_folder(Path("runs").resolve())] == [job.run_dir]
    with pytest.raises(RunDirError, match="another submission is under way, or was killed") as raised:
        resume.find(job.run_dir, Path("runs"))
    subprocess.run(["bash", "-c", raised.value.hint.partition("undo that: ")[2]], check=True)
    assert resume.find(job.run_dir, Path("runs")).job == "12"
    assert files(job.run_dir) == ["agent.pyz", "job.json", "job.sbatch", "spec.json"]


def test_a_folder_that_a_killed_submission_was_to_use_can_be_used(fake_slurm: FakeSlurm, in_a_folder: Path) -> None:
    (in_a_folder / "mine").mkdir()
    (job,) = submit(earlier=resume.find("mine", Path("runs")))
    (job.run_dir / "job.json").unlink()
    with pytest.raises(RunDirError) as raised:
        resume.find("mine", Path("runs"))
    subprocess.run(["bash", "-c", raised.value.hint.partition("undo that: ")[2]], check=True)
    assert submit(earlier=resume.find("mine", Path("runs")))[0].run_dir == job.run_dir


def test_a_folder_of_ones_own_called_latest_stays(fake_slurm: FakeSlurm, in_a_folder: Path) -> None:
    (in_a_folder / "runs" / "latest").mkdir(parents=True)
    submit()
    assert not (in_a_folder / "runs" / "latest").is_symlink()


def test_a_job_counts_more_than_its_link(fake_slurm: FakeSlurm, in_a_folder: Path, monkeypatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise PermissionError("another user's")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    (job,) = submit()
    assert job.id == "12"
    made = ("agent.pyz", "job.json", "job.sbatch", "spec.json")
    assert files(in_a_folder / "runs") == [job.run_dir.name, *(f"{job.run_dir.name}/{name}" for name in made)]


def test_a_command_is_run_by_the_script_itself(fake_slurm: FakeSlurm, in_a_folder: Path) -> None:
    (job,) = submit()
    assert files(job.run_dir) == ["agent.pyz", "job.json", "job.sbatch", "spec.json"]
    assert "submitit" not in fake_slurm.stdin("sbatch")


def test_a_function_gets_a_pickle_for_submitits_runner(fake_slurm: FakeSlurm, in_a_folder: Path) -> None:
    (job,) = submit(JobSpec(name="fit"), function=os.getcwd)
    assert files(job.run_dir) == ["agent.pyz", "function.pkl", "job.json", "job.sbatch", "spec.json"]
    delayed = pickle.loads((job.run_dir / "function.pkl").read_bytes())
    assert delayed.function.function() == str(in_a_folder)
    assert "submitit.core._submit" in fake_slurm.stdin("sbatch")


def test_an_array_is_one_call_and_a_folder_for_each_task(fake_slurm: FakeSlurm, in_a_folder: Path) -> None:
    grid = {"seed": ("5", "6"), "lr": ("0.1", "1.0")}
    jobs = submit(JobSpec(name="fit", command=("t", "--seed={seed}", "{lr}"), grid=grid))
    assert (len(fake_slurm.calls("sbatch")), fake_slurm.calls("scontrol")) == (1, [])
    whole = jobs[0].run_dir.parent
    assert fake_slurm.calls("sbatch")[0][2] == f"--output={whole}/%a/job.log"
    assert [job.id for job in jobs] == ["12_0", "12_1", "12_2", "12_3"]
    assert [Path(f"runs/fit-12/{task}").resolve() for task in range(4)] == [job.run_dir for job in jobs]
    assert [str(job.link.relative_to(in_a_folder)) for job in jobs] == [f"runs/fit-12/{task}" for task in range(4)]
    assert {path.name for path in Path("runs").iterdir()} == {whole.name, "fit-12", "latest"}
    assert [spec_file.read(job.run_dir)["job"] for job in jobs] == [job.id for job in jobs]
    assert not (jobs[0].run_dir / "job.json").exists(), "one for all, until they start"
    described = [json.loads((job.run_dir / "spec.json").read_text()) for job in jobs]
    assert [one["command"] for one in described] == [["t", f"--seed={s}", lr] for s in "56" for lr in ("0.1", "1.0")]
    assert described[2]["values"] == {"seed": "6", "lr": "0.1"}
    assert [path.parent for path in in_a_folder.rglob("agent.pyz")] == [whole], "one for all"


def test_a_task_that_waits_is_known_in_its_own_folder(fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    task = submit(JobSpec(name="fit", command=("t",), array="0-1"))[1]
    monkeypatch.chdir(task.run_dir)
    assert [one.job for one in find_runs.find(".", Path("runs"))] == ["12_1"]
    job_file.complete(task.run_dir.rename(task.run_dir.with_name("mine")), JobFile("14"), shared=False)
    assert spec_file.read(Path("../mine"))["job"] == "14"


def test_in_an_array_a_function_gets_its_tasks_values(fake_slurm: FakeSlurm, in_a_folder: Path) -> None:
    jobs = submit(JobSpec(name="fit", grid={"seed": ("5", "6"), "lr": ("0.1", "1.0")}), function=dict)
    delayed = [pickle.loads((job.run_dir / "function.pkl").read_bytes()) for job in jobs]
    assert delayed[2].function.function() == {"seed": "6", "lr": "0.1"}


def test_a_thousand_tasks_are_one_call(fake_slurm: FakeSlurm, in_a_folder: Path) -> None:
    spec = JobSpec(name="fit", command=("t", "{seed}"), grid={"seed": tuple(map(str, range(1000)))}, array="0-999%50")
    assert len(submit(spec)) == 1000
    assert len(fake_slurm.calls("sbatch")) == 1
    assert "#SBATCH --array=0-999%50" in fake_slurm.stdin("sbatch")


def test_a_federations_cluster_is_remembered(fake_slurm: FakeSlurm) -> None:
    fake_slurm.command("sbatch", "echo '12;far'")
    (job,) = submit()
    job.cancel()
    assert job.cluster == "far"
    assert spec_file.read(job.run_dir)["cluster"] == "far"
    assert fake_slurm.calls("scontrol") == [["--clusters=far", "--oneliner", "show", "job", "12"]]
    assert fake_slurm.calls("scancel") == [["--clusters=far", "12"]]


def test_nothing_of_a_job_leaks_into_the_new_one(fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    leaks = ["SLURM_JOB_ID", "SLURM_NTASKS", "SBATCH_PARTITION", "SLURM_CPU_BIND", "SALLOC_QOS", "RANK", "MASTER_PORT"]
    leaks += ["TORCHELASTIC_RUN_ID", "SUBMITIT_EXECUTOR", "CLUSTER_DDP_RUN_DIR", "CUDA_VISIBLE_DEVICES", "WORLD_SIZE"]
    for name in (*leaks, "MINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SLURM_CONF", "/etc/hosts")
    submit()
    env = fake_slurm.env("sbatch")
    assert not set(leaks) & set(env)
    assert (env["SLURM_CONF"], env["MINE"]) == ("/etc/hosts", "1")


def test_outside_a_job_the_choice_of_gpus_is_the_users(fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    submit()
    assert fake_slurm.env("sbatch")["CUDA_VISIBLE_DEVICES"] == "1"


SBATCH_SAYS = [
    ("Batch job submission failed: Invalid account or account/partition combination specified", "--account"),
    ("invalid partition specified: nope", "sinfo -o %P"),
    ("Batch job submission failed: Invalid qos specification", "--qos"),
    ("Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)", "--time"),
    ("Job violates accounting/QOS policy (job submit limit, user s size and/or time limits)", "sacctmgr show"),
    ("AssocMaxSubmitJobLimit; Job violates accounting/QOS policy (job submit limit, or time limits)", "--max-requeues"),
    ("Invalid generic resource (gres) specification", "sinfo -o '%P %G'"),
    ("Batch job submission failed: Requested node configuration is not available", "sinfo -o '%P %D %c %m %G %f'"),
    ("Unable to contact slurm controller (connect failure)", "scontrol ping"),
    ("Something quite new", "try sbatch in your shell"),
]


@pytest.mark.parametrize(("words", "hint"), SBATCH_SAYS, ids=[words[:30] for words, _ in SBATCH_SAYS])
def test_sbatchs_refusal_is_shown_with_a_hint(fake_slurm: FakeSlurm, in_a_folder: Path, words: str, hint: str) -> None:
    fake_slurm.command("sbatch", f"echo 'sbatch: error: {words}' >&2; exit 1")
    with pytest.raises(SlurmError) as raised:
        submit()
    assert words in raised.value.found
    assert hint in raised.value.hint
    assert files(in_a_folder) == []


def test_an_answer_that_is_no_job_id_is_an_error(fake_slurm: FakeSlurm, in_a_folder: Path) -> None:
    fake_slurm.command("sbatch", "echo hello")
    with pytest.raises(SlurmError, match="it answered 'hello'"):
        submit()
    assert files(in_a_folder) == []


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which job it is can't be written."""

    def refuse(*arguments: Any, **more: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(job_file, "write", refuse)


@pytest.mark.usefixtures("full_disk")
def test_what_can_not_be_noted_is_cancelled_and_its_end_awaited(fake_slurm: FakeSlurm, in_a_folder: Path) -> None:
    fake_slurm.command("squeue", 'ls -d runs/fit-* >>"$0.seen"; [[ -e $0.again ]] || echo COMPLETING; touch "$0.again"')
    with pytest.raises(RunDirError, match="No space left"):
        submit()
    seen = fake_slurm.calls("squeue")
    assert (fake_slurm.calls("scancel"), seen) == ([["12"]], [["--noheader", "--jobs=12"]] * 2)
    assert len((fake_slurm.folder / "squeue.seen").read_text().split()) == 2, "its files are there until it has ended"
    assert files(in_a_folder) == []


@pytest.mark.usefixtures("full_disk")
def test_what_can_not_be_taken_back_either_is_told_and_keeps_its_files(fake_slurm: FakeSlurm) -> None:
    fake_slurm.command("scancel", "echo neither >&2; exit 1")
    with pytest.raises(SlurmError, match=r"Cancelling job 12:\n  neither .*\n  Hint: scancel 12"):
        submit()
    assert len(list(Path("runs").glob("fit-*/spec.json"))) == 1


@pytest.mark.parametrize("name", ["INT", "HUP", "TERM"])
def test_a_signal_takes_the_job_back_and_then_ends_the_process(
    fake_slurm: FakeSlurm, in_a_folder: Path, name: str
) -> None:
    """During sbatch, Slurm has the job, but has not told its id yet. More signals do not disturb the taking back."""
    fake_slurm.command("sbatch", f"kill -{name} $PPID; sleep 0.2; echo 12")
    fake_slurm.command("squeue", "true")
    fake_slurm.command("scancel", "kill -HUP $PPID; kill -TERM $PPID; sleep 0.2")
    code = "from cluster_ddp.submission import *; from cluster_ddp.submission import planning, submit_plan, spec\n"
    code += "submit_plan.submit(planning.Plan(spec=spec.JobSpec(name='fit', command=('t',))))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=scaled(LIMIT_S)
    )
    assert done.returncode == -signal.Signals[f"SIG{name}"]
    assert fake_slurm.calls("scancel") == [["12"]]
    assert files(in_a_folder) == []


def test_nohup_and_a_handler_of_ones_own_stay_what_they_are(fake_slurm: FakeSlurm, in_a_folder: Path) -> None:
    came: list[int] = []
    before = (
        signal.signal(signal.SIGHUP, signal.SIG_IGN),
        signal.signal(signal.SIGTERM, lambda n, frame: came.append(n)),
    )
    try:
        fake_slurm.command("sbatch", f"kill -HUP {os.getpid()}; sleep 0.2; echo 12")
        assert len(submit()) == 1
        fake_slurm.command("sbatch", f"kill -TERM {os.getpid()}; sleep 0.2; echo 13")
        with pytest.raises(KeyboardInterrupt):
            submit()
    finally:
        for number, handler in zip((signal.SIGHUP, signal.SIGTERM), before):
            signal.signal(number, handler)
    assert came == [signal.SIGTERM]
    assert fake_slurm.calls("scancel") == [["13"]]


def test_sbatch_that_does_not_answer_leaves_no_job(
    fake_slurm: FakeSlurm, in_a_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "TIMEOUT_S", 2.0)
    fake_slurm.command("sbatch", 'printf "%s\n" "$@" | sed -n s/--comment=//p >"$0.mark"; exec sleep 100')
    fake_slurm.command("squeue", f'echo "7 else"; echo "12 $(cat "{fake_slurm.folder}/sbatch.mark")"')
    with pytest.raises(SlurmError, match=r"no answer within 2 s\. It had submitted the job, which is now cancelled\."):
        submit()
    assert fake_slurm.calls("scancel") == [["12"]]
    fake_slurm.command("squeue", "true")
    with pytest.raises(SlurmError, match=r"squeue shows no job of it so far.*\n  Hint: look for it later: squeue --me"):
        submit()
    assert files(in_a_folder) == []


def test_a_job_whose_submission_timed_out_at_the_controller_is_cancelled(
    fake_slurm: FakeSlurm, in_a_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch fails, but the controller, which is busy, may still take the job."""
    said = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    fake_slurm.command("sbatch", f'printf "%s\n" "$@" | sed -n s/--comment=//p >"$0.mark"; echo "{said}" >&2; exit 1')
    fake_slurm.command("squeue", f'echo "12 $(cat "{fake_slurm.folder}/sbatch.mark")"')
    monkeypatch.setattr(commands, "TIMEOUT_S", 2.0)
    with pytest.raises(SlurmError, match=r"send/recv operation\. It had submitted the job, which is now cancelled\."):
        submit()
    assert fake_slurm.calls("scancel") == [["12"]]
    assert files(in_a_folder) == []


def test_a_comment_of_ones_own_stays(fake_slurm: FakeSlurm) -> None:
    submit(JobSpec(name="fit", command=("t",), sbatch_options=("--comment=mine",)))
    assert not any("--comment" in word for word in fake_slurm.calls("sbatch")[0])
    assert "#SBATCH --comment=mine" in fake_slurm.stdin("sbatch")


@pytest.mark.parametrize("comment", ["{ours}; checked by the site", "cluster_ddp-baseline", "site: {ours}"])
def test_a_comment_that_is_changed_hides_no_job(fake_slurm: FakeSlurm, comment: str) -> None:
    """By job_submit of a site, or by --sbatch-options=--comment: it is still that of its run, and no other job is."""
    (job,) = submit()
    (ours,) = (word.partition("=")[2] for word in fake_slurm.calls("sbatch")[0] if word.startswith("--comment="))
    shown = "echo 'JobId=12 JobName=x JobState=RUNNING Reason=None ExitCode=0:0 Comment={}'"
    fake_slurm.command("scontrol", shown.format(comment.format(ours=ours)))
    assert job.state() == "RUNNING"
    fake_slurm.command("scontrol", shown.format(f"cluster_ddp-{'0' * 16}; checked by the site"))
    with pytest.raises(JobNotFoundError, match="is another job now"):
        job.state()


@pytest.mark.parametrize(("share", "modes"), [(False, (0o700, 0o600)), (True, (0o750, 0o640))])
@pytest.mark.parametrize("chosen", [None, Path("my/run")])
def test_run_directories_are_for_their_owner_unless_shared(
    fake_slurm: FakeSlurm, share: bool, modes: tuple[int, int], chosen: Path | None
) -> None:
    before = os.umask(0o002)
    try:
        (job,) = submit(JobSpec(name="fit", command=("t",), share=share), run_dir=chosen)
    finally:
        os.umask(before)
    assert re.fullmatch("run" if chosen else NAMED, job.run_dir.name)
    paths = (job.run_dir, job.run_dir / "spec.json", job.run_dir / "agent.pyz")
    assert tuple(path.stat().st_mode & 0o777 for path in paths) == (*modes, modes[1])
    assert ("\n  --share \\\n" in fake_slurm.stdin("sbatch")) is share


def test_a_chosen_run_directory_is_a_new_one_and_for_one_job(fake_slurm: FakeSlurm, in_a_folder: Path) -> None:
    (in_a_folder / "here").mkdir()
    with pytest.raises(RunDirError, match=r"exists already.*\n  Hint: .* --resume"):
        submit(run_dir=Path("here"))
    with pytest.raises(SpecError, match="each of the 2 array tasks"):
        submit(JobSpec(name="fit", command=("t",), array="0-1"), run_dir=Path("there"))
    with pytest.raises(RunDirError, match="which Slurm interprets"):
        submit(run_dir=Path("100%j"))
    assert fake_slurm.calls("sbatch") == []


def test_a_run_dir_of_an_earlier_job_is_left_alone(fake_slurm: FakeSlurm, in_a_folder: Path) -> None:
    (in_a_folder / "runs" / "fit-12").mkdir(parents=True)
    (in_a_folder / "runs" / "fit-12" / "precious").write_text("x")
    (job,) = submit()
    assert (job.run_dir / "spec.json").exists()
    assert files(in_a_folder / "runs" / "fit-12") == ["precious"]
    fake_slurm.command("sbatch", f"kill -TERM {os.getpid()}; sleep 0.2; echo 12")
    fake_slurm.command("squeue", "true")
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        with pytest.raises(KeyboardInterrupt):
            submit()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert files(in_a_folder / "runs" / "fit-12") == ["precious"], "what is taken back is not another job's"


def test_a_refusal_leaves_nothing_in_a_folder_that_no_submission_has_made(
    fake_slurm: FakeSlurm, in_a_folder: Path
) -> None:
    (in_a_folder / "mine").mkdir()
    (in_a_folder / "mine" / "task-0.log").write_text("of launch")
    fake_slurm.command("sbatch", "exit 1")
    with pytest.raises(SlurmError):
        submit(earlier=resume.find("mine", Path("runs")))
    assert files(in_a_folder) == ["mine", "mine/task-0.log"]


def test_half_an_array_is_taken_back(fake_slurm: FakeSlurm, in_a_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "new_name", lambda name: f"{name}-x")
    create = run_dirs.create

    def create_others(path: Path, *, shared: bool) -> None:
        if path.name == "2":
            path.touch()
        create(path, shared=shared)

    monkeypatch.setattr(run_dirs, "create", create_others)
    with pytest.raises(RunDirError, match="fit-x/2:\n  it exists already"):
        submit(JobSpec(name="fit", command=("t",), array="0-3"))
    assert fake_slurm.calls("sbatch") == []
    assert files(in_a_folder) == []


def test_an_unwritable_folder_is_found_before_sbatch(fake_slurm: FakeSlurm, in_a_folder: Path) -> None:
    (in_a_folder / "file").write_text("")
    with pytest.raises(RunDirError, match="Not a directory"):
        submit(runs_dir=in_a_folder / "file" / "runs")
    if os.geteuid() != 0:
        in_a_folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
        with pytest.raises(RunDirError, match="denied"):
            submit()
    assert fake_slurm.calls("sbatch") == []


@pytest.mark.parametrize("name", ["100%j", "a\\b", "a\nb"])
def test_folders_that_slurm_would_misread_are_refused(fake_slurm: FakeSlurm, in_a_folder: Path, name: str) -> None:
    with pytest.raises(RunDirError, match="which Slurm interprets"):
        submit(runs_dir=in_a_folder / name)
    assert fake_slurm.calls("sbatch") == []
    assert files(in_a_folder) == []


def test_a_plan_changes_nothing(fake_slurm: FakeSlurm, in_a_folder: Path) -> None:
    text = str(Plan(spec=SPEC))
    assert text.startswith("$ sbatch --parsable '--output=")
    assert "#SBATCH --nodes=2" in text
    assert files(in_a_folder) == []
    assert fake_slurm.calls("sbatch") == []


@pytest.mark.parametrize(
    ("spec", "options", "found"),
    [
        (
            SPEC,
            {"local": True},
            "it asks for 2 nodes, but this machine is one node; --nodes 1 --gpus-per-node 2 would fit",
        ),
        (JobSpec(name="x", command=("t",), array="0-3"), {"local": True}, "only Slurm supports arrays"),
        (JobSpec(name="x", command=("t",), after="3"), {"local": True}, "only Slurm supports job dependencies"),
        (JobSpec(name="x", command=("t",), container_image="a"), {"local": True}, "only Slurm supports Pyxis images"),
        (
            JobSpec(name="x", command=("t",), restarts=1, spare_nodes=1),
            {"local": True},
            "it sets spare_nodes=1, and only Slurm supports spare nodes",
        ),
        (JobSpec(name="x", restart_args="--resume"), {"function": print}, "a function has no command line"),
        (JobSpec(name="x"), {}, "there is nothing to run"),
        (JobSpec(name="x", command=("t",)), {"function": print}, "a job runs either a function or a command"),
        (JobSpec(name="x", container="x.sif"), {"function": print}, "loaded by the Python that submits it"),
        (JobSpec(name="x", container_image="x"), {"function": print}, "loaded by the Python that submits it"),
        (JobSpec(name="x", venv="/else/where"), {"function": print}, "loaded by the Python that submits it"),
        (JobSpec(name="x", conda_env="else"), {"function": print}, "loaded by the Python that submits it"),
        (JobSpec(name="x", launcher="fork"), {"function": print}, "in one task per GPU"),
    ],
)
def test_what_can_not_be_combined(fake_slurm: FakeSlurm, spec: JobSpec, options: dict[str, Any], found: str) -> None:
    with pytest.raises(SpecError, match=found):
        Plan(spec=spec, **options)


def test_without_slurm_a_job_runs_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "job.sh" in str(Plan(spec=JobSpec(name="x", command=("t",))))
    with pytest.raises(SpecError, match="no sbatch on the PATH"):
        Plan(spec=SPEC)
    assert "#SBATCH --nodes=2" in str(Plan(spec=SPEC, must_run=False))
