"""For all tests: processes with torch that cost little, no secret in what a failing one prints, handlers put back."""

from __future__ import annotations

import functools
import logging
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.util import Finalize
from pathlib import Path

import hypothesis
import pytest
import signal_handlers
import slowness
from cluster import SKIPPED, skip

from cluster_ddp.agent import rank_notes
from cluster_ddp.agent.supervision import supervisor
from cluster_ddp.errors import DataError
from cluster_ddp.mnist import data
from cluster_ddp.sandbox import cluster, slurm_download

# Threads that outnumber the cores wait actively: five times the CPU time. torch reads this where it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# As in jobs, whatever the shell has set: what a process has printed is there, however it ends.
os.environ["PYTHONUNBUFFERED"] = "1"

# Others' messages are compared with English ones. All else of the user's locale stays.
if "LC_ALL" in os.environ:
    os.environ["LANG"] = os.environ.pop("LC_ALL")
os.environ["LC_MESSAGES"] = "C"
os.environ.pop("LANGUAGE", None)

_EVERY_PYTHON = str(Path(__file__).parent / "helpers" / "every_python")  # has a sitecustomize.py
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_EVERY_PYTHON, os.environ.get("PYTHONPATH")]))

# Time limits of tests are for hangs only: the machine may be busy.
hypothesis.settings.register_profile("tests", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("tests")

# `nohup make test &` begins with these ignored, and so would what the tests start and then interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
for _number in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(_number, signal.SIG_DFL)

_ROOT = Path(__file__).parents[1]
_SLURM = Path(__file__).parent / "slurm"
_LONGEST = (
    *("test_lessons.py", "test_gpu_nodes_rehearsal.py", "test_gpu_rehearsal.py", "test_checkpointer.py"),
    *("test_hang_watch.py", "test_wrong_loops.py", "test_examples.py", "test_options.py", "test_loop.py"),
    *("test_detection_example.py", "test_workers_end.py", "test_parts.py", "test_unsaved.py", "test_exactness.py"),
    *("test_foreign_runs.py", "test_streams.py", "test_links.py", "test_sharded.py", "test_local.py"),
    *("test_local_launchers.py", "test_seed.py", "test_submit_plan.py", "test_evaluation.py", "test_make.py"),
)

_LONGEST_ON_SLURM = (
    "test_faults_around_the_job.py",
    "test_requeues.py",
    "test_restarts.py",
    "test_sharded_trainings.py",
)

_log = logging.getLogger("cluster_ddp")

# Another thread of a test process (of a library that an earlier test has used) may take SIGCHLD: then a supervisor here
# would wait for an hour.
supervisor._LONGEST_WAIT_S = 1.0

_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|_KEY$|_URL$", re.IGNORECASE)

for _name in list(os.environ):
    # Nor an environment that is active where the tests are started: the doctor would say that it is another one.
    if _SECRET.search(_name) or _name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        del os.environ[_name]


def pytest_addoption(parser: pytest.Parser) -> None:
    """`pytest tests/slurm/faults tests/slurm/test_jobs.py --launcher fork --slurm-version 26.05`"""
    words = "what the tests of faults/ and test_jobs.py start their jobs with"
    parser.addoption("--launcher", choices=("srun", "fork"), default="srun", help=words)
    words = "the Slurm of the tests' sandbox: a Debian release's (default: the system's)"
    parser.addoption("--slurm-version", choices=sorted(slurm_download.SUITES), help=words)


def pytest_itemcollected(item: pytest.Item) -> None:
    """`make test` gives a test to any of its processes; those of one file stay together where that is less work.

    They do where they share a fixture, and in `tests/slurm`, whose files start long jobs first; not in its `faults`. A
    second Slurm that a file is tested on makes it another file.
    """
    used = [fixture for named in item._fixtureinfo.name2fixturedefs.values() for fixture in named]
    if _stays_together(item.path) or any(fixture.scope == "module" for fixture in used):
        slurm = item.callspec.params.get("slurm") if hasattr(item, "callspec") else None
        item.add_marker(pytest.mark.xdist_group("-".join(filter(None, (item.path.name, slurm)))))


@functools.cache
def _stays_together(path: Path) -> bool:
    return _SLURM in path.parents and _SLURM / "faults" not in path.parents


@pytest.hookimpl(trylast=True)  # after pytest has put those of one Slurm together, in all files
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests are given out in this order: those that take longest must not come last.

    Tests of jobs on Slurm wait much, the longest of the others compute: one of these after three of those.
    """
    paths = [path for path in dict.fromkeys(item.path for item in items) if _SLURM in path.parents]
    slurm = sorted(paths, key=lambda path: path.name not in _LONGEST_ON_SLURM)
    turns = {path: float(number) for number, path in enumerate(slurm)}
    longest = {name: 3 * number + 2.5 for number, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: turns.get(item.path, longest.get(item.path.name, math.inf)))


def pytest_configure(config: pytest.Config) -> None:
    """Name this run, for its sandboxes. Measure the machine before pytest-xdist's processes make it busy.

    What is written to the folder for temporary files (torchrun's logs, W&B's copies) goes into one that is removed.
    """
    if "PYTEST_RUN" not in os.environ:
        os.environ["PYTEST_RUN"] = str(os.getpid())  # they inherit it, and the slowness
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # the tests' own are kept, as always
        os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="cluster-ddp-tests-")
        after_multiprocessings = -200  # which removes its own with -100
        Finalize(None, shutil.rmtree, args=(tempfile.tempdir, True), exitpriority=after_multiprocessings)
    if config.getoption("numprocesses", None):
        slowness.slowness()


def pytest_unconfigure() -> None:
    """Take away what is left of the processes' sandboxes: where pytest-xdist is interrupted, it kills them.

    And the notes of agents that were killed: they would be left to the next agent.
    """
    if os.environ["PYTEST_RUN"] == str(os.getpid()):
        rank_notes.remove_leftovers(Path("/dev/shm"), new_s=0.0)
        for state in cluster.STATE_ROOT.glob(f"*-{os.getpid()}-gw*"):
            cluster.down(state.name)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """All tests that are skipped for want of Slurm get one place and reason: pytest counts them in one line."""
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if SKIPPED in str(report.longrepr)]
    for report in skipped:
        report.longrepr = (str(_SLURM), None, skipped[0].longrepr[2])


@pytest.fixture(autouse=True)
def handlers_as_before() -> Iterator[None]:
    """Each test leaves the signal handlers as they were before it."""
    with signal_handlers.put_back():
        yield


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.LogCaptureFixture]:
    """What was logged; other tests may have given the logger a handler of its own."""
    monkeypatch.setattr(_log, "propagate", False)
    caplog.set_level(logging.INFO, _log.name)
    _log.addHandler(caplog.handler)
    yield caplog
    _log.removeHandler(caplog.handler)


@pytest.fixture(scope="session")
def mnist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the real MNIST: the checkout's data/, or made from the files in $MNIST_FROM."""
    try:
        data.check(_ROOT / "data")
        return _ROOT / "data"
    except DataError:
        folder = tmp_path_factory.mktemp("mnist")
    source = os.environ.get("MNIST_FROM", "")
    if not source:
        skip("MNIST is not at hand: run scripts/download_data.py, or set MNIST_FROM to a folder with its files")
    command = [sys.executable, "scripts/download_data.py", "--data-dir", str(folder), "--from", source]
    subprocess.run(command, cwd=_ROOT, check=True)
    return folder
