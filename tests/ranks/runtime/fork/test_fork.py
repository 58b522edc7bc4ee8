"""One process that becomes the ranks. Where torch is not what is tested, nothing is imported before forking."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from listening import listening
from slowness import LIMIT_S, scaled, wait_until

from cluster_ddp import processes
from cluster_ddp.agent.rank_end import End
from cluster_ddp.errors import SpecError
from cluster_ddp.runtime.device import binding
from cluster_ddp.runtime.fork.__main__ import PROGRAM
from cluster_ddp.runtime.fork.forked_program import ForkedProgram
from cluster_ddp.slurm.variables import node_name

pytestmark = pytest.mark.full

WITHOUT_TORCH = (
    "import os, sys; from cluster_ddp.runtime.fork import __main__ as fork, forked_program;"
    "forked_program.MODULES = (); forked_program._check = lambda forks: None;"
    "forked_program.reinit_after_fork = lambda cpus: None;"
    "from cluster_ddp.agent.task import supervisor; supervisor.PATIENCE_S = 1.0;"
    "supervisor.Supervisor.__init__.__kwdefaults__['patience_s'] = 1.0;"
    "sys.path[0] = os.getcwd(); fork.main()"
)
STAND_IN = (sys.executable, "-c", WITHOUT_TORCH)
IGNORING = ("bash", "-c", 'trap "" USR1 USR2; exec "$@"', "bash", *STAND_IN)
REAL = (sys.executable, "-m", PROGRAM.split()[-1])
PLACE = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("SLURM", "SUBMITIT", "CLUSTER_DDP")) and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
}


_STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """A test that fails may leave its agent and ranks, which are a process group of their own."""
    yield
    while _STARTED:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(_STARTED.pop().pid, signal.SIGKILL)


def started(
    folder: Path, script: str, *arguments: str, ranks: int = 2, program: tuple[str, ...] = STAND_IN, **env: str
) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(script)
    process = subprocess.Popen(
        [*program, "--ranks", str(ranks), "--", "script.py", *arguments],
        cwd=folder,
        env={**PLACE, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    _STARTED.append(process)
    return process


def run(folder: Path, script: str, *arguments: str, **options) -> tuple[int, str, str]:
    process = started(folder, script, *arguments, **options)
    out, err = process.communicate(timeout=scaled(LIMIT_S))
    return process.returncode, out, err


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
    env = {"RANK": "0", "PYTHONUNBUFFERED": ""}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, env={**PLACE, **env})
    assert (done.returncode, said in done.stderr.decode()) == (status, True)  # so Python does
    found, _, err = run(tmp_path, script, ranks=1, **env)
    assert (found, said in err) == (status, True)


@pytest.mark.parametrize(("env", "length"), [({}, 64), ({"CLUSTER_DDP_SECRET": "ours"}, 4)], ids=["made", "given"])
def test_the_ranks_of_one_machine_share_a_secret(tmp_path: Path, env: dict[str, str], length: int) -> None:
    status, out, err = run(tmp_path, "import os; os.write(1, f'{os.environ[\"CLUSTER_DDP_SECRET\"]} '.encode())", **env)
    assert status == 0, err
    first, second = out.split()
    assert first == second and len(first) == length


def test_a_script_is_run_as_python_runs_it(tmp_path: Path) -> None:
    """The same words from a rank and from a process of its own."""
    script = (
        "import json, signal, sys, threading\nclass Here: pass\n"
        "import pickle; assert type(pickle.loads(pickle.dumps(Here()))) is Here\n"
        "names = {name: str(value) for name, value in globals().items() if name.startswith('__')}\n"
        "del names['__loader__']; names.pop('__annotations__', 0)\n"
        "signals = [str(signal.getsignal(one)) for one in (2, 15, 17)]\n"
        "print(json.dumps([sys.argv, sys.path, names, sorted(signal.pthread_sigmask(0, [])), signals]))\n"
    )
    status, out, err = run(tmp_path, script, "a", "b c", ranks=1, program=REAL)
    assert (status, err) == (0, "")
    alone = subprocess.run(
        [sys.executable, "script.py", "a", "b c"], cwd=tmp_path, env=PLACE, capture_output=True, text=True
    )
    assert json.loads(out) == json.loads(alone.stdout)


def test_a_module_is_run_as_python_runs_it(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "other.py").write_text("WORD = 'imported'\n")
    show = "import sys; from .other import WORD\n"
    show += "print(WORD, __name__, __package__, __spec__.name, sys.argv, sys.path[0])\n"
    (package / "module.py").write_text(show)
    (package / "__main__.py").write_text(show)
    for name in ("package.module", "package"):
        words = ["-m", name, "x"]
        alone, forked = (
            subprocess.run([*program, *words], cwd=tmp_path, env=PLACE, capture_output=True, text=True)
            for program in ((sys.executable,), (*STAND_IN, "--ranks", "1", "--"))
        )
        assert (forked.stdout, forked.stderr) == (alone.stdout, "")


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
    status, out, err = run(tmp_path, script, program=REAL)
    assert (status, err) == (0, "")
    drawn = [line.split()[1:] for line in out.splitlines() if line.startswith("drawn")]
    assert out.splitlines().count("14") == 4
    assert all(one != other for one, other in zip(*drawn))


def test_each_rank_has_its_log_and_the_parents_buffer_is_not_theirs(tmp_path: Path) -> None:
    before = STAND_IN[2].replace("fork.main", "print('parent', end=''); fork.main")
    program = (sys.executable, "-c", before)
    (tmp_path / "task-1.log").write_text("before\n")
    script = SAY + "import atexit; atexit.register(print, 'bye'); print('rank', rank, end=' ')"
    (tmp_path / "script.py").write_text(script)
    words = [*program, "--ranks", "2", "--log-dir", ".", "--", "script.py"]
    done = subprocess.run(words, cwd=tmp_path, env=PLACE, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "parent", "")
    logs = [(tmp_path / f"task-{rank}.log").read_text() for rank in (0, 1)]
    assert logs == ["rank 0 bye\n", "before\nrank 1 bye\n"]


@pytest.mark.parametrize(
    ("ending", "status", "said"),
    [
        ("sys.exit(3)", 3, "rank 1 ended with status 3."),
        ("sys.exit('no reason')", 1, "no reason\n"),
        ("os.kill(os.getpid(), 9)", 137, "rank 1 was killed by SIGKILL."),
    ],
)
def test_the_status_is_that_of_the_rank_that_failed(tmp_path: Path, ending: str, status: int, said: str) -> None:
    """The job is told how each rank ended."""
    script = f"{SAY}import sys\nif rank == '1':\n    {ending}\n"
    with listening() as job:
        found, _, err = run(tmp_path, script, **job.env)
        ended = {end.rank: end for end in job.ends()}
    assert found == status
    assert ended[1] == End(1, node_name(os.environ), status)
    assert said in err
    assert sorted(ended) == [0, 1]


def test_a_rank_leaves_its_words_for_the_job(tmp_path: Path) -> None:
    note = """open(os.environ["CLUSTER_DDP_NOTES"] + "/failed-1", "w").write('{"words": "x", "consequence": true}')"""
    (tmp_path / "notes").mkdir()
    with listening() as job:
        env = {**job.env, "CLUSTER_DDP_NOTES": str(tmp_path / "notes")}
        status, *_ = run(tmp_path, f"{SAY}\nif rank == '1':\n    {note}; os._exit(3)", **env)
        assert End(1, node_name(os.environ), 3, "x", is_consequence=True) in job.ends()
    assert (status, job.gone) == (3, job.said[:1])
    assert {**job.said[0]} == {
        "kind": "hello",
        "ranks": [0, 1],
        "host": node_name(os.environ),
        "task": None,
        "start": 0,
    }


def test_the_job_is_told_that_its_parent_is_gone(tmp_path: Path) -> None:
    """Whatever the ranks have inherited: they would keep a connection open."""
    with listening() as job:
        process = started(tmp_path, f"{READY}import time\nready()\ntime.sleep(600)\n", **job.env)
        wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 2)
        inherited = [fd for pid in processes.children(process.pid) for fd in Path(f"/proc/{pid}/fd").iterdir()]
        assert inherited and not [fd for fd in inherited if str(fd.readlink()).startswith("socket:")]
        process.kill()
        assert job.ends() == []
    assert job.gone == job.said[:1]


def test_more_modules_can_be_imported_once(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import os; print('imported by', 'RANK' in os.environ)\n")
    status, out, _ = run(tmp_path, "import slow\n", CLUSTER_DDP_PRELOAD="json slow")
    assert (status, out) == (0, "imported by False\n")
    status, out, err = run(tmp_path, "print('ran')", CLUSTER_DDP_PRELOAD="nowhere")
    assert (status, out) == (2, "")
    assert "ModuleNotFoundError: No module named 'nowhere'" in err


def test_a_traceback_begins_in_the_script(tmp_path: Path) -> None:
    script = "def inner():\n    raise ValueError('this one')\ninner()\n"
    _, _, err = run(tmp_path, script, ranks=1)
    alone = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=PLACE, capture_output=True, text=True)
    assert err.startswith(alone.stderr)


@pytest.mark.parametrize(("program", "handler"), [(STAND_IN, "SIG_DFL"), (IGNORING, "SIG_IGN")])
def test_ranks_begin_with_the_handlers_that_a_task_would_have(
    tmp_path: Path, program: tuple[str, ...], handler: str
) -> None:
    """Of a warning that is ignored, some frameworks believe that somebody handles it already."""
    script = "import signal\nprint(repr([signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGUSR2)]))\n"
    status, said, _ = run(tmp_path, script, ranks=1, program=program)
    assert (status, said.count(handler)) == (0, 2)


def test_a_warning_before_the_ranks_are_there(tmp_path: Path) -> None:
    slow = STAND_IN[2].replace("_check = lambda forks: None", "load = lambda more: __import__('time').sleep(1)")
    assert slow != STAND_IN[2]
    script = f"{SAY}import signal, sys, time\nsignal.signal(10, lambda *_: sys.exit(75))\nwhile True: time.sleep(0.1)\n"
    process = started(tmp_path, script, program=(sys.executable, "-c", slow))
    wait_until(lambda: processes.catches(process.pid, signal.SIGUSR1))
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=scaled(LIMIT_S)) == 75


@pytest.mark.parametrize(
    ("words", "env", "said"),
    [
        (("--ranks", "2", "--", "missing.py"), {}, "there is no such file in"),
        (("--ranks", "2", "--"), {}, "neither a script nor -m with a module"),
        (("--ranks", "2"), {}, "neither a script nor -m with a module"),
        (("--ranks", "0", "--", "x.py"), {}, "is a whole number of 1 or more"),
        (("--ranks", "2", "--", "script.py"), {"WORLD_SIZE": "3"}, "WORLD_SIZE=3"),
    ],
)
def test_what_cannot_be_forked_is_told_once(
    tmp_path: Path, words: tuple[str, ...], env: Mapping[str, str], said: str
) -> None:
    (tmp_path / "script.py").touch()
    done = subprocess.run([*STAND_IN, *words], cwd=tmp_path, env={**PLACE, **env}, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count(said) == 1
    assert "Traceback" not in done.stderr


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
    ],
)
def test_a_state_that_must_not_be_forked(tmp_path: Path, module: str, found: str) -> None:
    (tmp_path / "stateful.py").write_text(module)
    code = "import sys; sys.path.insert(0, ''); from cluster_ddp.runtime.fork import __main__ as fork, forked_program;"
    program = (sys.executable, "-c", f"{code} forked_program.MODULES += ('stateful',); fork.main()")
    status, out, err = run(tmp_path, "print('ran')", program=program)
    assert (status, out) == (2, "")
    assert found in err
    assert "--launcher srun" in err


def test_a_module_that_asks_for_gpus_does_not_start_cuda(tmp_path: Path) -> None:
    """torch.cuda.is_available() would, in the parent, and no forked rank could use a GPU then; the ranks' own may."""
    asking = "import os; asked = os.environ['PYTORCH_NVML_BASED_CUDA_CHECK']"
    (tmp_path / "asking.py").write_text(asking)
    code = "import sys; sys.path.insert(0, ''); from cluster_ddp.runtime.fork import __main__ as fork, forked_program;"
    program = (sys.executable, "-c", f"{code} forked_program.MODULES += ('asking',); fork.main()")
    said = "f\"{asking.asked} {os.environ.get('PYTORCH_NVML_BASED_CUDA_CHECK')}\\n\".encode()"
    script = f"import asking, os; os.write(1, {said})"
    assert run(tmp_path, script, program=program)[:2] == (0, "1 None\n1 None\n")


