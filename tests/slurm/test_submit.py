"""`python -m cluster_ddp.submit` and `cluster_ddp.submit`, on the real thing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import real_apptainer
from chaos import faults
from cluster import ROOT, SUBMIT, Cluster, Place, differing, output, records
from slowness import LIMIT_S, scaled, wait_until
from stand_ins import HOSTILE

import cluster_ddp
from cluster_ddp import JobSpec
from cluster_ddp.slurm import commands, job_status
from cluster_ddp.submission.checks import script_mistakes

TWO_BY_TWO = ("--nodes", "2", "--gpus-per-node", "2")
HELLO = ("python", str(ROOT / "examples" / "hello_ddp.py"))


@pytest.fixture
def place(slurm: Cluster, tmp_path: Path) -> Place:
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    return Place(slurm, folder)


@pytest.fixture
def cluster_env(slurm: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """This process on the login node, in a folder of its own."""
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, slurm.env[name])
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def training(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a training, which runs beside the other tests."""
    return Place(slurm, tmp_path_factory.mktemp("it's training")).start(*TWO_BY_TWO, *DIGITS, "--lr", "0.5")


ASK_VARIABLES = """import json, os
if os.environ["RANK"] == "1":
    print(json.dumps({name: value for name, value in os.environ.items() if name.startswith("SLURM_")}))
"""


@pytest.mark.every_slurm
@pytest.mark.parametrize("launcher", [pytest.param("srun"), pytest.param("fork", marks=pytest.mark.full)])
def test_the_variables_that_submit_warns_of_have_no_value(place: Place, launcher: str) -> None:
    (place.folder / "t.py").write_text(ASK_VARIABLES)
    words = ("--no-check", "--gpus-per-node", "2", "--launcher", launcher, "--watch", "--", "python", "t.py")
    done = place.submit(*words)
    variables = json.loads(re.findall(r"^(?:\[task-1\] )?(\{.*)$", done.stdout, re.MULTILINE)[0])
    spec = JobSpec(name="x", gpus_per_node=2, launcher=launcher)  # type: ignore[arg-type]
    never = ("SLURM_CPUS_PER_TASK", "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_JOB_ID", "SLURM_GPUS", "SLURM_GPUS_PER_NODE")
    for name in (*never, "SLURM_GPUS_PER_TASK", "SLURM_PROCID", "SLURM_NTASKS_PER_NODE", "SLURM_GPUS_ON_NODE"):
        assert bool(script_mistakes.cure_of_unset(spec, name, on_slurm=True)) == (name not in variables), name
    assert variables.get("SLURM_RESTART_COUNT", "0") == "0"
    assert variables["SLURM_PROCID"] == "1"


TRAIN = ("python", "-m", "cluster_ddp.train")
DIGITS = ("--dataset", "digits", "--epochs", "2", "--batch-size", "8", "--model", "convnet")


def test_the_first_one_starts_the_training(training: Path) -> None:
    assert training.is_symlink()


@pytest.mark.parametrize(("launcher", "gpus"), [pytest.param("srun", 2, marks=pytest.mark.full), ("fork", 1)])
def test_a_script_that_knows_only_torchruns_variables(place: Place, launcher: str, gpus: int) -> None:
    size, script = ("--nodes", "2", "--gpus-per-node", str(gpus)), ROOT / "tests" / "helpers" / "torchrun_script.py"
    run_dir = place.start(*size, "--launcher", launcher, "--", "python", str(script))
    said, ranks = place.completed(run_dir), 2 * gpus
    assert sorted(re.findall(rf"rank (\d) of {ranks}: loss", said)) == [str(rank) for rank in range(ranks)]
    assert {path.name for path in run_dir.glob("*.log")} == {"job.log", *(f"task-{i}.log" for i in range(ranks))}
    assert "has joined a process group" not in said


@pytest.mark.every_slurm
def test_a_rank_is_the_users_command(place: Place) -> None:
    """It is shown as it was given. Beside it there is one agent for each task and one for the job."""
    (place.folder / "sleeper.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(86400)\n")
    run_dir = place.start(*TWO_BY_TWO, "--launcher", "srun", "--", "python", "sleeper.py")
    wait_until(lambda: output(run_dir).count("up\n") == 4, said=lambda: output(run_dir))
    layout, job_id = place.slurm.layout, run_dir.name.rpartition("-")[2]
    pids = [pid for node in layout.node_names for pid in faults.processes_of_job(layout, node, int(job_id))]
    shown = [Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1] for pid in pids]
    commands.run(["scancel", job_id], env=place.slurm.env)
    assert shown.count(["python", "sleeper.py"]) == 4, shown
    assert [words[1:3] for words in shown].count(["-I", "-S"]) == 5, shown
    assert not [words for words in shown if Path(words[0]).name in ("bash", "sh")], shown


