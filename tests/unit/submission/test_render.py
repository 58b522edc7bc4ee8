"""Rendered scripts: what is in them, and that nothing from outside becomes code when bash runs them."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster_ddp.submission.task_command import of_command, of_function
from slowness import scaled
from stand_ins import APPTAINER, HOSTILE
from strangers import as_stranger, folder_of_all, needs_a_stranger

from cluster_ddp.slurm.port import candidates, master_port
from cluster_ddp.submission import render as rendering
from cluster_ddp.submission.spec import JobSpec

ROOT = Path(__file__).parents[3]


def render(spec: JobSpec, *, source: str = "", **options: Any) -> str:
    return rendering.render(spec, of_command(spec), source=source, **options)


def run_script(text: str, folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a batch script as slurmd would, with an srun that runs its command once, as rank 0."""
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    srun = tools / "srun"
    srun.write_text(
        '#!/bin/bash\nwhile [[ $1 == --* ]]; do echo "srun option $1"; shift; done\n'
        'SLURM_PROCID=0 SLURM_LOCALID=0 exec "$@"\n'
    )
    srun.chmod(0o755)
    if not (tools / "scontrol").exists():
        stand_in(folder, "scontrol", f"#!/bin/sh\necho {DISABLED} >&2; exit 1\n")
    if not (tools / "squeue").exists():
        stand_in(folder, "squeue", "#!/bin/sh\necho N/A N/A\n")
    script = folder / "job.sbatch"
    script.write_text(text)
    job = {"SLURM_JOB_ID": "71", "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    job |= {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_CPUS_PER_NODE": "2(x2)"}
    return subprocess.run(
        ["bash", str(script), *arguments],
        cwd=folder,
        env={"PATH": f"{tools}:{os.environ['PATH']}", "SLURMD_NODENAME": "localhost", **job, **env},
        capture_output=True,
        text=True,
        timeout=scaled(60),
    )


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]


def test_tasks_and_gpus_match() -> None:
    text = render(JobSpec(name="x", command=("true",), nodes=3, gpus_per_node=4, gpu_type="a100"), source="")
    assert {"--nodes=3", "--ntasks-per-node=4", "--gres=gpu:a100:4"} <= set(directives(text))


@pytest.mark.parametrize("launcher", ["srun", "torchrun", "fork"])
def test_tasks_match_where_each_drives_several_gpus(launcher: Any) -> None:
    options: dict[str, Any] = {"command": ("python", "x.py"), "cpus_per_task": 3, "launcher": launcher}
    text = render(JobSpec(name="x", nodes=2, gpus_per_node=8, gpus_per_task=2, **options))
    assert {"--ntasks-per-node=4", "--gres=gpu:8", "--cpus-per-task=3"} <= set(directives(text))
    assert "export CLUSTER_DDP_GPUS_PER_TASK=2\n" in text


def test_only_what_was_asked_for_is_asked_for() -> None:
    assert directives(render(JobSpec(name="x", command=("true",)), source="")) == [
        "--job-name=x",
        "--nodes=1",
        "--ntasks-per-node=1",
        "--gres=gpu:1",
        '--output="%x-%j.out"',
        "--open-mode=append",
    ]


def test_everything_that_can_be_asked_for() -> None:
    spec = JobSpec(
        name="x",
        command=("true",),
        cpus_per_task=8,
        mem="32G",
        time="1-12",
        partition="gpu",
        account="me",
        qos="high",
        constraint="ib",
        array="0-3%2",
        signal="USR1@120",
        requeue=True,
        after="12",
        sbatch_options=("--reservation=course",),
    )
    expected = [
        *("--cpus-per-task=8", "--mem=32G", "--time=1-12:00:00", "--partition=gpu", "--account=me", "--qos=high"),
        *("--constraint=ib", "--array=0-3%2", "--signal=USR1@120", "--requeue", '--output="%x-%A_%a.out"'),
        *("--dependency=afterok:12", "--kill-on-invalid-dep=yes", "--reservation=course"),
    ]
    assert set(expected) <= set(directives(render(spec, source="")))
    assert "--no-requeue" in directives(render(JobSpec(name="x", command=("true",), requeue=False), source=""))


def test_a_dependency_of_the_users_own() -> None:
    spec = JobSpec(name="x", command=("true",), after="afterany:12:13")
    assert "--dependency=afterany:12:13" in directives(render(spec, source=""))


# The job is the one that srun's launcher asks for; the step has one task on each node. sbatch's options may have
# changed the job: of four ranks on a node, two are left.
ONE_TASK = ("ntasks=2", "ntasks-per-node=1")
CPUS_OF_THE_JOB = [
    ({"SLURM_CPUS_PER_TASK": "3", "SLURM_TRES_PER_TASK": "cpu=3", "SLURM_JOB_CPUS_PER_NODE": "6(x2)"}, 6, "3"),
    ({"SLURM_JOB_CPUS_PER_NODE": "2(x2)"}, 2, ""),
    ({"SLURM_JOB_CPUS_PER_NODE": "128(x2),16(x3),32"}, 16, ""),  # DefCpuPerGPU, or whole nodes
]