def test_torch_and_numpy_are_enough(tmp_path: Path) -> None:
    """As on a machine with GPUs that has no more, on which the GPU tests promise to run."""
    others = ["tyro", "typeguard", "rich", "submitit", "torchvision", "pooch", "requests", "shtab", "pynvml"]
    missing = f"import sys; sys.modules.update(dict.fromkeys({others}));"
    code = f"{missing} sys.path.insert(0, ''); from cluster_ddp.runtime.fork import __main__ as fork; fork.main()"
    status, out, err = run(tmp_path, "print('ran')", program=(sys.executable, "-c", code))
    assert (status, out.count("ran")) == (0, 2), err  # each line may be two writes


@pytest.mark.parametrize(
    ("cpus", "ranks", "env", "shares"),
    [
        ({0, 1, 2, 3}, 2, {}, [{0, 1}, {2, 3}]),
        ({0, 1, 2, 3}, 3, {}, [{0}, {1}, {2, 3}]),
        ({0, 1}, 4, {}, [{0, 1}] * 4),
        ({0, 1, 2, 3}, 2, {"SLURM_CPUS_ON_NODE": "4"}, [{0, 1}, {2, 3}]),
        ({0, 1, 2, 3}, 2, {"SLURM_CPUS_ON_NODE": "2"}, [{0, 1, 2, 3}] * 2),
    ],
)
def test_cpus_are_shared_out(
    monkeypatch: pytest.MonkeyPatch, cpus: set[int], ranks: int, env: dict[str, str], shares: list[set[int]]
) -> None:
    monkeypatch.setattr(binding, "_place", lambda cpu: (0, cpu, cpu))
    assert [binding.share_of_cpus(cpus, rank, ranks, env) for rank in range(ranks)] == shares


