"""Jobs on this machine, for real."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from slowness import LIMIT_S, scaled, wait_until
from stand_ins import HOSTILE

from cluster_ddp import processes
from cluster_ddp.cli import status
from cluster_ddp.cli import submit as door
from cluster_ddp.cli.submit import main
from cluster_ddp.errors import JobError, RunDirError
from cluster_ddp.slurm.port import candidates
from cluster_ddp.submission import resume, submit_plan
from cluster_ddp.submission.job import Job
from cluster_ddp.submission.planning import Plan
from cluster_ddp.submission.spec import JobSpec


@pytest.fixture(autouse=True)
def without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "mkdir", "nproc", "sleep", "env", "cat"):
        (tools / name).symlink_to(f"/usr/bin/{name}")
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[4]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_result_that_others_could_have_written_is_not_loaded() -> None:
    job = submit(function=os.getcwd, share=True)
    assert job.result(timeout_s=scaled(LIMIT_S)) == str(Path.cwd())
    (result, *_) = sorted(job.run_dir.glob("*_0_result.pkl"))
    result.chmod(0o662)  # by others than a group that may be the user's private one
    with pytest.raises(RunDirError, match="may be written by others"):
        job.result(timeout_s=scaled(LIMIT_S))
    result.chmod(0o600)
    assert job.result(timeout_s=scaled(LIMIT_S)) == str(Path.cwd())
    if os.geteuid() == 0:
        os.chown(result, 12345, -1)
        with pytest.raises(RunDirError, match="belongs to user 12345"):
            job.result(timeout_s=scaled(LIMIT_S))


def test_the_results_of_all_ranks_of_the_last_start() -> None:
    def train() -> str:
        return f"done on {os.environ['RANK']}"

    job = submit(function=train)
    assert job.results(timeout_s=scaled(LIMIT_S)) == ["done on 0", "done on 1"]
    first, second = sorted(job.run_dir.glob("*_result.pkl"))
    (job.run_dir / second.name.replace("_1_", "_2_")).write_bytes(pickle.dumps(("error", "of an earlier start")))
    assert replace(job, ranks=3).results() == ["done on 0", "done on 1"]
    second.unlink()
    with pytest.raises(JobError, match="rank 1 ended without a result"):
        job.results()
    first.unlink()
    with pytest.raises(JobError, match="rank 0 ended without a result"):
        job.result()


def test_a_function_resumes_from_its_pickle() -> None:
    def train() -> str:
        mark = Path(os.environ["CLUSTER_DDP_RUN_DIR"], "mark")
        if not mark.exists():
            mark.touch()
            raise ValueError("not yet")
        return f"done on {os.environ['RANK']}"

    job = submit(function=train)
    with pytest.raises(JobError, match="ValueError: not yet"):
        job.result(timeout_s=scaled(LIMIT_S))
    assert door.main(["--resume", job.id, "--no-check", "--watch"]) == 0
    label = json.loads((job.run_dir / "job.json").read_text())["job"]
    assert replace(job, id=label).result() == "done on 0"
    assert (
        door.main(["--resume", job.id, "--no-check", "--watch", "--gpus-per-node", "1"]) == 0
    )  # by its first job, too


def test_a_specification_of_another_users_does_not_run() -> None:
    job = submit("false")
    assert job.wait(timeout_s=scaled(LIMIT_S)).state == "FAILED"
    (job.run_dir / "spec.json").chmod(0o666)
    job.run_dir.chmod(0o755)
    with pytest.raises(RunDirError, match="may be written by others"):
        resume.find(job.run_dir, Path("runs"))


def submit(*command: str, function=None, **fields) -> Job:
    spec = JobSpec(name="here", command=command, gpus_per_node=2, **fields)
    (submitted,) = submit_plan.submit(Plan(spec=spec, function=function))
    return submitted


def wait_for_the_process(job: Job) -> None:
    """Until it is gone: it notes its end, and ends a little later."""
    wait_until(lambda: not processes.started(int(job.id)))


@pytest.mark.quick
def test_a_command_runs_once_per_gpu() -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR"]
    names += ["CLUSTER_DDP_RUN_DIR", "CUDA_VISIBLE_DEVICES"]
    job = submit("bash", "-c", "echo " + " ".join(f"${name}" for name in names))
    assert job.result(timeout_s=scaled(LIMIT_S)) == 0
    assert job.state() == "COMPLETED"
    wait_for_the_process(job)
    lines = [(job.run_dir / f"task-{rank}.log").read_text() for rank in (0, 1)]
    assert lines == [f"{rank} {rank} 2 2 0 127.0.0.1 {job.run_dir} 0,1\n" for rank in (0, 1)]
    assert (job.run_dir / "job.log").read_text() == ""
    assert "==> task-1.log <==\n1 1 2" in job.logs()
    left = {path.name for path in job.run_dir.iterdir()}
    logs = {"job.log", "task-0.log", "task-1.log"}
    assert left == {"agent.pyz", "job.json", "job.jsonl", "job.sh", "spec.json", *logs}


def test_every_argument_arrives_as_it_was() -> None:
    show = "import sys; print(sys.argv[1:])"
    job = submit(sys.executable, "-c", show, *HOSTILE, "--", "a", "--", "b")
    assert job.result(timeout_s=scaled(LIMIT_S)) == 0
    shown, *_ = (job.run_dir / "task-0.log").read_text().splitlines()
    assert shown == f"{[*HOSTILE, '--', 'a', '--', 'b']}"
    assert not list(Path.cwd().rglob("pwned"))


def test_a_command_knows_its_job_and_its_ports() -> None:
    """So that a new start waits for the former one's lock, and a port that is taken costs nothing."""
    show = "import os; from cluster_ddp import Topology; place = Topology.from_environ(os.environ)\n"
    Path("show.py").write_text(show + "print(place.job_id, sorted(place.port_candidates))\n")
    job = submit(sys.executable, "show.py")
    assert job.result(timeout_s=scaled(LIMIT_S)) == 0
    assert (job.run_dir / "task-1.log").read_text() == f"{job.id} {sorted(candidates(int(job.id)))}\n"