@pytest.mark.parametrize(("env", "cpus"), [case[:2] for case in CPUS_OF_THE_JOB])
def test_torchrun_has_a_task_per_node_with_the_cpus_of_all(tmp_path: Path, env: dict[str, str], cpus: int) -> None:
    spec = JobSpec(name="x", command=("a",), nodes=2, gpus_per_node=4, cpus_per_task=3, launcher="torchrun")
    text = render(spec)
    assert {"--ntasks-per-node=4", "--gres=gpu:4", "--cpus-per-task=3"} <= set(directives(text))
    stand_in(tmp_path, "python", '#!/bin/bash\nprintf "%s\\n" "$@"\n')
    said = run_script(text, tmp_path, SLURM_JOB_NUM_NODES="2", **env).stdout.splitlines()
    assert said[:4] == [f"srun option --{one}" for one in (*ONE_TASK, f"cpus-per-task={cpus}", "kill-on-bad-exit=1")]
    assert {"--nnodes=2", "--nproc-per-node=2"} <= set(said[4:])


def test_torchruns_agent_is_run_by_the_commands_python(tmp_path: Path) -> None:
    python = tmp_path / "my env" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/bash\necho "agent: $1 $2"\n')
    python.chmod(0o755)
    text = render(JobSpec(name="x", command=(str(python), "-m", "t"), launcher="torchrun"))
    assert "agent: -m torch.distributed.run\n" in run_script(text, tmp_path).stdout


def test_what_forks_its_ranks_has_a_task_per_node_with_the_cpus_of_all(tmp_path: Path) -> None:
    command = ("env", "A=it's", "python", "-u", "train.py", "--lr", "two words")
    spec = JobSpec(name="x", command=command, nodes=2, gpus_per_node=4, cpus_per_task=3, launcher="fork")
    text = render(spec, source="", run_prefix=f"{tmp_path}/x-")
    assert {"--ntasks-per-node=4", "--gres=gpu:4", "--cpus-per-task=3"} <= set(directives(text))
    script = "[[ -v SLURM_CPUS_PER_TASK || -v SLURM_TRES_PER_TASK ]] && exit 1  # the job's, not the step's\n"
    script += 'echo "$A" "$CLUSTER_DDP_CPUS_PER_TASK"; printf "%s\\n" "$@"\n'
    stand_in(tmp_path, "python", f"#!/bin/bash\n{script}")
    job = {"SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NUM_NODES": "2"}  # as sbatch's options have changed it
    for env, cpus, said in CPUS_OF_THE_JOB:
        assert run_script(text, tmp_path, "more", **job, **env).stdout.splitlines() == [
            *(f"srun option --{one}" for one in (*ONE_TASK, f"cpus-per-task={cpus}", "kill-on-bad-exit=1")),
            f"it's {said}",
            *("-u", "-m", "cluster_ddp.runtime.fork", "--ranks=2", f"--log-dir={tmp_path}/x-71"),
            *("--", "train.py", "--lr", "two words", "more"),
        ]


def test_what_forks_its_ranks_in_a_container_is_told_of_its_place(tmp_path: Path) -> None:
    stand_in(tmp_path, "apptainer", APPTAINER)
    stand_in(tmp_path, "python", '#!/bin/bash\nenv; echo "$*"\n')
    spec = JobSpec(name="x", command=("python", "a.py"), gpus_per_node=2, launcher="fork", container="/i.sif")
    lines = run_script(render(spec, source=""), tmp_path, SLURM_JOB_NUM_NODES="2").stdout.splitlines()
    assert {"WORLD_SIZE=4", "NODE_RANK=0", "MASTER_ADDR=localhost", "CLUSTER_DDP_CPUS_PER_TASK="} <= set(lines)
    assert lines[-1] == "-m cluster_ddp.runtime.fork --ranks=2 -- a.py"


def test_the_tasks_write_into_the_run_dir(tmp_path: Path) -> None:
    runs = tmp_path / "it's $(touch pwned) runs"
    text = render(JobSpec(name="x", command=("printenv", "CLUSTER_DDP_RUN_DIR")), source="", run_prefix=f"{runs}/x-")
    done = run_script(text, tmp_path)
    assert done.stdout.splitlines()[1:] == [
        f"srun option --output={runs}/x-71/task-%t.log",
        "srun option --open-mode=append",
        f"{runs}/x-71",
    ]
    done = run_script(text, tmp_path, SLURM_ARRAY_JOB_ID="70", SLURM_ARRAY_TASK_ID="3")
    assert done.stdout.splitlines()[-1] == f"{runs}/x-70_3"
    assert not (tmp_path / "pwned").exists()


def test_run_by_a_shell_it_says_what_it_is_for(tmp_path: Path) -> None:
    """bash jobs/mnist_2node.sbatch"""
    path = tmp_path / "a job.sbatch"
    path.write_text(render(JobSpec(name="x", command=("true",)), source=""))
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    done = subprocess.run(["bash", str(path)], env=env, capture_output=True, text=True, timeout=60)
    said = f"error: This is a script for Slurm, and this shell is not in a job. Hint: sbatch {path}\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


def test_called_from_another_folder_it_names_the_script_that_is_not_there(tmp_path: Path) -> None:
    """cd elsewhere; sbatch /path/jobs/hello_ddp.sbatch"""
    text = render(JobSpec(name="x", command=("python", "it's `mine`.py")), source="")
    command = ["bash", "-c", text]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "SLURM_JOB_ID": "1"}, capture_output=True, text=True, timeout=60
    )
    said = f"error: Running it's `mine`.py: there is no such file in {tmp_path}."
    assert (done.returncode, done.stderr) == (
        2,
        f"{said} Hint: call sbatch in its folder, or sbatch --chdir=FOLDER …\n",
    )
    with_run_dir = render(JobSpec(name="x", command=("python", "mine.py")), source="", run_prefix=f"{tmp_path}/x-")
    assert "no such file" not in with_run_dir, "the submission has checked that"