def test_the_threads_of_a_core_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "_place", lambda cpu: (0, cpu % 2, cpu))  # CPUs 0 and 2 are of the same core
    assert [binding.share_of_cpus({0, 1, 2, 3}, rank, 2, {}) for rank in (0, 1)] == [{0, 2}, {1, 3}]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_a_rank_runs_on_its_cpus_with_threads_for_them(tmp_path: Path) -> None:
    show = "import os, torch, numpy; cpus, threads = sorted(os.sched_getaffinity(0)), torch.get_num_threads()\n"
    show += "os.write(1, f'{cpus} {threads}\\n'.encode())\n"  # in one piece: the ranks share a pipe
    status, out, err = run(tmp_path, show, program=("env", "--unset=OMP_NUM_THREADS", *REAL))
    assert (status, err) == (0, "")
    count = len(os.sched_getaffinity(0))
    lines = [line.rsplit(maxsplit=1) for line in out.splitlines()]
    taken = [json.loads(cpus) for cpus, _ in lines]
    assert sorted(cpu for share in taken for cpu in share) == sorted(os.sched_getaffinity(0))
    assert sum(int(threads) for _, threads in lines) == count


def test_a_script_that_is_missing_is_named() -> None:
    with pytest.raises(SpecError, match=r"(?s)'missing\.py' in each rank:.*there is no such file"):
        ForkedProgram.parse(["missing.py"])