@pytest.mark.every_slurm
def test_every_argument_arrives_as_it_was(place: Place) -> None:
    show = "import os, sys; print(sys.argv[1:], os.environ['CLUSTER_DDP_RUN_DIR'])"
    run_dir = place.start("--gpus-per-node", "2", "--", "python", "-c", show, *HOSTILE)
    said = place.completed(run_dir)
    assert said.count(f"{HOSTILE} {run_dir.resolve()}") == 2
    assert not list(place.folder.rglob("pwned"))


@pytest.mark.full
def test_a_grid_of_eight(place: Place) -> None:
    tell = 'echo "seed $1 lr $2 port $MASTER_PORT folder $CLUSTER_DDP_RUN_DIR"'
    grid = ("--array", "seed=0..3", "lr=0.1,it's $(touch pwned)%4")
    first = place.start(*grid, "--", "bash", "-c", tell, "bash", "{seed}", "{lr}")
    folders = [first.parent / str(task) for task in range(8)]
    said = [
        re.search(r"seed (\d) lr (.*) port (\d+) folder (.*)", place.completed(folder)).groups() for folder in folders
    ]
    assert [one[:2] for one in said] == [(str(seed), lr) for seed in range(4) for lr in ("0.1", "it's $(touch pwned)")]
    assert len({port for _, _, port, _ in said}) == 8
    assert [folder for *_, folder in said] == [str(folder.resolve()) for folder in folders]
    assert (place.folder / "runs" / "latest").resolve() == first.resolve()
    assert not list(place.folder.rglob("pwned"))


def test_from_inside_a_job_and_from_salloc_it_is_the_same_job(place: Place) -> None:
    """What the tasks of three jobs see: submitted from a shell, from salloc's, from a task of another job."""
    tell = 'env -0 >"$CLUSTER_DDP_RUN_DIR/env-$SLURM_PROCID"'
    inner = [*SUBMIT, *TWO_BY_TWO, "--no-check", "--name", "inner", "--", "bash", "-c", tell]
    volatile = re.compile(
        r"\w*(JOB_?ID|START_ID|JOB_SLUID|NODELIST|NODENAME|PORT|TIMES?|PID|COOKIE|ADDR|RUN_DIR|RESUME|NOTES|AGENT|CHANNEL|SECRET|TOPOLOGY\w*)"
        r"|\w*(HOST|HOSTNAME|NODEID)|_|SHLVL"
    )
    seen = []
    allocate = ("--nodes=1", "--ntasks=2", "--cpus-per-task=2", "--gres=gpu:1", "--job-name=outer", "--time=2")
    for before in (
        (),
        ("salloc", "--quiet", *allocate),
        ("srun", "--quiet", *allocate[:1], "--ntasks=1", *allocate[2:]),
    ):
        done = place.slurm.run(*before, *inner, cwd=place.folder)
        assert done.returncode == 0, done.stderr
        run_dir = place.folder / re.search(r"Run directory: (\S+)", done.stdout)[1]
        place.completed(run_dir)
        pairs = (entry.split("=", 1) for entry in (run_dir / "env-3").read_text().split("\0") if entry)
        seen.append({name: value for name, value in pairs if not volatile.fullmatch(name)})
    assert seen[0].get("SLURM_STEP_NUM_TASKS") == "4"
    assert [differing(seen[0], other) for other in seen[1:]] == [{}, {}]


