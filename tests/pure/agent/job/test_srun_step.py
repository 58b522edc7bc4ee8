"""How the ranks of a job are started: srun's command for each launcher, and what Slurm's configuration says."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from slowness import LIMIT_S, scaled
from stand_ins import HOSTILE, FakeSlurm, fake_slurm

from cluster_ddp.agent import launch_options
from cluster_ddp.agent.job import slurm_commands, srun_step
from cluster_ddp.agent.job.slurm_commands import Configuration
from cluster_ddp.agent.launch_env import Shape
from cluster_ddp.agent.launch_options import AgentOptions

__all__ = ["fake_slurm"]

AGENT = [sys.executable, str(Path(launch_options.__file__).parent)]
SIZE = Shape(nodes=2, ranks_per_node=4, node_cpus=12, cpus_per_task=3)
COMMAND = ("python", "train.py", "--", *HOSTILE)
A_RUN = Path("/it's a run of 50%/x-71")
LOGS = ["--output=/it's a run of 50%%/x-71/task-%t.log", "--open-mode=append"]
EACH_NODE = ["--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=12"]


@pytest.mark.parametrize(
    ("launcher", "folder", "tasks"),
    [
        ("srun", A_RUN, ["--ntasks=8", "--ntasks-per-node=4", "--cpus-per-task=3", "--kill-on-bad-exit=1", *LOGS]),
        ("fork", A_RUN, [*EACH_NODE, "--kill-on-bad-exit=1"]),  # each forked rank has a log of its own
        ("srun", None, ["--ntasks=8", "--ntasks-per-node=4", "--cpus-per-task=3", "--kill-on-bad-exit=1"]),
    ],
)
def test_sruns_command(launcher: str, folder: Path | None, tasks: list[str]) -> None:
    asked = AgentOptions(command=COMMAND, launcher=launcher)
    said = srun_step.srun(asked, SIZE, folder)
    of_task = [] if launcher == "srun" else [f"--launcher={launcher}"]
    assert said == ["srun", *tasks, *AGENT, "task", *of_task, "--", *COMMAND]


@pytest.mark.parametrize("launcher", ["srun", "fork"])
def test_cpus_that_nobody_knows_are_slurms_to_choose(launcher: str) -> None:
    unknown = SIZE._replace(node_cpus=None, cpus_per_task=None)
    said = srun_step.srun(AgentOptions(command=COMMAND, launcher=launcher), unknown, None)
    assert not [word for word in said if word.startswith("--cpus-per-task")]


def test_sruns_own_options_come_after_ours() -> None:
    """srun takes the last of two."""
    asked = AgentOptions(command=COMMAND, srun_options=("--kill-on-bad-exit=0", "--cpu-bind=none"))
    said = srun_step.srun(asked, SIZE, A_RUN)
    at = said.index("--cpu-bind=none")
    assert said[at - 1 : at + 2] == ["--kill-on-bad-exit=0", "--cpu-bind=none", AGENT[0]]
    assert said.index("--kill-on-bad-exit=1") < at


@pytest.mark.parametrize("ignore_warnings", [True, False])
def test_a_task_learns_all_but_what_the_job_does_before_and_after(ignore_warnings: bool) -> None:
    asked = AgentOptions(
        command=COMMAND,
        launcher="fork",
        gpus_per_task=2,
        run_dir="/r",
        max_requeues=3,
        doctor=True,
        track=("wandb",),
        venv="/a venv",
        stage_env="/a venv.tar",
        container="/i.sif",
        container_binds=("/data sets:/data",),
        container_overlays=("/o",),
        srun_options=("--x",),
        cleanup="true",
        grid={"a": ("1",)},
        restarts=4,
        spare_nodes=1,
        hang_restart_s=30,
        restart_args="--resume",
        ignore_warnings=ignore_warnings,
    )
    verb, *words = srun_step.task(asked)[len(AGENT) :]
    assert (verb, "--ignore-warnings" in words) == ("task", ignore_warnings)
    assert launch_options.parse(words) == replace(asked, cleanup=None, grid={})


BESIDE = ["--nodes=2", "--nodelist=node1,node3", "--overlap", "--mem=0"]


def test_a_later_step_starts_beside_the_old_one_and_names_its_nodes() -> None:
    """Which still holds the CPUs, GPUs and memory of the job."""
    asked, on = AgentOptions(command=COMMAND, srun_options=("--overlap",)), srun_step.On(("node1", "node3"), True)
    said = srun_step.srun(replace(asked, ignore_warnings=True), SIZE, None, on)
    assert said[said.index("--cpus-per-task=3") + 1 :][:5] == [*BESIDE, "--kill-on-bad-exit=1"]
    assert said[said.index("task") :][:3] == ["task", "--srun-options=--overlap", "--ignore-warnings"]
    of_all = {"SLURM_NTASKS": "12", "SLURM_NNODES": "3", "SLURM_NODELIST": "node[1-3]", "SLURM_JOB_ID": "71"}
    size = SIZE._replace(tasks_per_node=4)
    assert srun_step.step_env(asked, size, of_all, on) == {"SLURM_JOB_ID": "71"}
    assert srun_step.step_env(asked, size, of_all) == of_all


def test_one_agent_waits_on_each_spare_node() -> None:
    asked = AgentOptions(command=COMMAND, launcher="fork", restarts=4, spare_nodes=1)
    said = srun_step.spares(asked, SIZE, ["node1", "node3"])
    options = ["--launcher=fork", "--restarts=4", "--spare-nodes=1"]
    assert said == ["srun", *EACH_NODE, *BESIDE, *AGENT, "spare", *options, "--", *COMMAND]


def test_apptainer_is_the_tasks_to_start_and_pyxis_sruns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    inside = srun_step.srun(AgentOptions(command=COMMAND, container="/i.sif"), SIZE, A_RUN)
    assert not [word for word in inside if word.startswith("--container-image")]
    assert "--container=/i.sif" in inside
    asked = AgentOptions(command=COMMAND, container_image="nvcr.io#a/b:1", container_binds=("/data", "/a:/b c"))
    around = srun_step.srun(asked, SIZE, A_RUN)
    mounts = f"{tmp_path}:{tmp_path},{A_RUN}:{A_RUN},/data:/data,/a:/b c"
    assert around[around.index("--container-image=nvcr.io#a/b:1") :][1:3] == [
        f"--container-workdir={tmp_path}",
        f"--container-mounts={mounts}",
    ]
    assert around[-len(COMMAND) - 1 :] == ["--", *COMMAND]


def in_image(path: str, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the words that an image gets, where the PATH has what the image has."""
    words = srun_step.srun(AgentOptions(command=command, container_image="x"), SIZE, None)
    place = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "PATH": path, **env}
    return subprocess.run(
        words[words.index("sh") :], env=place, capture_output=True, text=True, timeout=scaled(LIMIT_S)
    )