def test_a_snapshot_is_where_the_job_runs(tmp_path: Path) -> None:
    text = render(JobSpec(name="x", command=("pwd",)), source="", run_prefix=f"{tmp_path}/x-", code="code/a b")
    assert "code/a b" in run_script(text, tmp_path).stderr  # it isn't there
    (tmp_path / "x-71" / "code" / "a b").mkdir(parents=True)
    assert run_script(text, tmp_path).stdout.splitlines()[-1] == f"{tmp_path}/x-71/code/a b"


def test_each_array_task_has_its_values(tmp_path: Path) -> None:
    grid = {"seed": ("0", "1", "2"), "lr": ("0.1", "$(touch pwned) it's", "-1")}
    text = render(JobSpec(name="x", command=("echo", "{seed}:{lr}", "'{lr}'"), grid=grid), source="")
    outputs = [run_script(text, tmp_path, SLURM_ARRAY_TASK_ID=str(i)).stdout.splitlines()[-1] for i in range(9)]
    assert outputs == [f"{seed}:{lr} '{lr}'" for seed in grid["seed"] for lr in grid["lr"]]
    assert not (tmp_path / "pwned").exists()


def stand_in(folder: Path, name: str, text: str) -> None:
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / name).write_text(text)
    (folder / "bin" / name).chmod(0o755)


def test_a_container_gets_its_rank_by_the_environment(tmp_path: Path) -> None:
    image = "/images/it's $(touch pwned).sif"
    spec = JobSpec(
        name="x",
        command=("env",),
        container=image,
        container_binds=("/data sets:/data",),
        container_overlays=("/o.sqsh",),
    )
    stand_in(tmp_path, "apptainer", APPTAINER)
    env = {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NCCL_DEBUG": "INFO",
        "NCCL_SOCKET_IFNAME": "=ib0 x",
        "GLOO_SOCKET_IFNAME": "e",
    }
    lines = run_script(render(spec, source=""), tmp_path, **env).stdout.splitlines()
    assert {f"{name}={value}" for name, value in env.items()} <= set(lines)
    assert {"option --nv", "  /data sets:/data", "  /o.sqsh:ro", f"image {image}"} <= set(lines)
    assert {"RANK=0", "LOCAL_RANK=0", "WORLD_SIZE=4", "MASTER_ADDR=localhost", "CUDA_VISIBLE_DEVICES=0,1"} <= set(lines)
    assert "SLURM_JOB_ID=71" in lines
    assert not [line for line in lines if line.startswith(("SLURM_PROCID", "SLURM_NTASKS"))]
    assert not (tmp_path / "pwned").exists()


def test_a_container_on_amd_gpus_gets_them(tmp_path: Path) -> None:
    stand_in(tmp_path, "apptainer", APPTAINER)
    (tmp_path / "kfd").touch()
    text = render(JobSpec(name="x", command=("env",), container="/x.sif"), source="").replace(
        "/dev/kfd", f"{tmp_path}/kfd"
    )
    lines = run_script(text, tmp_path, ROCR_VISIBLE_DEVICES="2,3").stdout.splitlines()
    assert "option --rocm" in lines and "option --nv" not in lines
    assert "ROCR_VISIBLE_DEVICES=2,3" in lines


def test_without_a_container_runtime_the_job_says_so(tmp_path: Path) -> None:
    done = run_script(render(JobSpec(name="x", command=("env",), container="/i.sif"), source=""), tmp_path)
    assert done.returncode == 127
    assert "neither apptainer nor singularity is on the PATH" in done.stderr


def test_pyxis_is_asked_by_srun(tmp_path: Path) -> None:
    spec = JobSpec(name="x", command=("true",), container_image="nvcr.io#a/b:1", container_binds=("/data", "/a:/b"))
    lines = run_script(render(spec, source="", run_prefix=f"{tmp_path}/x-"), tmp_path).stdout.splitlines()
    assert "srun option --container-image=nvcr.io#a/b:1" in lines
    mounts = f"{tmp_path}:{tmp_path},{tmp_path}/x-71:{tmp_path}/x-71,/data:/data,/a:/b"
    assert f"srun option --container-mounts={mounts}" in lines


def test_a_function_is_called_by_submitits_runner(tmp_path: Path) -> None:
    """Its variables are the task's alone, braces in its path stay, and it gets no arguments of sbatch's."""
    spec = JobSpec(name="x", grid={"seed": ("1", "2")})
    text = rendering.render(spec, of_function(f"{tmp_path}/{{seed}}/x-%j", local=False), source="")
    shown = text.replace(shlex.quote(sys.executable), "env bash -c 'echo $SUBMITIT_EXECUTOR $*'", 1)
    done = run_script(shown, tmp_path, "more", SLURM_ARRAY_TASK_ID="1")
    assert done.stdout.splitlines()[-1] == f"slurm -m submitit.core._submit {tmp_path}/{{seed}}/x-%j"
    assert "SUBMITIT" not in render(JobSpec(name="x", command=("true",)))


