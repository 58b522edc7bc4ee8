"""The process that has imported torch and forks a rank in each start: the script must not notice."""

from __future__ import annotations

import json
import os
import signal
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from listening import Listening, listening
from slowness import LIMIT_S, scaled, wait_until
from tasks import PLACE, started

from cluster_ddp import processes
from cluster_ddp.agent.launch_options import AgentOptions
from cluster_ddp.agent.task import python_module, seed_process
from cluster_ddp.agent.task.seed_process import Seed
from cluster_ddp.run.names import SEED
from cluster_ddp.runtime.fork import seed

JOB = {
    **{"SLURM_PROCID": "0", "SLURM_NODEID": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "CLUSTER_DDP_START": "0"},
    **{"SLURM_JOB_ID": "71", "SLURMD_NODENAME": f"node{os.getpid()}"},
}
AGAIN = {"CLUSTER_DDP_START": "1", "MASTER_ADDR": "node 8", "MASTER_PORT": "7"}
IMPATIENT = """from cluster_ddp.agent import __main__ as agent
from cluster_ddp.agent.task import seed_process
fork = seed_process.Seed.fork
def impatient(seed, command, env, **more):
    seed_process._ANSWER_S = 1.0 if env["CLUSTER_DDP_START"] == "1" else float("inf")
    pid = fork(seed, command, env, **more)
    open(f"forked.{env['CLUSTER_DDP_START']}", "w").close()
    return pid
seed_process.Seed.fork = impatient
agent.run()"""
# What a script can see of its process.
SCRIPT = """\
import torch
import json, os, pickle, signal, sys, time
class Own: pass
pickle.loads(pickle.dumps(Own()))  # found by the name of its module
descriptors = sorted(one for one in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{one}"))
streams = [os.readlink(f"/proc/self/fd/{one}")[:5] for one in range(3)]
mask = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))
handlers = [str(signal.getsignal(one)) for one in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)]
env = {name: value for name, value in os.environ.items() if name[12:] not in ("NOTES", "AGENT", "CHANNEL")}
seen = [sys.argv, sys.path, __name__, __file__, __spec__ and __spec__.name, descriptors, streams, mask, handlers, env]
seen += [torch.get_num_threads(), sys.flags.utf8_mode, open("/proc/self/oom_score_adj").read()]
command = open("/proc/self/cmdline").read()
name = f"{os.environ['SAID']}.{os.environ['CLUSTER_DDP_START']}"
with open(f"{name}.part", "w") as file:
    json.dump({"pid": os.getpid(), "seen": seen, "forked": "fork.seed" in command}, file)
os.rename(f"{name}.part", name)
print("begun", os.environ["CLUSTER_DDP_START"], flush=True)
time.sleep(600)
"""


class Running:
    """An agent whose command runs, and waits."""

    def __init__(self, job: Listening, task: Any, said: Path) -> None:
        self.job, self.task, self._said = job, task, said

    def start(self, number: int) -> dict[str, Any]:
        """What the script has seen in a start."""
        wait_until(lambda: Path(f"{self._said}.{number}").exists(), said=lambda: self.job.said)
        return json.loads(Path(f"{self._said}.{number}").read_text())

    def seed(self) -> int:
        """The process that forks the ranks, once there is one."""
        wait_until(self._seeds)
        return self._seeds()[0]

    def _seeds(self) -> list[int]:
        below = processes.children(self.task.pid)
        return [pid for pid in below if processes.name(pid) == SEED]

    def again(self) -> None:
        self.job.server.tell("stop", to=0)
        wait_until(lambda: any(one["kind"] == "idle" for one in self.job.said), said=lambda: self.job.said)
        self.job.server.tell("again", to=0, env=AGAIN)

    def end(self) -> tuple[str, str]:
        self.job.server.tell("over", to=0)
        self.job.server.tell("stop", to=0)
        return self.task.communicate(timeout=scaled(LIMIT_S))


