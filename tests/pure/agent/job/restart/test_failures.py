"""agent.job.restart.failures: what is known of earlier failures, and what is not, never raises."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from cluster_ddp.agent.job.restart.failures import History
from cluster_ddp.run import journal
from cluster_ddp.run.names import File
from cluster_ddp.run.outcome import Outcome
from cluster_ddp.run.start import Failed

WORDS = "ValueError: it's x"
ONE = Failed(1764000000.0, 0, "node2", 1, WORDS, "program", 7, "step-7.pt", True, 12.0, "restart", ("node9",))
TWO = Failed(1764000100.0, 1, "", None, "", then="requeue")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (folder := tmp_path / "it's a run").mkdir()
    return folder


def ended(failed: Failed, job: str = "12") -> tuple[Outcome, Failed]:
    """As the job's agent notes a start that has failed so."""
    return Outcome(job, failed.start, "FAILED", 1, then=failed.then, time=failed.time), failed


def again(run_dir: Path) -> list[Failed]:
    """The failures as the next start of the job finds them."""
    return History(run_dir, "12", is_first=False).failures


def begun(run_dir: Path, job: str = "12", **options: Any) -> History:
    """That of a job's first start."""
    history = History(run_dir, job, is_first=True, **options)
    history.begin(0)
    return history


@pytest.mark.parametrize(("shared", "mode"), [(False, 0o600), (True, 0o640)])
def test_failures_are_found_again_by_those_who_may_read_them(run_dir: Path, shared: bool, mode: int) -> None:
    history = begun(run_dir, shared=shared)
    assert history.end(*ended(ONE)) and history.end(*ended(TWO))
    assert history.failures == again(run_dir) == [ONE, TWO]
    assert History(run_dir, "12", is_first=False).restarts == 1
    assert stat.S_IMODE((run_dir / File.JOURNAL).stat().st_mode) == mode


def test_a_new_job_forgets_those_of_an_earlier_one(run_dir: Path) -> None:
    """Also one that the same batch script launches: the journal has all."""
    begun(run_dir, "11").end(*ended(ONE, "11"))
    (run_dir / File.SICK_NODES).write_text("node3 its disk\n")
    assert again(run_dir) == []
    for _ in range(2):
        history = begun(run_dir)
        assert history.failures == [] == again(run_dir)
        assert history.end(*ended(TWO)) and again(run_dir) == [TWO]
    assert not (run_dir / File.SICK_NODES).exists()
    assert [one["job"] for one in journal.events(run_dir)] == ["11"] * 2 + ["12"] * 4


def test_the_largest_batch_that_may_fit_is_known_to_all_later_jobs_of_the_run(run_dir: Path) -> None:
    history = begun(run_dir, "11")
    assert history.micro_batch is None
    for start, most in enumerate((None, 8, 4, None)):
        history.end(*ended(TWO._replace(start=start, micro_batch=most), "11"))
    assert (history.micro_batch, begun(run_dir).micro_batch) == (4, 4)
    without_folder = History(None, "12", is_first=True)
    without_folder.end(*ended(TWO._replace(micro_batch=16)))
    assert without_folder.micro_batch == 16


def test_what_a_job_had_is_noted_over_all_jobs_of_a_run(run_dir: Path) -> None:
    first, second = (History(run_dir, "12", is_first=True) for _ in range(2))
    own = first.begin(0, nodes=2, since=5.0)
    (run_dir / File.PROGRESS).write_text("step-1.pt")
    os.utime(run_dir / File.PROGRESS, (7.5, 7.5))
    with pytest.raises(KeyError), contextlib.closing(second):
        raise KeyError  # before it started any ranks: the first one may have been killed long ago
    assert len((run_dir / File.JOURNAL).read_text().splitlines()) == 1
    with pytest.raises(KeyError), contextlib.closing(first):
        raise KeyError
    noted = [json.loads(line) for line in (run_dir / File.JOURNAL).read_text().splitlines()]
    at_s = noted[0]["time"]
    known = {"event": "start", "time": at_s, "job": "12", "start": 0, "nodes": 2, "since": 5.0}
    assert noted[0] == {**known, "id": int(own)}
    assert noted[1] == {"event": "over", "time": noted[1]["time"], "job": "12", "saved": 7.5} and noted[1]["time"] > 1e9
    assert (History(None, "12", is_first=True).saved_s, second.saved_s) == (None, 7.5)
    History(None, "12", is_first=True).close()