def test_the_same_task_runs_on_this_machine(tmp_path: Path) -> None:
    """With the container and the launcher of the specification; `backends/test_local.py` runs them."""
    spec = JobSpec(name="x", command=("a", "b c"), container="/i.sif", launcher="torchrun", time="2", max_requeues=3)
    text = rendering.render_local(spec, of_command(spec), source="")
    for found in ("torch.distributed.run", "/i.sif", "a 'b c'", "--tasks=1", "--time-limit-s=120", "--max-requeues=3"):
        assert found in text


@pytest.mark.parametrize(
    ("asked", "passed_on"), [("R:SIGALRM@60", "ALRM"), ("14@60", "ALRM"), ("USR1@60", ""), ("99@60", ""), ("ODD", "")]
)
def test_a_tasks_shell_passes_on_the_warning_that_was_asked_for(asked: str, passed_on: str) -> None:
    """What is no signal here is sbatch's to refuse."""
    text = render(JobSpec(name="x", command=("true",), signal=asked))
    assert f"for signal in {' '.join(filter(None, ('USR1 USR2 HUP INT TERM', passed_on)))}; do trap" in text


def test_foreign_scripts_get_torchruns_variables(tmp_path: Path) -> None:
    names = ["RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"]
    command = ("bash", "-c", "echo " + " ".join(f"{name}=${name}" for name in names))
    done = run_script(render(JobSpec(name="x", command=command), source=""), tmp_path)
    assert done.stdout.splitlines() == [
        "srun option --kill-on-bad-exit=1",
        "RANK=0 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 WORLD_SIZE=4 NODE_RANK=0 "
        f"MASTER_ADDR=localhost MASTER_PORT={master_port(71)}",
    ]


@pytest.mark.parametrize("job_id", [0, 71, 22750, 22751, 4_294_967_295])
def test_the_scripts_port_is_pythons(tmp_path: Path, job_id: int) -> None:
    text = render(JobSpec(name="x", command=("printenv", "MASTER_PORT")), source="")
    done = run_script(text, tmp_path, SLURM_JOB_ID=str(job_id))
    assert int(done.stdout.splitlines()[-1]) in candidates(job_id)


def test_arguments_arrive_as_they_were(tmp_path: Path) -> None:
    show = ("python3", "-c", "import sys; print(sys.argv[1:])")
    text = render(JobSpec(name="x", command=(*show, *HOSTILE)), source="")
    done = run_script(text, tmp_path, "more $(touch pwned)", "'")
    assert done.stdout.splitlines()[-1] == str([*HOSTILE, "more $(touch pwned)", "'"])
    assert not (tmp_path / "pwned").exists()


def test_a_hostile_environment_path_is_inert(tmp_path: Path) -> None:
    venv = tmp_path / "it's $(touch pwned) a venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "activate").write_text("export ACTIVATED=yes\n")
    text = render(JobSpec(name="x", command=("printenv", "ACTIVATED"), venv=str(venv)), source="")
    assert run_script(text, tmp_path).stdout.splitlines()[-1] == "yes"
    assert not (tmp_path / "pwned").exists()


def test_a_missing_environment_ends_the_job(tmp_path: Path) -> None:
    text = render(JobSpec(name="x", command=("echo", "ran"), venv="/no/such/venv"), source="")
    done = run_script(text, tmp_path)
    assert done.returncode != 0
    assert "/no/such/venv/bin/activate" in done.stderr
    assert "ran" not in done.stdout


def test_the_array_task_reaches_the_command(tmp_path: Path) -> None:
    command = ("echo", "--seed={array_task_id}", "it's {array_task_id}")
    text = render(JobSpec(name="x", command=command, array="0-3"), source="")
    done = run_script(text, tmp_path, SLURM_ARRAY_TASK_ID="3")
    assert done.stdout.splitlines()[-1] == "--seed=3 it's 3"


def test_the_exit_status_is_the_commands(tmp_path: Path) -> None:
    text = render(JobSpec(name="x", command=("bash", "-c", "exit 75")), source="")
    assert run_script(text, tmp_path).returncode == 75


def test_modules_conda_and_setup_lines_come_first() -> None:
    spec = JobSpec(name="x", command=("true",), modules=("cuda/12.8",), conda_env="my env", setup=("ulimit -n 4096",))
    lines = render(spec, source="").splitlines()
    order = [lines.index(x) for x in ("module load cuda/12.8", "conda activate 'my env'", "ulimit -n 4096", "set -u")]
    assert order == sorted(order)


def test_the_committed_jobs_are_as_the_templates_would_have_them() -> None:
    command = [sys.executable, "scripts/render_jobs.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\nIf the change is meant: make jobs"


def requeues(folder: Path) -> list[str]:
    """What scontrol was told."""
    told = folder / "told"
    return told.read_text().splitlines() if told.exists() else []


def script_that_may_requeue(folder: Path, status: int, **fields: Any) -> str:
    stand_in(folder, "scontrol", f'#!/bin/bash\necho "$*" >>"{folder}/told"\n')
    stand_in(folder, "sleep", '#!/bin/sh\n[ "$1" != 60 ] || kill -KILL $PPID\n')  # as Slurm ends it
    command = ("bash", "-c", f"exit {status}")
    return render(JobSpec(name="x", command=command, **fields), source="", run_prefix=f"{folder}/x-")


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({}, ["requeue 71"]),
        ({"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3"}, ["requeue 70_3"]),
        ({"SLURM_ARRAY_JOB_ID": "71", "SLURM_ARRAY_TASK_ID": "3"}, ["requeue 71_3"]),  # the array's last task
        ({"SLURM_RESTART_COUNT": "0"}, ["requeue 71"]),  # the first start from Slurm 26.11 on
        ({"SLURM_RESTART_COUNT": "1"}, ["requeue 71"]),
        ({"SLURM_RESTART_COUNT": "2"}, []),
    ],
)
def test_what_was_stopped_in_time_is_queued_again(tmp_path: Path, env: dict[str, str], told: list[str]) -> None:
    done = run_script(script_that_may_requeue(tmp_path, 75, max_requeues=2), tmp_path, **env)
    assert done.returncode == (-signal.SIGKILL if told else 75)
    assert requeues(tmp_path) == told
    assert ("--max-requeues 2" in done.stderr) == (not told)


