"""agent.task: what a task's agent does around a command, from its start to its status."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from listening import listening
from ranks import job_ids
from slowness import LIMIT_S, scaled, wait_until
from tasks import PLACE, start, started

from cluster_ddp import processes
from cluster_ddp.agent.rank_end import End
from cluster_ddp.agent.supervision.spawn import spawn
from cluster_ddp.slurm.port import candidates

HOST = "node7"  # Slurm's name of the node, not the host's


def run(*command: str, **more) -> tuple[int, str, str]:
    task = start(*command, SLURMD_NODENAME=HOST, **more)
    out, err = task.communicate(timeout=scaled(LIMIT_S))
    return task.returncode, out, err


@pytest.mark.parametrize(("command", "status"), [("exit 255", 255), ("exit 75", 75), ("kill -KILL $$", 137)])
def test_the_commands_status_is_the_tasks_and_the_job_is_told(command: str, status: int) -> None:
    """Nothing else is printed: it would be the last line of the command's log."""
    with listening() as job:
        assert run("bash", "-c", f"echo mine >&2; {command}", **job.env) == (status, "", "mine\n")
        assert job.ends() == [End(2, HOST, status, was_stopped=status == 75)]
    assert job.said[0] == {
        "kind": "hello",
        "ranks": [2],
        "host": HOST,
        "task": "2",
        "step_id": "",
        "stays": False,
        "start": 0,
    }


@pytest.mark.parametrize("note", ["failed", "stopped"])
def test_the_rank_says_itself_why_it_failed_and_that_it_was_stopped(note: str) -> None:
    write = f"from cluster_ddp.agent import rank_notes; import os; rank_notes.{note}(os.environ, 2"
    write += ", rank_notes.FailureNote('ValueError: x', 'peer', 7, 16))" if note == "failed" else ")"
    with listening() as job:
        assert run(sys.executable, "-c", f"{write}; raise SystemExit(1)", **job.env)[0] == 1
        (end,) = job.ends()
    assert end == (
        End(2, HOST, 1, "ValueError: x", "peer", step=7, micro_batch=16)
        if note == "failed"
        else End(2, HOST, 1, was_stopped=True)
    )


def test_a_command_inherits_no_connection_and_finds_its_folder_for_notes() -> None:
    """What is inherited stays open as long as anything that the command has started."""
    show = "for fd in /proc/self/fd/*; do readlink $fd; done; echo $CLUSTER_DDP_NOTES; stat -c %a $CLUSTER_DDP_NOTES"
    with listening() as job:
        _, out, _ = run("bash", "-c", show, **job.env)
    assert "socket:" not in out
    *_, folder, mode = out.split()
    assert mode == "700" and not Path(folder).exists()
    assert not [line for line in out.split()[:-2] if line.startswith(folder)]


def test_a_pipe_without_a_reader_ends_its_writer() -> None:
    """Python ignores SIGPIPE, and what is ignored stays ignored."""
    assert run("bash", "-c", "yes | head -1; echo ${PIPESTATUS[0]}")[1] == "y\n141\n"


