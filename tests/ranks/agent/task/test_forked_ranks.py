"""`--launcher fork`: one process that forks the ranks. Where torch is not what is tested, it imports nothing before."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tasks
import torchless_seed
from listening import listening
from slowness import LIMIT_S, scaled, wait_until

from cluster_ddp import processes
from cluster_ddp.agent.rank_end import End
from cluster_ddp.errors import SpecError
from cluster_ddp.runtime.fork.forked_program import ForkedProgram

pytestmark = pytest.mark.full

TORCHLESS = ("-c", torchless_seed.AGENT)
REAL = ("-m", "cluster_ddp.agent")
HELPERS = Path(torchless_seed.__file__).parent
PLACE = {
    **{"SLURM_PROCID": "0", "SLURM_NODEID": "0", "MASTER_ADDR": "node1", "MASTER_PORT": "10071"},
    **{"PYTHONPATH": f"{tasks.ROOT}:{HELPERS}", "SLURMD_NODENAME": f"node{os.getpid()}", "SLURM_JOB_ID": "71"},
}


ALONE = {**tasks.PLACE, **PLACE}
_STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """A test that fails may leave its agent and ranks, which are a process group of their own."""
    yield
    while _STARTED:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(_STARTED.pop().pid, signal.SIGKILL)


def started(
    folder: Path,
    script: str,
    *arguments: str,
    ranks: int = 2,
    agent: tuple[str, ...] = TORCHLESS,
    options: tuple[str, ...] = (),
    words: tuple[str, ...] = ("script.py",),
    **env: str,
) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(script)
    sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    process = tasks.start(
        *(sys.executable, *words, *arguments),
        agent=agent,
        options=("--launcher=fork", *options),
        program=("env", f"--chdir={folder}"),
        **{**PLACE, **sizes, **env},
    )
    _STARTED.append(process)
    return process


def run(folder: Path, script: str, *arguments: str, **options) -> tuple[int, str, str]:
    process = started(folder, script, *arguments, **options)
    out, err = process.communicate(timeout=scaled(LIMIT_S))
    return process.returncode, out, err


ONE = "import os\nif os.environ.get('RANK') == '1':\n    raise SystemExit\n"
"""What follows runs in rank 0, and in a process without a rank."""
SAY = "import os; rank = os.environ['RANK']\n"
READY = SAY + "def ready(): open(f'ready{rank}', 'w').close()\n"


ENDS = """import atexit, sys, tempfile, threading, time
folder = tempfile.TemporaryDirectory(dir=".", prefix=f"temporary{rank}")
unclosed = open(f"unclosed{rank}", "w"); unclosed.write("written")
import logging.config as imported_here
imported_here.file = open(f"imported{rank}", "w"); imported_here.file.write("written")
atexit.register(lambda: os.write(1, b"handler\\n"))
def wait(): time.sleep(0.3); sys.stdout.write("thread\\n")
threading.Thread(target=wait).start()
"""


@pytest.mark.quick
def test_a_rank_ends_as_python_would(tmp_path: Path) -> None:
    """Nothing that it has left open is lost, though it does not tidy up what it shares with the others."""
    status, out, err = run(tmp_path, SAY + ENDS)
    assert (status, err) == (0, "")
    assert sorted(out.split()) == ["handler", "handler", "thread", "thread"]
    for rank in range(2):
        assert (tmp_path / f"unclosed{rank}").read_text() == (tmp_path / f"imported{rank}").read_text() == "written"
    assert not list(tmp_path.glob("temporary*"))


FAULTS = """import gc, os, resource, sys, torch
from cluster_ddp.runtime import process_exit
gc.freeze()  # as before the ranks are forked
def faults(end):
    mine, theirs = os.pipe()
    if (pid := os.fork()) == 0:
        end(lambda: os.write(theirs, str(resource.getrusage(resource.RUSAGE_SELF).ru_minflt).encode()))
    before = int(os.read(mine, 20))
    return os.wait4(pid, 0)[2].ru_minflt - before