@pytest.mark.parametrize("status", [0, 1, 2, 137, 143])
def test_nothing_else_is_queued_again(tmp_path: Path, status: int) -> None:
    done = run_script(script_that_may_requeue(tmp_path, status), tmp_path)
    assert (done.returncode, requeues(tmp_path)) == (status, [])


def test_a_word_counts_where_the_status_is_lost(tmp_path: Path) -> None:
    """As under torchrun, or where srun tells the status of a sibling that it has ended."""
    text = script_that_may_requeue(tmp_path, 75).replace("exit 75'", 'touch "$CLUSTER_DDP_STOPPED"; exit 143\'')
    run_script(text, tmp_path)
    assert requeues(tmp_path) == ["requeue 71"]


@pytest.mark.parametrize(("restart", "status"), [("0", 0), ("0", 1), ("1", 0), ("1", 1)])
def test_a_word_of_an_earlier_start_does_not_count(tmp_path: Path, restart: str, status: int) -> None:
    """Nor one that it leaves only now, on a node that Slurm has lost."""
    folder = tmp_path / "x-71"
    folder.mkdir()
    text = script_that_may_requeue(tmp_path, status).replace(
        "bash -c 'exit", f"bash -c 'touch {folder}/.stopped-7; exit"
    )
    for late in ("0", "1", "2"):
        (folder / f".stopped-{late}").touch()
    done = run_script(text, tmp_path, SLURM_RESTART_COUNT=restart)
    assert (done.returncode, requeues(tmp_path)) == (status, [])


def test_a_command_that_hides_that_it_was_stopped_is_not_done(tmp_path: Path) -> None:
    text = script_that_may_requeue(tmp_path, 75).replace("exit 75'", 'touch "$CLUSTER_DDP_STOPPED"; exit 0\'')
    done = run_script(text, tmp_path)
    assert (done.returncode, requeues(tmp_path)) == (75, [])
    assert "stopped in time, but the command ended with status 0" in done.stderr


def left(run_dir: Path) -> tuple[str, int | None]:
    """What the batch script has noted of the first failure, and its status."""
    newest = max(run_dir.glob(".failed-*"), key=lambda path: path.stat().st_mtime)
    words, *rest = newest.read_text().splitlines()
    return words, int(rest[0].removeprefix("status ")) if rest else None


@pytest.mark.parametrize(
    ("marker", "status", "said"),
    [
        ("rank 1 on n2: ValueError: x\\nstatus 5\\n", 5, "Failed first, with status 5: rank 1 on n2: ValueError: x\n"),
        ("rank 1 on n2: ValueError: x\\n", 143, "Failed first, with status 143: rank 1 on n2: ValueError: x\n"),
        (
            "rank 0 on n1\\nstatus 9\\n",
            9,
            "9: rank 0 on n1: mine.Error: boom\n  Its log: {}/x-71/task-0.log\n",
        ),
        (
            "rank ? on n1: ValueError: x\\n",
            143,
            "Failed first, with status 143: rank ? on n1: ValueError: x\nTo resume",
        ),
        ("", 143, "To resume: "),
    ],
)
def test_the_log_ends_with_what_failed_first(tmp_path: Path, marker: str, status: int, said: str) -> None:
    """srun reports the status of a task that it has ended."""
    fails = f"""printf "{marker}" >"$CLUSTER_DDP_FAILED"; exit 143'"""
    text = script_that_may_requeue(tmp_path, 0).replace("exit 0'", fails)
    (tmp_path / "x-71" / "checkpoints").mkdir(parents=True)
    (tmp_path / "x-71" / "task-0.log").write_text("Traceback:\nValueError: inner\n[rank0]: mine.Error: boom\nBye.\n")
    (tmp_path / "x-71" / ".failed-7").write_text("rank 3 on n3: of an earlier start\n")
    done = run_script(text, tmp_path)
    assert done.returncode == status
    assert said.format(tmp_path) in done.stderr
    assert "earlier" not in done.stderr
    if marker:  # status reads it
        words = left(tmp_path / "x-71")[0]
        assert f"Failed first, with status {status}: {words}\n" in done.stderr
    (tmp_path / "x-71" / "checkpoints").rmdir()  # it never trained
    assert "To resume" not in run_script(text, tmp_path).stderr