def test_a_broken_setup_is_in_the_log() -> None:
    job = submit("true", setup=("echo in vain >&2; false",))
    assert job.wait(timeout_s=scaled(LIMIT_S)).state == "FAILED"
    assert "in vain" in job.logs()


@pytest.mark.full
def test_the_reference_job_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--local", "--nodes", "1", "--gpus-per-node", "2", "--dataset", "digits", "--model", "convnet")
    status = main([*words, "--epochs", "1", "--no-cuda", "--watch"])
    captured = capsys.readouterr()
    assert status == 0, captured
    assert "2 ranks, 1437 training samples, run directory" in captured.out
    run_dir = Path("runs/latest")
    assert {"metrics.jsonl", "run.json", "task-0.log", "task-1.log", "job.log", "spec.json"} <= {
        path.name for path in run_dir.iterdir()
    }


@pytest.mark.parametrize("text", ["{", '{"event": "end", "state": "COMPLETED"}', "[]"])
def test_a_job_whose_end_is_damaged_has_failed_and_can_be_resumed(text: str) -> None:
    job = submit("true")
    wait_for_the_process(job)
    (job.run_dir / "job.jsonl").write_text(text)
    assert job.state() == "FAILED"
    resume.find(job.run_dir, job.run_dir.parent).refuse_unended()


def test_the_job_goes_on_without_us(tmp_path: Path) -> None:
    """Submitted by a process that ends; looked at by this one."""
    code = (
        "from cluster_ddp.submission import planning, submit_plan; from cluster_ddp.submission.spec import JobSpec\n"
        "spec = JobSpec(name='here', command=('bash', '-c', 'sleep 1; echo done'))\n"
        "print(submit_plan.submit(planning.Plan(spec=spec))[0].run_dir)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=scaled(LIMIT_S)
    )
    log = Path(done.stdout.strip()) / "task-0.log"
    wait_until(lambda: log.exists() and "done" in log.read_text())