@pytest.mark.parametrize(
    "damaged",
    [
        *(b'{"time": 1.0, "sta', b"\xff\xfe", b"", b"null", b"5", b"[]", b'["time"]', b'"time"', b"{}", b"[" * 100_000),
    ],
    ids=lambda damaged: str(damaged[:20]),
)
def test_a_damaged_line_costs_itself_only(run_dir: Path, damaged: bytes) -> None:
    history = begun(run_dir)
    history.end(*ended(ONE))
    with open(run_dir / File.JOURNAL, "ab") as file:
        file.write(damaged + b"\n")
    history.end(*ended(TWO))
    assert again(run_dir) == [ONE, TWO]
    assert journal.last_end(run_dir, "12") == ended(TWO)[0]


def test_a_value_of_a_wrong_kind_is_left_out(run_dir: Path) -> None:
    begun(run_dir)
    values = {name: {"a": []} for name in Failed._fields}
    wrong = {"event": "end", "job": "12", "time": 1.0, "start": 0, "state": "FAILED", "status": 1, "then": []}
    wrong["failed"] = values
    with open(run_dir / File.JOURNAL, "a") as file:
        file.write(json.dumps(wrong))
    assert again(run_dir) == [Failed(1.0, 0, "", None, "", checkpoint="")]


@pytest.mark.parametrize("name", [File.JOURNAL, File.PROGRESS, File.SICK_NODES])
@pytest.mark.parametrize("kind", ["link", "folder", "pipe", "closed"])
def test_no_file_is_followed_or_waited_for(run_dir: Path, tmp_path: Path, name: str, kind: str) -> None:
    line = json.dumps(ONE._asdict())
    (others := tmp_path / "another's file").write_text(f"{line}\n")
    path = run_dir / name
    {
        "link": lambda: path.symlink_to(others),
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "closed": lambda: path.touch(0),
    }[kind]()
    history = History(run_dir, "12", is_first=False)
    assert (history.failures, history.new_sick_nodes()) == ([], {})
    assert history.newest_checkpoint(time.time())[0] == "none"
    is_noted = history.end(*ended(TWO))
    assert history.failures == [TWO] and others.read_text() == f"{line}\n"
    if kind != "closed":  # root may write that one
        assert is_noted is (name != File.JOURNAL)


def test_a_full_disk_costs_nothing_but_the_note(run_dir: Path) -> None:
    """Python ignores SIGXFSZ, so the kernel's limit is an error of the write, as ENOSPC is."""
    history, limits = begun(run_dir), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        is_noted = history.end(*ended(ONE))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (is_noted, history.failures, again(run_dir)) == (False, [ONE], [])


def test_without_a_run_directory_only_this_process_knows() -> None:
    history = History(None, "12", is_first=True)
    assert (history.end(*ended(ONE)), history.failures, history.restarts) == (False, [ONE], 1)
    assert history.newest_checkpoint(time.time() - 9) == ("", None) and history.new_sick_nodes() == {}


@pytest.mark.parametrize(("saved_s", "lost_s"), [(None, 100), (300, 100), (40, 40)])
def test_what_is_lost_is_the_time_since_the_newest_checkpoint(
    run_dir: Path, saved_s: int | None, lost_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or since the start, if none was saved in it."""
    path, now = run_dir / File.PROGRESS, int(time.time())
    monkeypatch.setattr(time, "time", lambda: now)
    if saved_s is not None:
        path.write_text("step-00000100.pt\n")
        os.utime(path, (now - saved_s, now - saved_s))
    name, seconds = History(run_dir, "12", is_first=True).newest_checkpoint(now - 100)
    assert name == ("none" if saved_s is None else "step-00000100.pt")
    assert seconds == lost_s


def test_a_node_at_fault_is_new_once(run_dir: Path) -> None:
    """Those of earlier starts are not."""
    (path := run_dir / File.SICK_NODES).write_text("node1 its link\n")
    history = History(run_dir, "12", is_first=False)
    with path.open("a") as file:
        file.write("node3 its disk\n\nnode4\nnode3 it's its GPU\n")
    assert history.new_sick_nodes() == {"node3": "it's its GPU", "node4": ""}
    assert history.new_sick_nodes() == {}