def test_without_a_run_directory_the_log_ends_so_too(tmp_path: Path) -> None:
    """As in jobs/*.sbatch. The markers are in the working folder, and gone in the end."""
    says = """printf "rank 1 on n2\\nstatus 5\\n" >"$CLUSTER_DDP_FAILED"; echo "[rank1]: ValueError: x" >&2; exit 143"""
    spec = JobSpec(name="x", command=("bash", "-c", says), setup=("exec 2>>said",))
    done = run_script(render(spec, source=""), tmp_path)
    assert done.returncode == 5
    assert (tmp_path / "said").read_text().endswith("\nFailed first, with status 5: rank 1 on n2: ValueError: x\n")
    assert run_script(render(replace(spec, command=("bash", "-c", "exit 7")), source=""), tmp_path).returncode == 7
    assert f"Failed first, with status 7: rank 0 on {socket.gethostname()}\n" in (tmp_path / "said").read_text()
    stops = replace(spec, command=("bash", "-c", ': >"$CLUSTER_DDP_STOPPED"; exit 143'), max_requeues=0)
    (tmp_path / ".job-71-abcdefghij").mkdir()  # a start that was killed
    (tmp_path / ".job-71-abcdefghij" / ".failed-0").touch()
    (tmp_path / "precious").write_text("kept")
    (tmp_path / ".job-71.stopped-1").symlink_to("precious")  # by somebody who can write here, too
    assert run_script(render(stops, source=""), tmp_path, SLURM_RESTART_COUNT="1").returncode == 75
    assert [path.name for path in tmp_path.glob(".*")] == [".job-71.stopped-1"]
    assert (tmp_path / "precious").read_text() == "kept"


@needs_a_stranger
def test_a_folder_of_somebody_else_ends_no_job() -> None:
    """The ids of jobs can be guessed, and what others make in a folder such as /tmp can't be removed."""
    with folder_of_all() as folder:
        (folder / ".job-7-mine").mkdir()
        (folder / ".job-7-mine" / "kept").touch()
        text = rendering._rendered("run_dir.sh.j2", run_prefix=None, spec=JobSpec(name="x", command=("true",)))
        env = {"SLURM_JOB_ID": "7", "SLURM_NODEID": "0"}
        script = f"set -eo pipefail; cd {folder}\n{text}\necho {{still,runs}}"
        done = as_stranger("bash", "-c", script, **env)
        assert (done.returncode, done.stdout) == (0, "still runs\n"), done.stderr
        assert [path.name for path in folder.iterdir()] == [".job-7-mine"]


@pytest.mark.parametrize("has_run_dir", [True, False])
@pytest.mark.parametrize("nodes", [(), (socket.gethostname(), "n2"), ("n1", "n2", socket.gethostname())])
def test_under_torchrun_the_first_failure_and_its_nodes_log_are_named(
    tmp_path: Path, has_run_dir: bool, nodes: tuple[str, ...]
) -> None:
    """The stand-in is an agent whose worker, rank 3, fails first. Without the nodes' names the rank says which log."""
    if nodes:
        stand_in(tmp_path, "scontrol", f"#!/bin/sh\nprintf '%s\\n' {' '.join(nodes)}\n")
    log = tmp_path / "x-71" / f"task-{nodes.index(socket.gethostname()) if nodes else 1}.log"
    stand_in(
        tmp_path, "python", '#!/bin/bash\nwhile [[ $1 != --no-python ]]; do shift; done; RANK=3 "${@:2}"; exit 1\n'
    )
    elastic = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"
    said = f"[rank3]: ValueError: boom\n[rank2]: RuntimeError: its peer\nSystemExit: 3\n{elastic}\n====="
    command = ("bash", "-c", f"echo '{said}' >&2; exit 7")
    spec = JobSpec(name="x", command=command, launcher="torchrun", setup=("exec 2>>said",))
    (tmp_path / "x-71").mkdir()
    log.write_text(said)
    prefix = f"{tmp_path}/x-" if has_run_dir else None
    done = run_script(render(spec, source="", run_prefix=prefix), tmp_path)
    assert done.returncode == 7
    ends = f"Failed first, with status 7: rank 3 on {socket.gethostname()}: ValueError: boom\n"
    assert ends + (f"  Its log: {log}\n" if has_run_dir else "") in (tmp_path / "said").read_text()


KILLED = "rank 1 on n2: killed by SIGKILL\nstatus 137\n"
ENDED = "rank 1 on n1: killed by SIGTERM\nstatus 143\n"
LOADER = "rank 1 on n2: RuntimeError: DataLoader worker is killed.\nstatus 1\n"
OOM = "slurmstepd: error: Detected 1 oom_kill event in StepId=71.0. Some of the step tasks have been OOM Killed."


