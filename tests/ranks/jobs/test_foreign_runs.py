"""Run directories that somebody else has made, with any content: no verb fails, waits, or takes much memory."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from made_runs import BEGAN_S, make_run, write_lines
from slowness import LIMIT_S, scaled
from stand_ins import FakeSlurm, fake_slurm

from cluster_ddp.cli import logs, report, status
from cluster_ddp.doctor import __main__ as doctor
from cluster_ddp.jobs import find_runs
from cluster_ddp.jobs.find_runs import of_run

__all__ = ["fake_slurm"]

FILES = ("spec.json", "run.json", "metrics.jsonl", "starts.jsonl", "usage-0.jsonl", "job.log", "task-0.log")
FILES += ("hang.txt", "stack-rank0.txt", ".progress", ".lock", "job.jsonl")
ANSWER = {"rank": 0, "host": "n1", "pid": 7, "where": "t.py:3", "doing": "loop", "operation": "all_reduce", "number": 1}
FIRST = {"rank": 0, "host": "n1", "status": 1, "words": "E"}
ENDED = {"event": "end", "job": "13", "start": 0, "state": "FAILED", "status": 1, "first": FIRST, "lost_nodes": ["n2"]}
WHY = {"node": "n1", "rank": 0, "words": "E", "lost_s": 3.0, "without": ["n1"]}
FAILED = {**ENDED, "time": BEGAN_S + 9.0, "then": "restart", "failed": WHY}
NODES = {"nodes": 3, "training": 2, "gpus": 2}
HAD = [
    {"event": "start", "time": BEGAN_S, "job": "13", "requeue": 0, "start": 0, "id": 7, "since": BEGAN_S, **NODES},
    {**ENDED, "time": BEGAN_S + 9, "saved": None},
    {"event": "nodes", "job": "13", "time": BEGAN_S + 9, "nodes": 2},
]


def _sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(6 << 30)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


HOSTILE: dict[str, Callable[[Path], object]] = {
    "lists in lists": lambda path: path.write_text("[" * 200_000),
    "objects in objects": lambda path: path.write_text('{"spec":' * 200_000),
    "a named pipe": os.mkfifo,
    "6 GB of zeros": _sparse,
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
    "a socket": _socket,
    "a link to nothing": lambda path: path.symlink_to("missing"),
    "no text": lambda path: path.write_bytes(bytes(range(256)) * 8),
    "nothing": Path.touch,
}
PROMISED = ("lists in lists", "a named pipe", "an endless device")
"""Those of `make test`."""
VALUES = (
    None,
    True,
    -1,
    1e308,
    math.nan,
    math.inf,
    10**400,
    "x" * 5000,
    "\ud800",
    "\x1b[2J",
    [[]],
    {"a": [1]},
    [1, "a"],
)


def full_run(folder: Path) -> Path:
    run_dir = make_run(folder, job="13", epochs=1, restarts=True)
    (run_dir / "job.log").write_text("Restart 1 of job 12.\n")
    (run_dir / "task-0.log").write_text("loss 3\n")
    (run_dir / "stack-rank0.txt").write_text(json.dumps(ANSWER) + "\n")
    write_lines(run_dir / "job.jsonl", [*HAD, FAILED, FAILED])
    return run_dir


def every_verb(runs_dir: Path) -> None:
    """Call each verb that reads run directories. One that ends with an error of ours has said what is wrong."""
    records = find_runs.in_folder(runs_dir)
    words = [str(record.run_dir) for record in records if not record.problem]
    calls: list[tuple[Callable[[list[str]], int], list[str]]] = [
        *((status.main, ["--runs-dir", str(runs_dir), *form]) for form in ([], ["--json"])),
        *((report.main, [*words, *form]) for form in ([], ["--json"], ["--html", f"{runs_dir}/page.html"])),
    ]
    for record in records:
        word = str(record.run_dir)
        calls += [(logs.main, [word]), (logs.main, [word, "--rank", "0"]), (doctor.main, ["--autopsy", word])]
        calls += [(report.main, [word, "--metric", r"loss (\d)"])] if record.problem else []
    for main, argv in calls:
        try:
            main(argv)
        except SystemExit as ended:
            assert ended.code in (0, 2), argv
    for record in records:
        if record.is_submitted and not record.problem:
            of_run(record).logs()


def mutations(value: Any) -> Iterator[Any]:
    """The same JSON with each of its parts replaced by each of VALUES."""
    yield from VALUES
    if isinstance(value, dict):
        for key in value:
            yield from ({**value, key: changed} for changed in mutations(value[key]))
            yield {name: one for name, one in value.items() if name != key}
    elif isinstance(value, list):
        for at, one in enumerate(value):
            yield from ([*value[:at], changed, *value[at + 1 :]] for changed in mutations(one))


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    signal.alarm(int(scaled(LIMIT_S)))  # ends a read that waits


@pytest.mark.fault(
    "named pipes, devices, huge or deeply nested files in a run directory",
    "one row of `status` says why; no command hangs or needs much memory",
)
@pytest.mark.parametrize(
    "content", [pytest.param(one, marks=[] if one in PROMISED else pytest.mark.full) for one in HOSTILE]
)
def test_no_verb_fails_waits_or_needs_much_memory(fake_slurm: FakeSlurm, tmp_path: Path, content: str) -> None:
    """One file after the other, with a gigabyte of memory; the row of a good run is still there."""
    fake_slurm.command("squeue", "true")
    code = "import sys; from test_foreign_runs import main; main(sys.argv[1], sys.argv[2])"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", code, str(tmp_path / "runs"), content]
    done = subprocess.run(words, env=env, cwd=tmp_path, preexec_fn=limited, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split()[:2] for line in done.stdout.splitlines()]
    assert rows.count(["12", "good"]) == len(FILES)


def main(runs_dir: str, content: str) -> None:
    for name in FILES:
        folder = Path(runs_dir) / name
        bad, _ = full_run(folder / "bad"), make_run(folder / "good", name="good", epochs=1)
        (bad / name).unlink(missing_ok=True)
        HOSTILE[content](bad / name)
        every_verb(folder)


@pytest.fixture
def runs(fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    fake_slurm.command("squeue", "true")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


@pytest.mark.parametrize("name", ["spec.json", "run.json", "stack-rank0.txt", ".lock"])
def test_no_verb_fails_of_objects_that_are_others(runs: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    good: dict[str, Any] = {"stack-rank0.txt": ANSWER}
    good |= {".lock": {"job": "12", "process": 7}, "run.json": {"topology": {"job_id": 12}, "versions": {"a": "1"}}}
    good["spec.json"] = json.loads((make_run(runs.parent / "first", epochs=1) / "spec.json").read_text())
    for number, value in enumerate(mutations(good[name])):
        (runs / f"run-{number}").mkdir(parents=True)
        others = {"spec.json": good["spec.json"]} if name not in ("run.json", ".lock") else {}
        for file, content in {**others, name: value}.items():
            (runs / f"run-{number}" / file).write_text(json.dumps(content))
    every_verb(runs)
    assert report.main([str(runs)]) == 0
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["metrics.jsonl", "starts.jsonl", "usage-0.jsonl", "job.jsonl"])
def test_no_verb_fails_of_records_that_are_others(runs: Path, name: str) -> None:
    """Each kind of record, with each of its fields replaced by each of VALUES, between two good ones."""
    for whole in (False, True):
        run_dir = full_run(runs / f"run-{whole}")
        lines = (run_dir / name).read_text().splitlines()
        kinds = {one.get("kind", one.get("event")): one for one in map(json.loads, lines)}
        changed = [json.dumps(value) for kind in kinds.values() for value in mutations(kind)]
        (run_dir / name).write_text("\n".join([*(lines if whole else ()), *changed, lines[-1]]) + "\n")
    every_verb(runs)