ours = faults(lambda tell: process_exit.after(tell, dict(sys.modules)))
pythons = faults(lambda tell: (tell(), sys.exit()))
print(ours, pythons)
"""


def test_a_rank_that_ends_does_not_copy_what_it_shares() -> None:
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, timeout=scaled(LIMIT_S))
    ours, pythons = map(int, done.stdout.split())
    assert ours < pythons / 3


@pytest.mark.parametrize(
    ("ending", "status", "said"),
    [
        ("sys.exit()", 0, ""),
        ("sys.exit(256 + 7)", 7, ""),
        ("sys.exit('what went wrong')", 1, "what went wrong\n"),
        ("print('x'); sys.stdout.close()", 0, ""),
        ("print('x'); os.dup2(os.open('/dev/full', os.O_WRONLY), 1)", 120, ""),
    ],
)
def test_a_rank_has_the_status_that_python_would_have(tmp_path: Path, ending: str, status: int, said: str) -> None:
    script = f"import sys\n{SAY}\n{ending}"
    env = {"PYTHONUNBUFFERED": ""}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, env={**ALONE, "RANK": "0", **env})
    assert (done.returncode, said in done.stderr.decode()) == (status, True)  # so Python does
    found, _, err = run(tmp_path, ONE + script, **env)
    assert (found, said in err) == (status, True)


def test_a_script_is_run_as_python_runs_it(tmp_path: Path) -> None:
    """The same words from a rank and from a process of its own."""
    script = (
        f"{ONE}import json, signal, sys, threading\nclass Here: pass\n"
        "import pickle; assert type(pickle.loads(pickle.dumps(Here()))) is Here\n"
        "names = {name: str(value) for name, value in globals().items() if name.startswith('__')}\n"
        "del names['__loader__']; names.pop('__annotations__', 0)\n"
        "signals = [str(signal.getsignal(one)) for one in (2, 15, 17)]\n"
        "print(json.dumps([sys.argv, sys.path, names, sorted(signal.pthread_sigmask(0, [])), signals]))\n"
    )
    status, out, err = run(tmp_path, script, "a", "b c", agent=REAL)
    assert (status, err) == (0, "")
    alone = subprocess.run(
        [sys.executable, "script.py", "a", "b c"], cwd=tmp_path, env=ALONE, capture_output=True, text=True
    )
    assert json.loads(out) == json.loads(alone.stdout)


def test_a_module_is_run_as_python_runs_it(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "other.py").write_text("WORD = 'imported'\n")
    show = ONE + "import sys; from .other import WORD\n"
    show += "print(WORD, __name__, __package__, __spec__.name, sys.argv, sys.path[0])\n"
    (package / "module.py").write_text(show)
    (package / "__main__.py").write_text(show)
    for name in ("package.module", "package"):
        words = ("-m", name, "x")
        alone = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=ALONE, capture_output=True, text=True, check=False
        )
        assert run(tmp_path, "", words=words) == (0, alone.stdout, "")


def test_workers_of_a_loader_know_what_main_holds(tmp_path: Path) -> None:
    script = (
        "import os, torch, numpy\nfrom torch.utils.data import DataLoader\n"
        "class Squares:\n    def __len__(self): return 4\n    def __getitem__(self, i): return i * i\n"
        "if __name__ == '__main__':\n"
        "    for context in ('fork', 'spawn'):\n"
        "        loader = DataLoader(Squares(), num_workers=1, multiprocessing_context=context)\n"
        "        os.write(1, f'{sum(int(one) for one in loader)}\\n'.encode())\n"  # in one piece
        "    draws = [torch.rand(1).item(), numpy.random.rand(), __import__('random').random()]\n"
        "    os.write(1, f'drawn {draws}\\n'.encode())\n"
    )
    status, out, err = run(tmp_path, script, agent=REAL)
    assert (status, err) == (0, "")
    drawn = [line.split()[1:] for line in out.splitlines() if line.startswith("drawn")]
    assert out.splitlines().count("14") == 4
    assert all(one != other for one, other in zip(*drawn))


def test_each_rank_has_its_log(tmp_path: Path) -> None:
    (tmp_path / "task-1.log").write_text("before\n")
    script = SAY + "import atexit; atexit.register(print, 'bye'); print('rank', rank, end=' ')"
    assert run(tmp_path, script, CLUSTER_DDP_RUN_DIR=str(tmp_path)) == (0, "", "")
    logs = [(tmp_path / f"task-{rank}.log").read_text() for rank in (0, 1)]
    assert logs == ["rank 0 bye\n", "before\nrank 1 bye\n"]


@pytest.mark.parametrize(
    ("ending", "status"), [("sys.exit(3)", 3), ("sys.exit('no reason')", 1), ("os.kill(os.getpid(), 9)", 137)]
)
def test_the_status_is_that_of_the_rank_that_failed(tmp_path: Path, ending: str, status: int) -> None:
    """The job is told how each rank ended."""
    script = f"{SAY}import sys\nif rank == '1':\n    {ending}\n"
    with listening() as job:
        found, *_ = run(tmp_path, script, **job.env)
        ended = {end.rank: end for end in job.ends()}
    assert (found, sorted(ended)) == (status, [0, 1])
    assert ended[1] == End(1, PLACE["SLURMD_NODENAME"], status)
    (hello,) = [one for one in job.said if one["kind"] == "hello"]
    assert (hello["ranks"], hello["task"]) == ([0, 1], "0")


def test_a_rank_leaves_its_words_for_the_job(tmp_path: Path) -> None:
    note = """open(os.environ["CLUSTER_DDP_NOTES"] + "/failed-1", "w").write('{"words": "x", "kind": "peer"}')"""
    with listening() as job:
        status, *_ = run(tmp_path, f"{SAY}\nif rank == '1':\n    {note}; os._exit(3)", **job.env)
        assert End(1, PLACE["SLURMD_NODENAME"], 3, "x", "peer") in job.ends()
    assert status == 3


def test_the_job_is_told_that_the_agent_is_gone_and_no_rank_is_left(tmp_path: Path) -> None:
    """Whatever the ranks have inherited: they would keep a connection open."""
    script = f"{READY}import time\nopen(f'pid{{rank}}', 'w').write(str(os.getpid()))\nready()\ntime.sleep(600)\n"
    with listening() as job:
        process = started(tmp_path, script, **job.env)
        wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 2)
        ranks = [int((tmp_path / f"pid{rank}").read_text()) for rank in (0, 1)]
        assert {*ranks} < {*processes.children(process.pid)}
        inherited = [fd for pid in ranks for fd in Path(f"/proc/{pid}/fd").iterdir()]
        assert inherited and not [fd for fd in inherited if str(fd.readlink()).startswith("socket:")]
        process.kill()
        assert job.ends() == []
    assert job.gone == job.said[:1]
    wait_until(lambda: not [pid for pid in ranks if processes.running(pid)])


def test_more_modules_can_be_imported_once(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import os; IN_RANK = 'RANK' in os.environ\n")
    assert run(tmp_path, f"{ONE}import slow; print(slow.IN_RANK)", CLUSTER_DDP_PRELOAD="json slow") == (
        0,
        "False\n",
        "",
    )


def test_a_traceback_begins_in_the_script(tmp_path: Path) -> None:
    script = f"{ONE}def inner():\n    raise ValueError('this one')\ninner()\n"
    _, _, err = run(tmp_path, script)
    alone = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=ALONE, capture_output=True, text=True)
    assert err.startswith(alone.stderr)


@pytest.mark.parametrize(("options", "handler"), [((), "SIG_DFL"), (("--ignore-warnings",), "SIG_IGN")])
def test_ranks_begin_with_the_handlers_that_a_task_would_have(
    tmp_path: Path, options: tuple[str, ...], handler: str
) -> None:
    """Of a warning that is ignored, some frameworks believe that somebody handles it already."""
    script = f"{ONE}import signal\nprint(repr([signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGUSR2)]))\n"
    status, said, _ = run(tmp_path, script, options=options)
    assert (status, said.count(handler)) == (0, 2)


def test_a_warning_before_the_ranks_are_there(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import os, time\nwhile not os.path.exists('go'):\n    time.sleep(0.05)\n")
    script = f"{SAY}import signal, sys, time\nsignal.signal(10, lambda *_: sys.exit(75))\nwhile True: time.sleep(0.1)\n"
    process = started(tmp_path, script, CLUSTER_DDP_PRELOAD="slow", **tasks.AT_ONCE)
    wait_until(lambda: processes.catches(process.pid, signal.SIGUSR1))
    process.send_signal(signal.SIGUSR1)
    (tmp_path / "go").touch()
    assert process.wait(timeout=scaled(LIMIT_S)) == 75


@pytest.mark.parametrize(
    ("launcher", "number"), [("fork", signal.SIGTERM), ("srun", signal.SIGTERM), ("fork", signal.SIGINT)]
)
def test_a_start_that_ends_before_its_ranks_are_there(tmp_path: Path, launcher: str, number: signal.Signals) -> None:
    """The agent does not wait for the imports."""
    (tmp_path / "slow.py").write_text("open('begun', 'w').close()\nimport time\ntime.sleep(600)\n")
    with listening() as job:
        options = (f"--launcher={launcher}", "--restarts=1")
        more = {"CLUSTER_DDP_PRELOAD": "slow", "CLUSTER_DDP_START": "0", "SLURM_LOCALID": "0"}
        process = started(tmp_path, "", options=options, **more, **job.env)
        wait_until((tmp_path / "begun").exists)
        process.send_signal(number)
        wait_until(lambda: any(one["kind"] == "idle" for one in job.said), said=lambda: job.said)
        job.server.tell("over", to=0)
        assert process.wait(timeout=scaled(LIMIT_S)) == 128 + number
        assert job.ends() == [End(0, PLACE["SLURMD_NODENAME"], 128 + number)]


@pytest.mark.parametrize(
    ("module", "found"),
    [
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", "started 1 threads"),
        ("import torch; torch.cuda.is_initialized = lambda: True", "has initialised the GPU's driver, and"),
        (  # as a library does that calls CUDA past torch
            "import os; from cluster_ddp.runtime.device import binding; device = open('device', 'w');"
            "binding._DRIVERS = (os.path.realpath('device'),)",
            "has initialised the GPU's driver (",
        ),
        ("import nowhere", "No module named 'nowhere'"),
    ],
)
def test_what_cannot_be_forked_starts_anew_and_that_is_said_once(tmp_path: Path, module: str, found: str) -> None:
    """Each rank has its place, its log and its CPUs nevertheless."""
    (tmp_path / "stateful.py").write_text(module)
    script = f"{SAY}print(rank, os.environ['LOCAL_RANK'], len(os.sched_getaffinity(0)))"
    more = {"CLUSTER_DDP_PRELOAD": "stateful", "CLUSTER_DDP_RUN_DIR": str(tmp_path)}
    status, out, err = run(tmp_path, script, agent=REAL, **more)
    assert (status, out, err.count("each rank starts Python anew, since ")) == (0, "", 1)
    assert found in err
    cpus = len(os.sched_getaffinity(0))
    each = cpus if cpus < 2 else cpus // 2
    logs = [(tmp_path / f"task-{rank}.log").read_text() for rank in (0, 1)]
    assert logs == [f"{rank} {rank} {each if rank == 0 or cpus < 2 else cpus - each}\n" for rank in (0, 1)]


# An agent that sees to nothing until the rank that it has started has spoken, as on a busy node.
SLOW = """from cluster_ddp.agent import __main__ as agent
from cluster_ddp.agent.supervision.supervisor import Supervisor
import time
start = Supervisor.start
def slow(supervisor, rank, *words, log=None, **more):
    pid = start(supervisor, rank, *words, log=log, **more)
    while not log.read_text():
        time.sleep(0.05)
    return pid