@pytest.mark.parametrize(
    ("marker", "slurm", "said", "status"),
    [
        (KILLED, "", "rank 1 on n2: killed by SIGKILL", 137),
        (KILLED, OOM, "rank 1 on n2: killed by the kernel for memory", 137),
        (LOADER, OOM, "rank 1 on n2: RuntimeError: DataLoader worker is killed. (the kernel has killed a process", 1),
        ("", "srun: error: n2: task 3: Out Of Memory", "task 3 on n2: killed by the kernel for memory", 137),
        ("", "srun: error: n1: tasks 0-1: Exited with exit code 3", "task 0 on n1: Exited with exit code 3", 137),
        ("", "srun: error: Node failure on n2", "Slurm has lost n2 (node failure)", 137),
        (ENDED, "srun: error: Node failure on n2", "Slurm has lost n2 (node failure)", 143),
        (LOADER, "srun: error: Node failure on n3", "worker is killed.; Slurm has lost n3 (node failure)", 1),
    ],
)
def test_what_slurm_says_of_memory_and_nodes_counts(
    tmp_path: Path, marker: str, slurm: str, said: str, status: int
) -> None:
    """If it says so in this start. A task's own shell may be killed, too: then srun alone names it."""
    dies = f"printf '{marker}' >\"$CLUSTER_DDP_FAILED\"; exit 143" if marker else "kill -KILL $PPID"
    fails = shlex.quote(f'echo "{slurm}" >&2; {dies}')
    text = script_that_may_requeue(tmp_path, 0, setup=(f"exec 2>>{tmp_path}/said",)).replace("'exit 0'", fails)
    (tmp_path / "said").write_text("srun: error: n9: task 9: Out Of Memory\nNode failure on n9\n")
    done = run_script(text, tmp_path, SLURM_MEM_PER_NODE="4096")
    assert done.returncode == status
    last = (tmp_path / "said").read_text().partition(f"Failed first, with status {status}: ")[2]
    assert said in last
    assert "SIGTERM" not in last
    assert "n9" not in last
    assert ("  Hint: ask for more memory per node than 4096 MB: --mem; or" in last) == (
        "memory" in said or slurm == OOM
    )
    assert left(tmp_path / "x-71") == (last.splitlines()[0], status)


def test_failures_are_tried_again_as_often_as_asked_and_not_without_progress(tmp_path: Path) -> None:
    text = script_that_may_requeue(tmp_path, 1, requeue_on_failure=9)
    for _ in range(3):
        run_script(text, tmp_path)
    assert len(requeues(tmp_path)) == 3
    assert "four times without a new checkpoint (the newest: none)" in run_script(text, tmp_path).stderr
    for step in (5, 10, 15, 20, 25):
        (tmp_path / "x-71" / ".progress").write_text(f"step-{step:08}.pt\n")
        run_script(text, tmp_path)
    assert len(requeues(tmp_path)) == 8
    assert "failed 10 times (--requeue-on-failure 9)" in run_script(text, tmp_path).stderr
    assert len(requeues(tmp_path)) == 8


def test_failures_that_cannot_be_counted_are_at_most_the_restarts(tmp_path: Path) -> None:
    text = script_that_may_requeue(tmp_path, 1, requeue_on_failure=2)
    (tmp_path / "x-71" / "failures.log").mkdir(parents=True)
    for restarts, told in (("0", 1), ("1", 2), ("2", 2)):
        run_script(text, tmp_path, SLURM_RESTART_COUNT=restarts)
        assert len(requeues(tmp_path)) == told


NOTES = "node3 its disk\\nnode9 not ours\\nnode4 its GPU\\n"
BAD = f"""bash -c 'printf "{NOTES}" >>"$CLUSTER_DDP_RUN_DIR/sick-nodes.txt"; exit"""


def script_on_bad_nodes(folder: Path, *, at_most: int, show: str, update: str = "") -> str:
    text = script_that_may_requeue(folder, 1, requeue_elsewhere=at_most)
    said = (
        f"case $1 in show) [ $2 = hostnames ] && printf 'node3\\nnode4\\n' || echo '{show}';; update) {update};; esac"
    )
    stand_in(folder, "scontrol", f'#!/bin/bash\n[ "$1" = show ] || echo "$*" >>"{folder}/told"\n{said}\n')
    return text.replace("bash -c 'exit", BAD)


@pytest.mark.parametrize(("at_most", "left"), [(1, "node3"), (2, "node3,node4"), (9, "node3,node4")])
@pytest.mark.parametrize("before", ["", "node[1-2]"])
def test_nodes_at_fault_are_left_behind(tmp_path: Path, at_most: int, left: str, before: str) -> None:
    """After a failure, too; those of --exclude stay excluded, and nodes of other jobs do not count."""
    show = f"   ReqNodeList=(null) ExcNodeList={before or '(null)'} Comment=x"
    done = run_script(script_on_bad_nodes(tmp_path, at_most=at_most, show=show), tmp_path)
    excluded = f"{before},{left}" if before else left
    assert requeues(tmp_path) == ["requeue 71", f"update JobId=71 ExcNodeList={excluded}"]
    assert "Requeueing job 71 without node3: its disk\n" in done.stdout


def test_each_node_is_left_behind_once(tmp_path: Path) -> None:
    """A second failure on it is the user's, as is one of a job that has left enough behind."""
    text = script_on_bad_nodes(tmp_path, at_most=2, show=" ExcNodeList=(null)")
    run_script(text, tmp_path)
    done = run_script(text, tmp_path, SLURM_RESTART_COUNT="1")
    assert (done.returncode, len(requeues(tmp_path))) == (1, 2)
    run_script(text, tmp_path)  # another job in the same run directory
    assert len(requeues(tmp_path)) == 4


@pytest.mark.parametrize("refused", ["show", "update"])
def test_slurm_may_refuse_to_exclude_a_node(tmp_path: Path, refused: str) -> None:
    """The job is requeued all the same, and the log says so."""
    show = "slurm_load_jobs error: away" if refused == "show" else " ExcNodeList=(null)"
    text = script_on_bad_nodes(tmp_path, at_most=1, show=show, update="echo away; exit 1")
    done = run_script(text, tmp_path)
    assert requeues(tmp_path)[0] == "requeue 71"
    assert "error: Excluding node3: Slurm said: " in done.stderr
    assert "away. Job 71 may start there again." in done.stderr