def test_a_command_is_found_on_its_own_path(tmp_path: Path) -> None:
    """That of a staged environment, which is not the agent's."""
    for number, name in enumerate(("one", "two's")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tool").write_text(f"#!/bin/sh\nexit {number + 3}\n")
    (tmp_path / "two's" / "tool").chmod(0o755)
    pid = spawn(["tool"], {"PATH": f"{tmp_path}/none:{tmp_path}/one:{tmp_path}/two's"})
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4
    with pytest.raises(PermissionError):
        spawn(["tool"], {"PATH": f"{tmp_path}/one:{tmp_path}/none"})


@pytest.mark.parametrize(
    ("name", "text", "mode", "status", "said"),
    [
        ("missing", None, 0, 127, "No such file or directory"),
        ("plain.sh", "#!/bin/sh\n", 0o644, 126, "Permission denied"),
        ("bare.sh", "exit 0\n", 0o755, 126, "Exec format error"),
    ],
)
def test_what_cannot_be_started_is_said(
    tmp_path: Path, name: str, text: str | None, mode: int, status: int, said: str
) -> None:
    path = tmp_path / f"it's {name}"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    with listening() as job:
        found, _, err = run(str(path), **job.env)
        assert found == status and f"{said}: {path}." in err and "Hint: " in err and "Traceback" not in err
        (end,) = job.ends()
    assert end[:3] == (2, HOST, status) and end.words == f"Starting {shlex.quote(str(path))}: {said}: {path}."


def test_an_empty_entry_of_the_path_is_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a shell: `export PATH=$PATH:` has one."""
    (tmp_path / "tool").write_text("#!/bin/sh\nexit 5\n")
    (tmp_path / "tool").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    pid = spawn(["tool"], {"PATH": f"{tmp_path}/none:"})
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5


def test_a_name_that_is_nowhere_on_the_path_is_said(tmp_path: Path) -> None:
    """Not the path in its first folder, which nobody has asked for."""
    with pytest.raises(FileNotFoundError, match="not on the PATH: 'tool'"):
        spawn(["tool"], {"PATH": f"{tmp_path}/none:{tmp_path}"})
    (tmp_path / "tool").write_text("#!/no/such/interpreter\n")
    (tmp_path / "tool").chmod(0o755)
    with pytest.raises(FileNotFoundError, match=r"No such file or directory: '/.*/tool'"):
        spawn(["tool"], {"PATH": f"{tmp_path}/none:{tmp_path}"})


def test_without_srun_it_says_what_is_missing() -> None:
    env = {name: value for name, value in PLACE.items() if not name.startswith("SLURM")}
    agent = [sys.executable, "-m", "cluster_ddp.agent", "task", "--", "true"]
    done = subprocess.run(agent, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and "SLURM_PROCID unset" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [(), ("jbo", "--", "true")])
def test_what_it_is_to_do_must_be_known(words: tuple[str, ...]) -> None:
    agent = [sys.executable, "-m", "cluster_ddp.agent"]
    done = subprocess.run([*agent, *words], env=PLACE, capture_output=True, text=True)
    assert (
        done.returncode == 2 and "not one of job, packed, chain, task" in done.stderr and "Traceback" not in done.stderr
    )


def test_env_without_a_program_prints_the_environment() -> None:
    status, out, _ = run("env", "A=it's mine", options=("--ignore-warnings",))
    assert status == 0 and "A=it's mine\n" in out


@pytest.mark.parametrize(("shell", "ignored"), [(False, True), (True, False)])
def test_a_command_starts_with_warnings_ignored_where_all_processes_get_them(
    tmp_path: Path, shell: bool, ignored: bool
) -> None:
    """But no shell, which could not trap them, nor a script that is run by one."""
    code = "import signal; print(signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN)"
    script = tmp_path / "it's run.sh"
    script.write_text(f"#!/usr/bin/env bash\n{shlex.join([sys.executable, '-c', code])}\n")
    script.chmod(0o755)
    command = [str(script)] if shell else [sys.executable, "-c", code]
    assert run(*command, options=("--ignore-warnings",))[1] == f"{ignored}\n"
    assert run(*command)[1] == "False\n"


@pytest.mark.parametrize("file", ["memory.events", "memory.oom_control"])
def test_the_kernels_kills_for_memory_are_counted(tmp_path: Path, file: str) -> None:
    """From made files of this process's control groups; those before it began do not count."""
    from cluster_ddp import processes

    below = tmp_path / ("memory" if file == "memory.oom_control" else "")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        (folder := Path(f"{below}{line.split(':', 2)[2]}")).mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("low 0\noom_kill 2\n")
    assert processes.oom_kills(tmp_path) % 2 == 0 and processes.oom_kills(tmp_path) > 0
    assert processes.oom_kills(tmp_path / "nowhere") == 0


@pytest.mark.fault(
    "the agent of a task gets SIGKILL, and Slurm has no cgroups",
    "its ranks that use `distributed()` end with it; the job ends or restarts as if a rank were killed. Other "
    "commands run on until Slurm ends them",
    bound="1 s",
)
def test_ranks_end_with_their_agent_even_if_it_is_killed(tmp_path: Path) -> None:
    """Without cgroups, Slurm ends the tasks of a step, and not what they have started."""
    pids = tmp_path / "it's pids"
    program = f"""
import os, signal, time
import cluster_ddp
with cluster_ddp.distributed():
    with open({str(pids)!r}, "a") as file:
        print(os.getpid(), file=file)
    time.sleep(600)
"""
    place = {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_ID": str(job_ids())}
    port = str(candidates(int(place["SLURM_JOB_ID"]))[0])
    place["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    place |= {"LOCAL_WORLD_SIZE": "1", "NODE_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    command = ("bash", "-c", f'"{sys.executable}" -c "$1"; true', "sh", program)  # there is a shell between them
    with started(*command, **place) as task:
        wait_until(lambda: pids.exists() and pids.read_text().endswith("\n"))
        (pid,) = map(int, pids.read_text().split())
        began = processes.started(pid)
        task.kill()
        wait_until(lambda: processes.started(pid) != began)