Supervisor.start = slow
agent.run()"""


def test_a_rank_that_starts_anew_has_its_cpus_from_the_first_moment_on(tmp_path: Path) -> None:
    """It counts them when it imports torch."""
    script = "import os; print(len(os.sched_getaffinity(0)))"
    more = {"CLUSTER_DDP_PRELOAD": "nowhere", "CLUSTER_DDP_RUN_DIR": str(tmp_path)}
    assert run(tmp_path, script, agent=("-c", SLOW), **more)[0] == 0
    logs = [(tmp_path / f"task-{rank}.log").read_text() for rank in (0, 1)]
    assert sum(map(int, logs)) == max(2, len(os.sched_getaffinity(0)))


def test_a_script_that_is_missing_is_named_by_python(tmp_path: Path) -> None:
    status, _, err = run(tmp_path, "", words=("missing.py",))
    assert status == 2 and "can't open file" in err


def test_a_module_that_asks_for_gpus_does_not_start_cuda(tmp_path: Path) -> None:
    """torch.cuda.is_available() would, in the seed, and no forked rank could use a GPU then; the ranks' own may."""
    (tmp_path / "asking.py").write_text("import os; asked = os.environ['PYTORCH_NVML_BASED_CUDA_CHECK']")
    said = "f\"{asking.asked} {os.environ.get('PYTORCH_NVML_BASED_CUDA_CHECK')}\\n\".encode()"
    script = f"import asking, os; os.write(1, {said})"
    assert run(tmp_path, script, CLUSTER_DDP_PRELOAD="asking") == (0, "1 None\n1 None\n", "")