@contextmanager
def running(
    folder: Path, *command: str, options: tuple[str, ...] = (), script: str = SCRIPT, **agents: tuple[str, ...]
) -> Iterator[Running]:
    said = folder / "it's said"
    (folder / "it's a script.py").write_text(script)
    with listening() as job:
        more = {"SAID": str(said), **JOB, **job.env}
        with started(*command, options=("--restarts=1", "--restart-args=--resume", *options), **agents, **more) as task:
            yield Running(job, task, said)


@pytest.mark.full
@pytest.mark.parametrize(
    "form",
    ["script", "module behind env", "script that is forked"],
)
def test_a_script_sees_no_difference(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments, path, environment, descriptors, streams, signals and threads are those of a new Python."""
    scaled(1.0)  # this machine is measured by a Python that imports torch in the working folder
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(PLACE, "OMP_NUM_THREADS", raising=False)
    (tmp_path / "own_module.py").write_text(SCRIPT)
    (tmp_path / "its src").mkdir()
    (tmp_path / "its src/script.py").write_text(SCRIPT)
    if form != "module behind env":  # this folder is not where the script's modules are looked for
        for name in ("profile", "zipfile"):  # the waiting process imports the second one before it knows the script
            (tmp_path / f"{name}.py").write_text("raise SystemExit('it is none of this script')")
    words = {
        "script": (sys.executable, "-u", "its src/script.py", "--lr", "it's 1"),
        "module behind env": ("env", "OMP_NUM_THREADS=1", "A=it's mine", sys.executable, "-Xutf8", "-m", "own_module"),
        "script that is forked": (sys.executable, "its src/script.py"),
    }[form]
    launcher = ("--launcher=fork",) if "forked" in form else ()
    seen = {}
    for is_anew in (False, True):
        behind = ("nice", "-n", "0") if is_anew else ()  # no Python, and changes nothing
        with running(tmp_path, *behind, *words, options=launcher) as run:
            first, seed = run.start(0), None if is_anew else run.seed()
            run.again()
            then = run.start(1)
            assert (first["forked"], then["forked"]) == (not is_anew, not is_anew), run.end()
            assert is_anew or run.seed() == seed
            seen[is_anew] = [first["seen"], then["seen"]]
            out, err = run.end()
            assert "begun 0\nbegun 1\n" in out
            assert err == "" or is_anew, "nor does the seed print anything"
        for path in tmp_path.glob("it's said.*"):
            path.unlink()
    assert seen[False] == seen[True]


WITHOUT_TORCH = SCRIPT.replace("import torch\n", "").replace("torch.get_num_threads()", "0")


@pytest.mark.fault(
    "the process that forks ranks is killed or can't import torch; the Python lacks cluster_ddp",
    "the rank starts in a new Python; the log says why, once",
)
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ((sys.executable, "it's a script.py"), "the process that forks them was killed"),
        ((sys.executable, "it's a script.py"), "the process that forks them does not answer"),
        (
            (sys.executable, "-I", "-S", "it's a script.py"),
            "its Python can't run cluster_ddp.runtime.fork.seed",
        ),
        ((sys.executable, "-S", "it's a script.py"), "No module named 'torch'"),
        (("env", "CLUSTER_DDP_PRELOAD=no_such", sys.executable, "it's a script.py"), "No module named 'no_such'"),
        ((sys.executable, "a zip.pyz"), "a zip.pyz is no source file"),
        ((sys.executable, "early.py"), "early.py uses os.environ before it imports torch, which reads it"),
        (("bash", "-c", f'"{sys.executable}" "it\'s a script.py"'), "the command is no Python script or module"),
    ],
    ids=["killed", "stopped", "no cluster_ddp", "no torch", "an import fails", "a zip", "variables first", "no Python"],
)
def test_without_the_process_a_new_one_is_started(
    tmp_path: Path, command: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "early.py").write_text(
        f"import os\nos.environ['A'] = 'b'\nif False:\n    import torch\n{WITHOUT_TORCH}"
    )
    with zipfile.ZipFile(tmp_path / "a zip.pyz", "w") as archive:
        archive.writestr("__main__.py", WITHOUT_TORCH)
    agents = {"agent": ("-c", IMPATIENT)} if "the process that forks them" in said else {}
    with running(tmp_path, *command, script=WITHOUT_TORCH, **agents) as run:
        first = run.start(0)
        assert first["forked"] == ("the process that forks them" in said)
        if agents:  # the seed may not have answered yet
            wait_until((tmp_path / "forked.0").exists)
        if "was killed" in said:
            os.kill(pid := run.seed(), signal.SIGKILL)
            wait_until(lambda: processes.running(pid) is None)
        elif "does not answer" in said:
            os.kill(run.seed(), signal.SIGSTOP)
        run.again()
        assert not run.start(1)["forked"]
        _, err = run.end()
        assert err.count("each rank starts Python anew, since ") == 1 and said in err


# It is killed, but its last thread takes a moment to end.
DYING = """\
import os, signal, socket, sys, time
with socket.socket(fileno=int(sys.argv[1])) as agent:
    agent.sendall(b"ready\\n")
    agent.recv(1)
time.sleep(0.5)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_just_being_killed_is_no_silent_one(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(python_module, "words", lambda module, runs_program: ["-c", DYING])
    monkeypatch.setattr(processes, "adopt_orphans", lambda: None)
    command = [sys.executable, "x.py"]
    dying = Seed(AgentOptions(command=tuple(command), restarts=1), gives_up=lambda: False)
    dying.start(command, os.environ)
    assert dying.fork(command, os.environ, log=None, cpus=os.sched_getaffinity(0), ignore_warnings=False) is None
    dying.say()
    assert "since the process that forks them was killed" in capfd.readouterr().err


# It takes a while to fork, or does not answer.
SLOW = """\
import socket, sys, time
with socket.socket(fileno=int(sys.argv[1])) as agent:
    agent.sendall(b"ready\\n")
    agent.recv(1)
    open("is forking", "w").close()
    time.sleep({seconds})
    agent.sendall(b"123\\n")
    agent.recv(4096)
"""


@pytest.mark.parametrize(("seconds", "least_s", "answer"), [(0.5, LIMIT_S, 123), (2 * LIMIT_S, 0.0, None)])
def test_a_start_that_ends_while_a_rank_is_forked_waits_for_that_and_keeps_the_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, least_s: float, answer: int | None
) -> None:
    """But not for a seed that somebody has stopped."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(python_module, "words", lambda module, runs_program: ["-c", SLOW.format(seconds=seconds)])
    monkeypatch.setattr(processes, "adopt_orphans", lambda: None)
    monkeypatch.setattr(seed_process, "_FORK_S", least_s)
    monkeypatch.setattr(seed_process, "_LOOK_S", 0.01)
    command = [sys.executable, "x.py"]
    slow = Seed(AgentOptions(command=tuple(command), restarts=1), gives_up=Path("is forking").exists)
    slow.start(command, os.environ)
    try:
        asked = {"log": None, "cpus": os.sched_getaffinity(0), "ignore_warnings": False}
        assert slow.fork(command, os.environ, **asked) == answer
        assert (slow.pid is not None) == (answer is not None)
    finally:
        slow.end()


@pytest.mark.parametrize(("line", "is_forked"), [('"""Trains in an environment."""', True), ("os.getenv('A')", False)])
def test_a_script_that_reads_variables_before_torch_is_not_forked(tmp_path: Path, line: str, is_forked: bool) -> None:
    (script := tmp_path / "train.py").write_text(f"{line}\nimport os\nimport torch\n")
    assert (seed._not_as_anew(script) == "") == is_forked