DISABLED = "Requested operation is presently disabled for job 71"


def test_slurm_may_refuse_to_queue_it_again(tmp_path: Path) -> None:
    text = script_that_may_requeue(tmp_path, 75)
    stand_in(tmp_path, "scontrol", f"#!/bin/sh\necho {DISABLED} >&2; exit 1\n")
    done = run_script(text, tmp_path)
    assert done.returncode == 75
    assert f"  Slurm said: {DISABLED}\n  Hint: submit it with --requeue, so that it may be requeued." in done.stderr


@pytest.mark.parametrize("setup", ["", "exec >/dev/full 2>&1"])
def test_it_is_queued_again_when_the_controller_is_back(tmp_path: Path, setup: str) -> None:
    """Also where no line can be written."""
    away = (
        f'#!/bin/bash\n[[ $(wc -l <"{tmp_path}/told") -ge 5 ]] || {{ echo Unexpected message received >&2; exit 1; }}\n'
    )
    text = script_that_may_requeue(tmp_path, 75, setup=(setup,))
    stand_in(tmp_path, "scontrol", away.replace("[[", f'echo "$*" >>"{tmp_path}/told"; [[', 1))
    done = run_script(text, tmp_path)
    assert (done.returncode, len(requeues(tmp_path))) == (-signal.SIGKILL, 5)
    assert done.stderr.count("Slurm said: Unexpected message received. Trying again") == (not setup)


WARN_ITSELF = (
    "import os, signal; os.kill(os.getpid(), signal.SIGUSR1); os.kill(os.getpid(), signal.SIGUSR2)\n"
    "print('lives'); raise SystemExit\n"
    "import cluster_ddp"
)


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_python_does_not_die_of_a_warning_before_it_has_a_handler(tmp_path: Path, launcher: str) -> None:
    stand_in(tmp_path, "python", AGENT)
    spec = JobSpec(name="x", command=("env", "A=1", "python", "-c", WARN_ITSELF), launcher=launcher)
    done = run_script(render(spec, source=""), tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "lives"), done.stderr


# As torchrun's agent: its workers start with the signals' defaults.
AGENT = f"""#!/bin/bash
if [[ $2 != torch.* ]]; then exec {shlex.quote(sys.executable)} "$@"; fi
while [[ $1 != --no-python ]]; do shift; done
exec env --default-signal "${{@:2}}"
"""


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_a_shell_can_trap_the_warnings(tmp_path: Path, launcher: str) -> None:
    """It could not, if it began with them ignored."""
    stand_in(tmp_path, "python", AGENT)
    spec = JobSpec(name="x", command=("bash", "-c", "trap 'exit 7' USR1; kill -USR1 $$; exit 1"), launcher=launcher)
    assert run_script(render(spec, source=""), tmp_path).returncode == 7


def test_python_in_a_container_does_not_die_of_a_warning_either(tmp_path: Path) -> None:
    """Apptainer installs handlers: what it starts has the signals' defaults."""
    stand_in(
        tmp_path, "apptainer", '#!/bin/bash\nwhile [[ $1 != /i.sif ]]; do shift; done; env --default-signal "${@:2}"'
    )
    spec = JobSpec(name="x", command=("python3", "-c", WARN_ITSELF), container="/i.sif")
    done = run_script(render(spec, source=""), tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "lives"), done.stderr


def test_the_end_of_the_job_is_asked_for_where_slurm_does_not_say_it(tmp_path: Path) -> None:
    """As the file says from the start that rank 0 reads later."""
    shown = "echo ${SLURM_JOB_START_TIME-unset} ${SLURM_JOB_END_TIME-unset}"
    text = render(
        JobSpec(name="x", command=("bash", "-c", f'cat "$CLUSTER_DDP_JOB_TIMES"; {shown}')),
        source="",
    )
    known, unset = "1896087600 1896091200", "unset unset"
    for answer, times in (
        (known, known),
        ("1896087600 NONE", unset),
        ("N/A N/A", unset),
        ("", unset),
    ):
        stand_in(tmp_path, "squeue", f'#!/bin/sh\necho "{answer}"\n')
        assert run_script(text, tmp_path).stdout.splitlines()[-2:] == [answer, times]
        # A controller that answers at the third time.
        stand_in(
            tmp_path,
            "squeue",
            f"""#!/bin/bash
echo asked >>asked; [[ $(wc -l <asked) -eq 3 ]] || exit 1; echo "{answer}"
""",
        )
        stand_in(tmp_path, "sleep", "#!/bin/sh\n")
        assert run_script(text, tmp_path).stdout.splitlines()[-2:] == [answer, times]
        (tmp_path / "asked").unlink()


def test_torchruns_workers_leave_a_word_for_their_status(tmp_path: Path) -> None:
    """The stand-in runs what follows --no-python, as the agent would for a worker."""
    spec = JobSpec(name="x", command=("bash", "-c", 'echo "$1"; exit 75', "bash", "it's $HOME"), launcher="torchrun")
    agent = '#!/bin/bash\nwhile [[ $1 != --no-python ]]; do shift; done; shift; "$@"; exit 1\n'
    stand_in(tmp_path, "python", agent)
    done = run_script(render(spec, source="", run_prefix=f"{tmp_path}/x-"), tmp_path)
    assert "it's $HOME" in done.stdout
    assert (tmp_path / "x-71" / ".stopped-0").exists()