@pytest.mark.full
def test_in_a_container_that_strips_slurms_variables(place: Place) -> None:
    """A real Apptainer, which is told to pass no variable on, with an image that has nothing of its own."""
    real_apptainer.image(place.folder / "my image")
    env = {"PATH": f"{real_apptainer.fetch()}:{place.slurm.env['PATH']}", "APPTAINER_CLEANENV": "1"}
    env |= {"APPTAINERENV_PYTHONPATH": str(ROOT), "APPTAINERENV_PREPEND_PATH": str(Path(sys.executable).parent)}
    env["APPTAINERENV_TMPDIR"] = os.environ["TMPDIR"]  # the tests remove it
    binds = (word for folder in real_apptainer.BINDS for word in ("--container-binds", folder))
    options = (*TWO_BY_TWO, "--launcher", "srun", "--container", "my image", *binds, "--watch")
    names = "APPTAINER_NAME|SLURM_PROCID|SLURM_JOB_ID"
    show = f"env | grep -E '^({names})='; echo secret ${{#CLUSTER_DDP_SECRET}}; exec \"$@\""
    done = place.submit(*options, "--", "bash", "-c", show, "bash", *HELLO, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The sum of all ranks is 6." in done.stdout
    assert "APPTAINER_NAME=my image" in done.stdout
    assert "secret 64" in done.stdout
    assert "SLURM_PROCID" not in done.stdout
    assert "SLURM_JOB_ID" in done.stdout


def test_a_sites_template(place: Place) -> None:
    template = ROOT / "examples" / "templates" / "with_prologue.sbatch.j2"
    command = ("bash", "-c", 'ls -d "$SITE_SCRATCH"')
    done = place.submit("--nodes", "2", "--template", str(template), "--watch", "--", *command)
    assert done.returncode == 0, done.stdout + done.stderr
    scratch = re.search(r"^(/\S+/bash-\d+-\w+)$", done.stdout, re.MULTILINE)[1]
    assert f"[task-1] {scratch}" in done.stdout
    assert not Path(scratch).exists()


def test_watch_ends_as_the_job_ends(place: Place) -> None:
    both = "touch told-$SLURM_PROCID; until [ -e told-0 ] && [ -e told-1 ]; do sleep 0.1; done"  # else 1 ends 0 first
    command = ("bash", "-c", f"echo task $SLURM_PROCID; {both}; if ((SLURM_PROCID == 1)); then exit 7; fi")
    done = place.submit("--gpus-per-node", "2", "--watch", "--", *command)
    assert done.returncode == 7, done.stdout + done.stderr
    assert "task 0\n" in done.stdout
    assert "[task-1] task 1" in done.stdout
    assert re.search(r"job \d+: FAILED after [\d:]+, exit status 7", done.stdout)


def test_an_interrupted_watch_leaves_the_job_running(place: Place) -> None:
    process = subprocess.Popen(
        [*SUBMIT, "--watch", "--", "sleep", "600"],
        cwd=place.folder,
        env=dict(place.slurm.env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "RUNNING" in line:
            break
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=scaled(LIMIT_S))
    assert process.returncode == 130
    job_id, cancel = re.search(r"job (\d+) continues\.\nTo follow it: .*\nTo end it: cluster-ddp (.*)", said).groups()
    (status,) = job_status.job_statuses(job_id, env=place.slurm.env)
    assert status.state == "RUNNING"
    ended = place.slurm.run(sys.executable, "-m", "cluster_ddp", *cancel.split(), cwd=place.folder)
    assert ended.stdout.startswith(f"Cancelled job {job_id} (sleep).")
    assert place.end_of(place.folder / "runs" / f"sleep-{job_id}").state == "CANCELLED"


def test_one_after_the_other(place: Place) -> None:
    first = place.start("--name", "first", "--", "bash", "-c", "sleep 2; touch done")
    label = first.name.removeprefix("first-")
    second = place.start("--name", "second", "--after", label, "--", "test", "-e", "done")
    place.completed(second)
    failing = place.start("--name", "failing", "--", "bash", "-c", "sleep 1; exit 1")
    label = failing.name.removeprefix("failing-")
    never = place.start("--name", "never", "--after", label, "--", "true")
    assert place.end_of(never).state == "CANCELLED"


@pytest.mark.every_slurm
def test_the_scheduler_is_asked_and_nothing_submitted(place: Place) -> None:
    done = place.submit(*TWO_BY_TWO, "--test-only", "--", "true")
    assert done.returncode == 0, done.stderr
    assert "to start at" in done.stdout
    assert place.files() == []


BAD = [
    (("--partition", "man"), "Did you mean main?"),
    (("--gpus-per-node", "3"), "the nodes of partition main have at most 2 GPUs"),
    (("--nodes", "5"), "partition main has 4 nodes with these GPUs, CPUs and memory, not 5"),
    (("--gpu-type", "a100"), "GPUs have no types here"),
    (("--partition", "man", "--no-check"), "sinfo -o %P"),
    (("--gpus-per-node", "3", "--no-check"), "sinfo -o"),
    (("--mem", "9000G", "--no-check"), "sinfo -o"),
]


@pytest.mark.every_slurm
@pytest.mark.parametrize(("options", "words"), BAD, ids=[" ".join(options) for options, _ in BAD])
def test_what_the_cluster_has_not_is_an_error_and_leaves_nothing(
    place: Place, options: tuple[str, ...], words: str
) -> None:
    name = "refused" + "".join(filter(str.isalnum, "".join(options)))
    done = place.submit("--name", name, *options, "--", "true")
    assert done.returncode == 2, done.stdout
    assert "error: " in done.stderr
    assert "Hint: " in done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert place.files() == []
    assert commands.run(["squeue", "--noheader", f"--name={name}"], env=place.slurm.env) == ""


def test_a_time_over_the_partitions_limit_is_an_error(place: Place) -> None:
    """sbatch itself takes it, and lets the job wait for ever."""
    env = place.slurm.env
    commands.run(["scontrol", "update", "PartitionName=urgent", "MaxTime=60"], env=env)
    try:
        done = place.submit("--partition", "urgent", "--time", "2:00:00", "--", "true")
    finally:
        commands.run(["scontrol", "update", "PartitionName=urgent", "MaxTime=UNLIMITED"], env=env)
    assert done.returncode == 2
    assert "the time limit of partition urgent is 0-01:00:00; the job asks for 0-02:00:00" in done.stderr
    assert "Hint: --time 0-01:00:00" in done.stderr


@pytest.mark.every_slurm
def test_a_function_gets_the_world(cluster_env: Path) -> None:
    def train(world: cluster_ddp.World, seed: str) -> tuple[float, str, int]:
        return world.sum(world.rank), seed, world.world_size

    spec = JobSpec(name="f", nodes=2, gpus_per_node=1, grid={"seed": ("5", "it's")})
    jobs = cluster_ddp.submit_array(spec, train, check=False)
    assert [job.result(timeout_s=scaled(LIMIT_S)) for job in jobs] == [(1.0, "5", 2), (1.0, "it's", 2)]
    assert jobs[0].results() == [(1.0, "5", 2)] * 2
    assert jobs[1].state() == "COMPLETED"
    assert jobs[1].run_dir == (cluster_env / "runs" / f"f-{jobs[1].id.replace('_', '/')}").resolve()


def test_a_job_can_be_cancelled(cluster_env: Path) -> None:
    job = cluster_ddp.submit(JobSpec(name="f"), ["bash", "-c", "echo started; sleep 86400"], check=False)
    wait_until(lambda: "started" in job.logs())
    job.cancel()
    assert job.wait(timeout_s=scaled(LIMIT_S)).state == "CANCELLED"
    with pytest.raises(cluster_ddp.errors.JobError, match="it ended as CANCELLED"):
        job.result()


def test_the_reference_job_trained(slurm: Cluster, training: Path) -> None:
    run_dir = training
    place = Place(slurm, run_dir.parents[1])
    place.completed(run_dir)
    lines = records(run_dir)
    accuracy = [line["accuracy"] for line in lines if line["kind"] == "test"][-1]
    assert accuracy > 0.9
    config = json.loads((run_dir / "run.json").read_text())
    assert (config["topology"]["world_size"], config["config"]["lr"], config["config"]["epochs"]) == (4, 0.5, 2)
    done = slurm.run(sys.executable, "-m", "cluster_ddp", "status", cwd=place.folder)
    row = next(line for line in done.stdout.splitlines() if line.startswith(run_dir.name.removeprefix("mnist-")))
    assert re.fullmatch(r"\d+\s+mnist\s+COMPLETED\s+[\d:]+\s+0\s+0\s+2\s+0\.\d+\s+9\d\.\d\d %\s+\d+", row)


def test_the_files_of_a_run_directory(slurm: Cluster, training: Path) -> None:
    Place(slurm, training.parents[1]).completed(training)
    assert records(training)[-1]["kind"] == "done"
    names = {path.name for path in training.iterdir()}
    assert {
        "checkpoints",
        *(f"task-{rank}.log" for rank in range(4)),
        ".lock",
        ".progress",
        ".start",
        "agent.pyz",
        "job.jsonl",
        "spec.json",
        "job.json",
        "job.sbatch",
        "job.log",
        "metrics.jsonl",
        "starts.jsonl",
        "usage-0.jsonl",
        "usage-1.jsonl",
        "run.json",
    } == names