def test_an_image_without_this_python_has_its_own_or_runs_the_command_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(srun_step, "agent", lambda: ["/no/such/python", "-I", "/r/agent.pyz"])
    for name in ("sh", "printf"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")
    shown = in_image(str(tmp_path), "sh", "-c", 'printf "%s|" "$RANK" "$LOCAL_RANK" "$NODE_RANK" "$@"', "sh", *HOSTILE)
    assert shown.stdout == "".join(f"{word}|" for word in ("3", "1", "1", *HOSTILE)), shown.stderr
    for is_old in (1, 0):
        (tmp_path / "python3").write_text(f'#!/bin/sh\n[ "$1" != -c ] || exit {is_old}\nprintf "%s|" own "$@"\n')
        (tmp_path / "python3").chmod(0o755)
        said = in_image(str(tmp_path), "printf", "%s|", "b c").stdout
        assert said == ("b c|" if is_old else "own|-I|/r/agent.pyz|task|--container-image=x|--|printf|%s||b c|")


@pytest.mark.parametrize(
    ("launcher", "tasks", "is_another"),
    [("srun", 4, False), ("srun", 1, True), ("fork", 4, True), ("fork", 1, False)],
)
def test_a_step_of_other_tasks_than_the_jobs_forgets_those(launcher: str, tasks: int, is_another: bool) -> None:
    """srun would warn about the job's CPUs per task (24.11), or prefer them, and refuse its GPUs per task."""
    kept = {"SLURM_JOB_ID": "71", "SLURM_GPU_BIND": "closest"}
    env = {**kept, "SLURM_CPUS_PER_TASK": "3", "SLURM_TRES_PER_TASK": "cpu=3,gres/gpu=2", "SLURM_GPUS_PER_TASK": "2"}
    env["SLURM_TRES_BIND"] = "gres/gpu:per_task:2"
    asked, size = AgentOptions(launcher=launcher), SIZE._replace(tasks_per_node=tasks, gpus_per_node=8, gpus_per_task=2)
    assert srun_step.step_env(asked, size, env) == (kept if is_another else env)
    assert ("--gres=gpu:8" in srun_step.srun(asked, size, None)) is is_another
    assert "--gres" not in " ".join(srun_step.srun(asked, size._replace(gpus_per_task=0), None))


@pytest.mark.parametrize(("status", "is_said"), [(0, True), (1, False)])
def test_each_node_unpacks_the_environment(
    fake_slurm: FakeSlurm, capfd: pytest.CaptureFixture[str], status: int, is_said: bool
) -> None:
    asked = AgentOptions(command=COMMAND, venv="/a venv", stage_env="/it's a venv.tar")
    fake_slurm.command("srun", f"exit {status}")
    env = {**os.environ, "SLURM_JOB_ID": "71", "SLURM_CPUS_PER_TASK": "3"}
    added = srun_step.staged(asked, SIZE, env)
    (name,) = added
    assert name == "CLUSTER_DDP_COPY"
    assert fake_slurm.calls("srun") == [[*EACH_NODE, *AGENT, "unpack", "/it's a venv.tar", "/a venv"]]
    assert fake_slurm.env("srun")["CLUSTER_DDP_COPY"] == added[name]
    assert "SLURM_CPUS_PER_TASK" not in fake_slurm.env("srun")
    assert ("Unpacked the environment on 2 node(s) in 0 s." in capfd.readouterr().err) is is_said
    assert srun_step.staged(AgentOptions(command=COMMAND, venv="/a venv"), SIZE, env) == {}
    srun_step.staged(replace(asked, spare_nodes=1), SIZE, env)
    assert fake_slurm.calls("srun")[1][0] == "--ntasks=3", "the spares, too"


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (
            "ProctrackType           = proctrack/cgroup\nSrunPortRange           = 60001-60004",
            Configuration(False, range(60001, 60005)),
        ),
        ("ProctrackType           = proctrack/linuxproc\nSrunPortRange           = 0-0", Configuration(True)),
        ("PriorityFlags           = \nProctrackType           = proctrack/cgroup", Configuration(False)),
        ("ProctrackType = proctrack/pgid\nSrunPortRange =", Configuration(True)),
        ("SlurmdParameters        = x\nSlurmdPort              = 17002", Configuration(True, (), 17002)),
        ("Slurmctld(primary) at x is UP", Configuration(True, (), 6818)),
    ],
)
def test_what_slurms_configuration_says(fake_slurm: FakeSlurm, said: str, found: Configuration) -> None:
    fake_slurm.command("scontrol", f"printf '%s\\n' {shlex.quote(said)}")
    assert slurm_commands.configuration(os.environ) == found
    assert fake_slurm.calls("scontrol") == [["show", "config"]]


def test_a_controller_that_does_not_answer_is_taken_for_the_worse(fake_slurm: FakeSlurm) -> None:
    fake_slurm.command("scontrol", "echo 'ProctrackType = proctrack/cgroup'; exit 1")
    assert slurm_commands.configuration(os.environ) == Configuration()
    assert slurm_commands.configuration({"PATH": "/nowhere"}) == Configuration()
