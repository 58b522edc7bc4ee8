"""`cluster-ddp launch` as people type it, without a Slurm: its errors, what it shows, and ranks on this machine."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from cluster_ddp.cli import launch as verb

IN_A_JOB = {
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_CPUS_PER_NODE": "4(x2)",
    "SLURM_GPUS_ON_NODE": "2",
    "SLURMD_NODENAME": "node1",
}
IN_A_STEP = {**IN_A_JOB, "SLURM_STEP_ID": "0"}
NO_JOB: dict[str, str] = {}


class Place(NamedTuple):
    folder: Path
    printed: pytest.CaptureFixture[str]

    def launch(self, *words: str, env: dict[str, str] = NO_JOB) -> subprocess.CompletedProcess[str]:
        """Call the verb, in a folder whose name no shell would like."""
        command = [sys.executable, "-m", "cluster_ddp", "launch", *words]
        return subprocess.run(command, cwd=self.folder, env={**bare(), **env}, capture_output=True, text=True)

    def called(self, *words: str, env: dict[str, str] = NO_JOB) -> subprocess.CompletedProcess[str]:
        """The same in this process, which costs a tenth: for what starts no ranks."""
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            for name in os.environ.keys() - bare():
                patch.delenv(name)
            for name, value in env.items():
                patch.setenv(name, value)
            try:
                status = verb.main(words)
            except SystemExit as ended:
                status = int(ended.code or 0)
        return subprocess.CompletedProcess(words, status, *self.printed.readouterr())


def bare() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "CLUSTER_DDP"))}


@pytest.fixture
def place(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Place:
    folder = tmp_path / "it's a $(folder)"
    folder.mkdir()
    (folder / "train it.py").write_text("")
    for name in ("open", "linked", "taken"):  # run directories that others have made, or have written to
        (folder / name).mkdir()
    (folder / "open").chmod(0o777)
    (folder / "linked" / "task-0.log").symlink_to(folder / "train it.py")
    (folder / "taken" / "task-1.log").mkdir()
    return Place(folder, capfd)


RUN = ("--", "python", "train it.py")
NESTED = "-- COMMAND (such as python SCRIPT), without torchrun and its options"


@pytest.mark.parametrize(
    ("words", "env", "found", "hint"),
    [
        ([], NO_JOB, "there is no command.", "cluster-ddp launch -- python train.py"),
        (["python", "t.py", "--lr", "1"], NO_JOB, "'python' must stand", "cluster-ddp launch -- python t.py --lr 1"),
        (["--rank", "2", *RUN], NO_JOB, "no option --rank. Did you mean", "--ranks 2; all options:"),
        (["--launcher", "mpi", *RUN], NO_JOB, "launcher must be one of srun, fork.", "--launcher srun"),
        (["--ranks", "0", *RUN], NO_JOB, "ranks must be a whole number of 1 or more.", "--ranks 1"),
        (["--codes", "x", *RUN], NO_JOB, "there is no option --codes.", "cluster-ddp launch --help"),
        (["--nodes=2", *RUN], IN_A_JOB, "an option of the job, which has started", "#SBATCH --nodes=2, at the top"),
        ([*RUN], NO_JOB, "this shell is not in a job of Slurm", "--ranks N"),
        (["--ranks", "2", *RUN], IN_A_JOB, "this shell is in job 12 of Slurm", "--ranks-per-node 2"),
        (["--container-image=x", *RUN], IN_A_JOB, "is written into the run directory, and none is", "--run-dir PATH"),
        (["--ranks=1", "--container-image=x", *RUN], NO_JOB, "on this machine have no srun.", "--container IMAGE"),
        ([*RUN], IN_A_STEP, "a step of job 12", "launch without srun before it"),
        (["--time-limit-s", "9", *RUN], IN_A_JOB, "it goes with --ranks", "#SBATCH --time=…"),
        (["--cpus-per-task", "9", *RUN], IN_A_JOB, "it goes with --ranks", "#SBATCH --cpus-per-task=…"),
        (["--ranks", "2", "--ranks-per-node", "2", *RUN], NO_JOB, "exclude each other", "--ranks N"),
        (
            ["--ranks=2", "--restarts=1", "--spare-nodes=1", *RUN],
            NO_JOB,
            "have no other node",
            "leave out --spare-nodes",
        ),
        (["--nodes=1-8", "--ranks=2", *RUN], NO_JOB, "have no other node", "leave out --nodes"),
        (["--nodes=1-8", *RUN], IN_A_JOB, "only restarts use it", "--restarts 3 --nodes 1-8; or leave"),
        (["--nodes=4-8", "--restarts=3", *RUN], IN_A_JOB, "the job has 2 nodes.", "#SBATCH --nodes=4-8; or leave"),
        (
            ["--nodes=1-8", "--restarts=3", "--spare-nodes=1", *RUN],
            IN_A_JOB,
            "a range has no spares",
            "leave out --spare-nodes",
        ),
        (
            ["--spare-nodes", "1", *RUN],
            IN_A_JOB,
            "must be left out without restarts.",
            "--restarts 3 --spare-nodes 1",
        ),
        (
            ["--hang-restart-s", "9", *RUN],
            IN_A_JOB,
            "must be left out without restarts.",
            "--restarts 3 --hang-restart-s 9",
        ),
        (
            ["--restart-args", "--from 'x", *RUN],
            IN_A_JOB,
            "words that a shell could split: no closing",
            "'--resume last",
        ),
        (["--restart-args", "--from", "x", *RUN], IN_A_JOB, "'x' is one word too many", "--help"),
        (["--ranks", "2", "--", "torchrun", "train it.py"], NO_JOB, "Each of the 2 ranks of this job would", NESTED),
        (["--", "srun", "python", "t.py"], IN_A_JOB, "srun asks Slurm for tasks", "without srun and its options"),
        (["--", "sbatch", "t.sh"], IN_A_JOB, "a job of its own", "run sbatch without cluster-ddp"),
        (["--ranks", "2", "--run-dir", "train it.py/x", *RUN], NO_JOB, "Not a directory: /", "--run-dir PATH"),
        (["--run-dir", "a\\b", *RUN], IN_A_JOB, "has a backslash", "--run-dir PATH, without one"),
        (["--ranks", "2", "--", "python", "-u", "no.py"], NO_JOB, "there is no such file in /", "in its folder"),
        (["--ranks", "2", "--", "python", "no{x}.py"], NO_JOB, "there is no such file in /", "in its folder"),
        (["--", "env", "A=1", "python", "no.py"], IN_A_JOB, "there is no such file in /", "or sbatch --chdir="),
        ([*RUN], {**IN_A_JOB, "PATH": "/none"}, "srun is not on the PATH", "load Slurm's module again"),
        (["--ranks", "2", "--run-dir", "open", *RUN], NO_JOB, "it may be written by others: user", "chmod go-w "),
        (["--ranks", "2", "--run-dir", "linked", *RUN], NO_JOB, "task-0.log is a symbolic link", "choose another"),
        (["--ranks", "2", "--run-dir", "taken", *RUN], NO_JOB, "Is a directory: /", "--run-dir PATH"),
        (["--ranks-per-node", "5", *RUN], IN_A_JOB, "the job has 4 CPUs there", "--ntasks-per-node=5, or --cpus-per"),
    ],
)
def test_an_error_says_what_to_type(place: Place, words: list[str], env: dict[str, str], found: str, hint: str) -> None:
    done = place.called(*words, env=env)
    first, second, third = done.stderr.splitlines()[-3:]
    assert (done.returncode, done.stdout) == (2, "")
    assert first.startswith("cluster-ddp launch: error: ")
    assert found in second
    assert third.startswith("  Hint: ")
    assert hint in third


@pytest.mark.parametrize(
    ("run_dir", "is_warned"),
    [("runs/an exp", True), ("runs/exp-13", True), ("runs/exp-%j", False), ("runs/lr-3", False), ("runs/12", False)],
)
def test_tasks_of_an_array_are_told_that_they_may_share_a_run_directory(
    place: Place, run_dir: str, is_warned: bool
) -> None:
    in_array = {**IN_A_JOB, "SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "4"}
    said = place.called("--run-dir", run_dir, "--", "python", "no.py", env=in_array).stderr
    assert ("does not name task 3 of the array" in said) is is_warned
    assert (f"Hint: --run-dir {shlex.quote(run_dir + '-%j')}\n" in said) is is_warned


@pytest.mark.skipif(os.geteuid() != 0, reason="changes the owner of a folder")
@pytest.mark.parametrize("is_link", [False, True])
def test_a_run_directory_of_somebody_else_is_refused(place: Place, is_link: bool) -> None:
    """What is printed would go where their links lead."""
    planted = place.folder / "job-12"
    if is_link:
        planted.symlink_to(place.folder)
    else:
        planted.mkdir()
    os.chown(planted, 4321, 4321, follow_symlinks=False)
    done = place.called("--ranks", "1", "--run-dir", "job-12", "--", "true")
    assert done.returncode == 2
    assert "  it belongs to user 4321, mode " in done.stderr


def test_a_command_that_may_lack_its_script_here_is_not_refused(place: Place) -> None:
    show = "import os; os.write(1, (' '.join(map(os.environ.get, ['RANK', 'WORLD_SIZE'])) + '\\n').encode())"
    done = place.launch("--ranks", "2", "--", "env", "-C", "/", sys.executable, "-c", show)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["0 2", "1 2"])


def test_the_preview_has_the_srun_line_and_a_ranks_variables_but_no_secret(place: Place) -> None:
    done = place.called("--dry-run", "--srun-options=--mpi=none", *RUN, env=IN_A_JOB)
    assert done.stdout.startswith("4 ranks on 2 nodes, 2 on each, started by\n\n  srun --ntasks=4 --ntasks-per-node=2 ")
    assert "--mpi=none" in done.stdout
    assert "    -- python 'train it.py'\n" in done.stdout
    assert "  RANK=0\n  LOCAL_RANK=0\n  WORLD_SIZE=4\n" in done.stdout
    assert "  MASTER_ADDR=node1\n" in done.stdout
    assert "SECRET" not in done.stdout


def test_an_agent_that_runs_in_a_container_is_one_file_there(place: Place) -> None:
    """The installed package is not in the image."""
    told = shlex.quote(str(place.folder / "words"))
    for name, does in {"srun": f"printf '%s\\n' \"$@\" >{told}", "squeue": "exit 0", "scontrol": "exit 0"}.items():
        (place.folder / name).write_text(f"#!/bin/sh\n{does}\n")
        (place.folder / name).chmod(0o755)
    env = {**IN_A_JOB, "PATH": f"{place.folder}:{os.environ['PATH']}"}
    done = place.launch("--run-dir=a run", "--container-image=x", *RUN, env=env)
    (agent,) = (place.folder / "a run").glob("agent-*.pyz")
    words = (place.folder / "words").read_text().splitlines()
    assert [sys.executable, "-I", "-S", str(agent), "task"] == words[(at := words.index(str(agent)) - 3) : at + 5]
    mounted = [word for word in words if word.startswith("--container-mounts=")]
    assert all(f"{agent.parent}:{agent.parent}" in word for word in mounted) and len(mounted) == 1
    assert done.returncode == 0, done.stderr


def test_ranks_in_a_step_that_srun_has_made(place: Place) -> None:
    assert place.launch("--ranks", "1", "--", "true", env=IN_A_STEP).returncode == 0


def test_the_help_has_groups_and_no_options_of_the_agent_alone(place: Place) -> None:
    daily, said = place.called("--help").stdout, place.called("--help-all").stdout
    assert all(f"\n{group}:\n" in said for group in ("where the ranks run", "the ranks"))
    assert "--code" not in said
    assert "--cleanup" in said and "--cleanup" not in daily
    assert re.findall(r"^  (--[\w-]+)", daily, re.MULTILINE)[0] == "--ranks"
    assert daily.endswith("options: cluster-ddp launch --help-all\n")


@pytest.mark.parametrize("words", [("bash", "windows.sh"), ("./windows.sh",)])
def test_a_script_whose_lines_end_as_on_windows_is_refused(place: Place, words: tuple[str, ...]) -> None:
    (place.folder / "windows.sh").write_bytes(b"#!/bin/bash\r\necho hi\r\n")
    (place.folder / "windows.sh").chmod(0o755)
    done = place.called("--ranks", "1", "--", *words)
    assert done.returncode == 2 and "its lines end as on Windows" in done.stderr
    assert r"Hint: sed -i 's/\r$//' " in done.stderr
