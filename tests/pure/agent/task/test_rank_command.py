"""What ranks in containers get: by stand-ins for Apptainer on the PATH, and as arguments for Pyxis."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from slowness import LIMIT_S, scaled
from stand_ins import APPTAINER, HOSTILE

from cluster_ddp.agent.launch_options import AgentOptions
from cluster_ddp.agent.task import rank_command
from cluster_ddp.errors import JobError

SIF = AgentOptions(container="/i.sif")
IMAGE = "/images/it's $(touch pwned).sif"
# As a program in Go: what it starts has the signals' defaults.
GO = '#!/bin/bash\nwhile [[ $1 != /i.sif ]]; do shift; done; exec env --default-signal "${@:2}"\n'
SHOW_ARGUMENTS = "import sys; print(*map(repr, sys.argv[1:]), sep='\\n')"


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for programs, in the working folder."""
    folder = tmp_path / "my tools"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    return folder


def stand_in(tools: Path, name: str, text: str) -> None:
    (tools / name).write_text(text)
    (tools / name).chmod(0o755)


def run(
    tools: Path,
    *command: str,
    container: AgentOptions = SIF,
    ignore_warnings: bool = False,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command in a container."""
    env = {"PATH": f"{tools}:{os.environ['PATH']}", "CLUSTER_DDP_NOTES": "/notes", **(env or {})}
    argv, env = rank_command.in_container(container, command, env, ignore_warnings)
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=scaled(LIMIT_S))


def test_a_rank_gets_its_place_and_its_settings(tools: Path) -> None:
    stand_in(tools, "apptainer", APPTAINER)
    env = {
        **{"RANK": "3", "LOCAL_RANK": "1", "NODE_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node 1"},
        **{"CUDA_VISIBLE_DEVICES": "0,1", "CLUSTER_DDP_CPUS_PER_TASK": "", "SLURM_JOB_ID": "71"},
        **{"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "=ib0 x", "GLOO_SOCKET_IFNAME": "$(touch pwned)"},
        **{"RCCL_X": "1", "TORCH_NCCL_X": "2", "TORCH_DIST_USE_NCCL2": "0", "CLUSTER_DDP_SECRET": "0a"},
        **{"CLUSTER_DDP_START": "2"},
        **{"CLUSTER_DDP_NOTES": "/notes", "CLUSTER_DDP_CHANNEL": "node 1:7", "CLUSTER_DDP_RUN_DIR": "/a run's dir"},
    }
    strange = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "MY_NCCL_X": "5", "RANK_X": "6"}
    lines = run(tools, "env", env={**env, **strange}).stdout.splitlines()
    assert {f"{name}={value}" for name, value in env.items()} <= set(lines)
    assert "CONTAINED=yes" in lines
    assert not [line for line in lines if line.partition("=")[0] in {*strange, "SLURM_LOCALID", "SLURM_ARRAY_TASK_ID"}]
    assert not (tools.parent / "pwned").exists()


def test_it_has_folders_and_overlays(tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_command, "_AMD_DRIVER", tmp_path / "none")
    stand_in(tools, "apptainer", APPTAINER)
    container = replace(
        SIF, container=IMAGE, container_binds=("/data sets:/data", "/more"), container_overlays=("/o.sqsh", "/it's.img")
    )
    done = run(tools, "true", container=container, env={"CLUSTER_DDP_RUN_DIR": "/a run's dir"})
    assert done.stdout.splitlines() == [
        *("option --nv", "option --pwd", f"  {tmp_path}"),
        *("option --bind", f"  {tmp_path}", "option --bind", "  /notes", "option --bind", "  /a run's dir"),
        *("option --bind", "  /data sets:/data", "option --bind", "  /more"),
        *("option --overlay", "  /o.sqsh:ro", "option --overlay", "  /it's.img:ro"),
        f"image {IMAGE}",
    ]
    assert done.returncode == 0 and not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("ignore_warnings", [False, True])
def test_the_command_stays_as_it_is(tools: Path, ignore_warnings: bool) -> None:
    stand_in(tools, "apptainer", APPTAINER)
    words = (sys.executable, "-c", SHOW_ARGUMENTS, *HOSTILE)
    lines = run(tools, *words, ignore_warnings=ignore_warnings).stdout.splitlines()
    assert lines[-len(HOSTILE) :] == [repr(word) for word in HOSTILE]
    assert not (tools.parent / "pwned").exists()


def test_amds_gpus(tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_command, "_AMD_DRIVER", tmp_path)
    stand_in(tools, "apptainer", APPTAINER)
    env = {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "0"}
    lines = run(tools, "env", env=env).stdout.splitlines()
    assert {"option --rocm", "ROCR_VISIBLE_DEVICES=2,3", "HIP_VISIBLE_DEVICES=0"} <= set(lines)
    assert "option --nv" not in lines


def test_singularity_has_variables_of_its_own(tools: Path) -> None:
    stand_in(tools, "singularity", APPTAINER.replace("APPTAINERENV_", "SINGULARITYENV_"))
    (tools / "env").symlink_to("/usr/bin/env")
    assert "RANK=3" in run(tools, "env", env={"PATH": str(tools), "RANK": "3"}).stdout.splitlines()
    stand_in(tools, "apptainer", APPTAINER)
    own = {"PATH": str(tools), "RANK": "3", "CLUSTER_DDP_NOTES": "/notes"}
    argv, env = rank_command.in_container(SIF, ["env"], own, False)
    assert argv[0] == str(tools / "apptainer")
    assert env == {**own, "APPTAINERENV_RANK": "3", "APPTAINERENV_CLUSTER_DDP_NOTES": "/notes"}


def test_without_a_runtime_it_says_so(tools: Path) -> None:
    with pytest.raises(JobError) as error:
        run(tools, "true", env={"PATH": str(tools)})
    assert str(error.value) == (
        f"Starting the container /i.sif on {os.uname().nodename}:\n"
        "  neither apptainer nor singularity is on the PATH.\n"
        "  Hint: load the module that has one: --modules apptainer"
    )


WARN_ITSELF = "import os; os.kill(os.getpid(), 10); os.kill(os.getpid(), 12); print('lives')"


def test_ignored_warnings_are_ignored_in_the_container_too(tools: Path) -> None:
    stand_in(tools, "apptainer", GO)
    done = run(tools, sys.executable, "-c", WARN_ITSELF, ignore_warnings=True)
    assert (done.returncode, done.stdout) == (0, "lives\n"), done.stderr
    done = run(tools, sys.executable, "-c", "raise SystemExit(7)", ignore_warnings=True)
    assert done.returncode == 7


def test_a_shell_in_the_container_can_trap_warnings(tools: Path) -> None:
    stand_in(tools, "apptainer", GO)
    assert run(tools, "bash", "-c", "trap 'exit 7' USR1; kill -USR1 $$; exit 1").returncode == 7


def test_words_for_a_restart_are_added_from_the_second_start_on() -> None:
    asked = AgentOptions(command=("python", "train.py"), restart_args="--resume 'my last.pth'")
    assert rank_command.of_start(asked, {"CLUSTER_DDP_START": "0"}) == ["python", "train.py"]
    assert rank_command.of_start(asked, {"CLUSTER_DDP_START": "3"}) == ["python", "train.py", "--resume", "my last.pth"]
