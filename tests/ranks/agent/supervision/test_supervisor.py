"""agent.supervision.supervisor: several commands under one, in a process of its own, whose signals it holds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from slowness import LIMIT_S, scaled, stays, wait_until
from tasks import PLACE

from cluster_ddp import processes
from cluster_ddp.agent.supervision.supervisor import status_of
from cluster_ddp.slurm.variables import node_name

CODE = """import json, os, sys
from pathlib import Path
from cluster_ddp.agent.rank_notes import Notes
from cluster_ddp.agent.supervision import supervisor as module
from cluster_ddp.agent.supervision.supervisor import Supervisor
from cluster_ddp import processes
options = json.loads(sys.argv[1])
module._UNTIL_TERM_S[75] = options.pop("patience_s", 1.0)
if "kills" in options:
    counts = iter(options.pop("kills"))
    processes.oom_kills = lambda: next(counts)
commands = options.pop("commands")
logs = options.pop("logs", None)
ends = []
supervisor = Supervisor(Notes(Path(os.environ["NOTES"])), ends.append, patience_s=1.0)
pids = []
for rank, command in enumerate(commands):
    log = Path(logs, f"{rank}.log") if logs else None
    pids.append(supervisor.start(rank, ["bash", "-c", command], dict(os.environ), log=log))
print("started", *pids, flush=True)
until = options.pop("until", None)
tick_s = options.pop("tick_s", 0.05)
status = supervisor.wait(lambda: tick_s, until=lambda: until is not None and Path(until).exists())
if supervisor.is_running:
    supervisor.kill()