def test_torch_and_numpy_are_enough(tmp_path: Path) -> None:
    """As on a machine with GPUs that has no more, on which the GPU tests promise to run."""
    others = ["tyro", "typeguard", "rich", "submitit", "torchvision", "pooch", "requests", "shtab", "pynvml"]
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules.update(dict.fromkeys({others}))")
    path = f"{tmp_path}:{PLACE['PYTHONPATH']}"
    status, out, err = run(tmp_path, "print('ran')", agent=REAL, PYTHONPATH=path)
    assert (status, out.count("ran"), err) == (0, 2, "")  # each line may be two writes


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_a_rank_runs_on_its_cpus_with_threads_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    show = "import os, torch, numpy; cpus, threads = sorted(os.sched_getaffinity(0)), torch.get_num_threads()\n"
    show += "os.write(1, f'{cpus} {threads}\\n'.encode())\n"  # in one piece: the ranks share a pipe
    monkeypatch.delitem(tasks.PLACE, "OMP_NUM_THREADS", raising=False)
    status, out, err = run(tmp_path, show, agent=REAL)
    assert (status, err) == (0, "")
    count = len(os.sched_getaffinity(0))
    lines = [line.rsplit(maxsplit=1) for line in out.splitlines()]
    taken = [json.loads(cpus) for cpus, _ in lines]
    assert sorted(cpu for share in taken for cpu in share) == sorted(os.sched_getaffinity(0))
    assert sum(int(threads) for _, threads in lines) == count


def test_a_script_that_is_missing_is_named() -> None:
    with pytest.raises(SpecError, match=r"(?s)'missing\.py' in each rank:.*there is no such file"):
        ForkedProgram.parse(["missing.py"])