def test_each_start_has_a_secret_that_only_its_ranks_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the batch script makes it on a cluster."""
    note = (
        'echo "$CLUSTER_DDP_SECRET" >"$1/$RANK.${SLURM_RESTART_COUNT:-0}"; exit $((${SLURM_RESTART_COUNT:-0} ? 0 : 75))'
    )
    monkeypatch.setenv("CLUSTER_DDP_SECRET", "of the job that submits this one")
    job = submit("bash", "-c", note, "bash", str(tmp_path), setup=('echo "inherited: ${CLUSTER_DDP_SECRET-nothing}"',))
    assert job.result(timeout_s=scaled(LIMIT_S)) == 0
    assert "inherited: nothing\n" in (job.run_dir / "job.log").read_text()
    first, second = ([(tmp_path / f"{rank}.{start}").read_text().strip() for rank in (0, 1)] for start in (0, 1))
    assert len(first[0]) == 64 and first[0] == first[1] and second[0] == second[1] != first[0]
    for path in job.run_dir.iterdir():
        assert not any(secret.encode() in path.read_bytes() for secret in (*first, *second)), path


def ended_without_a_word() -> Job:
    """A job whose end nobody has noted."""
    job = submit("false")
    wait_for_the_process(job)
    (job.run_dir / "job.jsonl").unlink()
    return job


def rewrite(run_dir: Path, **changes: object) -> None:
    known = json.loads((run_dir / "job.json").read_text())
    (run_dir / "job.json").write_text(json.dumps(known | changes))


def kernels_process() -> str | None:
    """The id of one that has no command line; None where only a container's processes are seen."""
    for path in Path("/proc").glob("[0-9]*"):
        if (
            not (path / "cmdline").read_bytes()
            and (path / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        ):
            return path.name
    return None


@pytest.mark.fault("another process now has a local job's process id", "FAILED; `cancel` ends nothing", bound="at once")
def test_a_later_process_with_the_jobs_id_is_not_the_job() -> None:
    """Even one that names the run directory, such as an editor, or one that has no command line."""
    job = ended_without_a_word()
    names_it = [sys.executable, "-c", "import time; time.sleep(600)", str(job.run_dir)]
    with subprocess.Popen(names_it) as later:
        try:
            for label in filter(None, (str(later.pid), kernels_process())):
                rewrite(job.run_dir, job=label)
                assert replace(job, id=label).state() == "FAILED"
            replace(job, id=str(later.pid)).cancel()
            rewrite(job.run_dir, job=str(later.pid))
            replace(job, id=str(later.pid)).cancel()
            with pytest.raises(subprocess.TimeoutExpired):
                later.wait(1)
        finally:
            later.kill()


def test_a_job_of_another_machine_is_not_looked_for_here(capsys: pytest.CaptureFixture[str]) -> None:
    """Its id means nothing here. A shared folder may have its run directory."""
    job = ended_without_a_word()
    rewrite(job.run_dir, host="elsewhere", process="another boot 1")
    for ask in (job.state, job.cancel):
        with pytest.raises(RunDirError, match="it was started on elsewhere") as caught:
            ask()
    assert status.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["state"] == "unknown"
    with pytest.raises(SystemExit):
        door.main(["--resume", str(job.run_dir), "--no-check"])
    assert "it was started on elsewhere" in capsys.readouterr().err
    noted = caught.value.hint.partition("note that: ")[2]
    subprocess.run(["/usr/bin/bash", "-c", noted], check=True)
    assert job.state() == "FAILED"


def test_another_users_job_is_not_cancelled_and_said_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    job = submit("sleep", "600")
    try:
        with monkeypatch.context() as patched:

            def refuse(pid: int, number: int) -> None:
                raise PermissionError(1, "Operation not permitted")

            patched.setattr(os, "kill", refuse)
            with pytest.raises(JobError, match="its process belongs to user"):
                job.cancel()
    finally:
        job.cancel()
        assert job.wait(timeout_s=scaled(LIMIT_S)).ended