print(json.dumps([status, supervisor.has_killed, [end[:1] + end[2:] for end in ends]]))
"""
HOST = node_name(os.environ)
LISTENS = "trap 'exit 75' USR1; touch ready$$; while :; do sleep 0.05; done"
DEAF = "trap '' TERM; touch ready$$; while :; do sleep 0.05; done"


class Kept:
    def __init__(self, folder: Path, *commands: str, **options: object) -> None:
        self.folder = folder
        words = [sys.executable, "-c", CODE, json.dumps({"commands": commands, **options})]
        env = {**{name: value for name, value in PLACE.items() if name != "SLURM_PROCID"}, "NOTES": str(folder)}
        with (folder / "stderr").open("w") as err:
            self.process = subprocess.Popen(
                words, cwd=folder, env=env, start_new_session=True, stdout=subprocess.PIPE, stderr=err, text=True
            )
        assert self.process.stdout is not None
        self.pids = [int(word) for word in self.process.stdout.readline().split()[1:]]

    def wait_until_ready(self, count: int) -> None:
        wait_until(lambda: len(list(self.folder.glob("ready*"))) >= count)

    def end(self) -> tuple[int, bool, list[list[object]], str]:
        try:
            assert self.process.stdout is not None
            self.process.wait(timeout=scaled(LIMIT_S))
            return (*json.loads(self.process.stdout.read()), (self.folder / "stderr").read_text())
        finally:
            for pid in self.pids:
                if Path(f"/proc/{pid}/cwd").exists():
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("statuses", "status"),
    [([], 0), ([1, 143], 1), ([143, 75], 75), ([75, 143, 1], 75), ([1, 75], 1), ([143, 137], 137), ([143, 143], 143)],
)
def test_which_status_counts(statuses: list[int], status: int) -> None:
    assert status_of(statuses) == status


def test_who_will_not_end_is_killed(tmp_path: Path) -> None:
    kept = Kept(tmp_path, DEAF, "while ! ls ready* >/dev/null; do sleep 0.02; done; exit 5")
    status, has_killed, ends, err = kept.end()
    assert (status, has_killed, ends[1][:2]) == (5, True, [0, 137])
    assert "rank 0 did not end within 1 s of TERM: killing." in err


def test_all_are_killed_at_once_when_nobody_waits_any_longer(tmp_path: Path) -> None:
    """Also one that ignores TERM, and one that is suspended. The supervisor reports each end."""
    told = tmp_path / "it's told"
    kept = Kept(tmp_path, DEAF, "touch ready$$; kill -STOP $$", until=str(told))
    kept.wait_until_ready(2)
    told.touch()
    _, _, ends, err = kept.end()
    assert (sorted(end[:2] for end in ends), err) == ([[0, 137], [1, 137]], "")


def test_who_has_stopped_in_time_gives_the_others_time_to_save(tmp_path: Path) -> None:
    status, has_killed, ends, _ = Kept(tmp_path, "exit 75", "sleep 0.5; exit 75", patience_s=30).end()
    assert (status, has_killed, [end[:2] for end in ends]) == (75, False, [[0, 75], [1, 75]])
    status, has_killed, ends, _ = Kept(tmp_path, "exit 75", "sleep 600").end()
    assert (status, has_killed, ends[1][:2]) == (75, False, [1, 143])


def test_a_suspension_is_no_signal(tmp_path: Path) -> None:
    """As by scontrol suspend: all stop, and are continued after the supervisor wanted to look again."""
    kept = Kept(tmp_path, "touch ready$$; until [ -e go ]; do sleep 0.02; done", tick_s=0.5)
    kept.wait_until_ready(1)
    for _ in range(3):
        os.killpg(kept.process.pid, signal.SIGSTOP)
        wait_until(lambda: processes.is_stopped(kept.process.pid))
        stays(lambda: processes.is_stopped(kept.process.pid), 0.7)  # longer than its tick
        os.killpg(kept.process.pid, signal.SIGCONT)
    (tmp_path / "go").touch()
    status, has_killed, ends, err = kept.end()
    assert (status, has_killed, [end[:2] for end in ends], err) == (0, False, [[0, 0]], "")


@pytest.mark.quick
def test_a_warning_reaches_all_and_waits_for_each(tmp_path: Path) -> None:
    kept = Kept(tmp_path, LISTENS, f"while ! [ -e go ]; do sleep 0.02; done; {LISTENS}", patience_s=30)
    kept.wait_until_ready(1)
    kept.process.send_signal(signal.SIGUSR1)
    stays(lambda: kept.process.poll() is None, 0.4)
    (tmp_path / "go").touch()
    status, _, ends, _ = kept.end()
    assert (status, sorted(end[:2] for end in ends)) == (75, [[0, 75], [1, 75]])


@pytest.mark.parametrize(
    ("kills", "command", "is_oom"),
    [
        ((1, 1), "kill -KILL $$", False),
        ((1, 2), "kill -KILL $$", True),
        ((1, 2), "exit 1", True),
        ((1, 2), "exit 75", False),
    ],
)
def test_a_kill_for_memory_is_said_of_who_did_not_end_by_itself(
    tmp_path: Path, kills: tuple[int, ...], command: str, is_oom: bool
) -> None:
    _, _, ends, err = Kept(tmp_path, command, kills=[*kills, kills[-1]]).end()
    said = f"The kernel has killed a process of rank 0 on {HOST} for memory (oom_kill)."
    assert ends[0][4] is is_oom and (said in err) is is_oom


def test_a_command_killed_by_others_end_is_not_said_to_lack_memory(tmp_path: Path) -> None:
    kills = [1, 2, 2]
    _, _, ends, _ = Kept(tmp_path, "sleep 600", "sleep 0.2; kill -KILL $$", kills=kills).end()
    assert [(end[0], end[4]) for end in ends] == [(1, True), (0, False)]


def test_logs_are_appended_to_and_read_nothing(tmp_path: Path) -> None:
    (logs := tmp_path / "it's here").mkdir()
    (logs / "0.log").write_text("before\n")
    status, *_ = Kept(tmp_path, "cat; echo out; echo err >&2", logs=str(logs)).end()
    assert (status, (logs / "0.log").read_text()) == (0, "before\nout\nerr\n")


def test_a_log_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").touch()
    (tmp_path / "0.log").symlink_to(tmp_path / "elsewhere")
    words = [sys.executable, "-c", CODE, json.dumps({"commands": ["echo x"], "logs": str(tmp_path)})]
    done = subprocess.run(words, env={**PLACE, "NOTES": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 1 and "symbolic link" in done.stderr and not (tmp_path / "elsewhere").read_text()


def test_many_commands_that_end_at_once_are_all_seen(tmp_path: Path) -> None:
    status, _, ends, _ = Kept(tmp_path, *["true"] * 64).end()
    assert (status, len(ends)) == (0, 64)
