"""The step protocol with real processes on this machine: one verdict, from one rank, that blames no sound rank."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ranks import job_ids, slurm_step
from slowness import LIMIT_S, scaled

from cluster_ddp.agent.channel import Client, Key
from cluster_ddp.agent.rank_notes import FailureNote, Notes
from cluster_ddp.doctor.step import connecting
from cluster_ddp.doctor.step.report_channel import ReportClient, ReportServer
from cluster_ddp.doctor.step.report_folder import ReportFolder
from cluster_ddp.slurm.topology import Topology

pytestmark = pytest.mark.full

_JOB_ID = itertools.count(job_ids())
MAIN = "import sys; from cluster_ddp.doctor.__main__ import main; sys.exit(main(sys.argv[1:]))"
HANG = "import time\nfrom cluster_ddp.doctor.step import rank\n"
HANG += "from cluster_ddp.doctor.checks import all_checks\nfrom cluster_ddp.doctor.checks.check_types import Check\n"
HANG += "def hang(site):\n    time.sleep(3600)\n    yield\n"
HANG += "made = Check(name='hangs', on='rank', detects='', function=hang)\n"
HANG += "all_checks.GROUPS['files'] = (made, *all_checks.GROUPS['files'])\nrank.fingerprint = hang\n"
NO_TORCH = "from cluster_ddp.doctor.step import collective_tests as tests\ntests.import_torch = lambda: (0.1, None)\n"
SOUND = NO_TORCH + "def measure(*_):\n    yield dict(step_s=0.1)\ntests.measure = measure\n"
ABORTED = NO_TORCH + "import os\ndef measure(*_):\n    yield 'all_reduce'\n    os.abort()\ntests.measure = measure\n"
ENDS = NO_TORCH + "import os\ntests.import_torch = lambda: os._exit(7)\n"


@dataclass(frozen=True)
class Said:
    """What all ranks of a step have said together."""

    verdict: dict[str, Any]
    statuses: list[int]
    output: str

    @property
    def first(self) -> dict[str, Any]:
        return dict(self.verdict["findings"][0])


def doctor(folder: Path, *lines: str, arguments: tuple[str, ...] = ("--quick",), **env: str) -> Said:
    """The doctor as a step of one node: lines of Python for each rank, before it begins."""
    job_id = next(_JOB_ID)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", f"{text}{MAIN}", "--json", *arguments],
            env={**os.environ, **slurm_step(rank, len(lines), job_id=job_id, **env)},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, text in enumerate(lines)
    ]
    output = [process.communicate(timeout=scaled(LIMIT_S))[0] for process in processes]
    text, statuses = "".join(output), [process.returncode for process in processes]
    verdicts = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert len(verdicts) == 1, f"{len(verdicts)} verdicts, statuses {statuses}\n{text}"
    return Said(verdicts[0], statuses, text)


@pytest.mark.parametrize("sick", [0, 1])
def test_a_rank_whose_checks_hang_is_found_and_stalls_nobody(sick: int, tmp_path: Path) -> None:
    """Also what is only compared hangs there, and the others wait no longer for ranks than the checks may take."""
    lines = [HANG if rank == sick else "" for rank in range(2)]
    limit_s = scaled(2)
    arguments = ("--quick", "--wait-s", f"{scaled(2):g}", "--check-limit-s", f"{limit_s:g}")
    said = doctor(tmp_path, *lines, arguments=arguments)
    assert (said.first["check"], said.first["ranks"]) == ("did_not_return", [sick]), said.output
    assert "hangs" in said.first["what"], said.output
    assert {one["check"] for one in said.verdict["findings"]} == {"did_not_return"}, said.output
    assert said.statuses == [2, 2], said


@pytest.mark.quick
def test_rank_0_may_start_late(tmp_path: Path) -> None:
    said = doctor(tmp_path, "import time; time.sleep(6)\n", "", arguments=("--quick", "--wait-s", f"{scaled(20):g}"))
    assert said.verdict["sound"] and not said.verdict["findings"] and said.statuses == [0, 0], said.output


def test_rank_0_never_starts(tmp_path: Path) -> None:
    """A rank that is slow to check is here nevertheless, and does not speak a second time."""
    wait_s = scaled(1)
    lines = ("import os; os._exit(0)\n", "", HANG)
    limit = ("--check-limit-s", f"{wait_s + 5:g}")
    said = doctor(tmp_path, *lines, arguments=("--quick", "--wait-s", f"{wait_s:g}", *limit))
    assert said.first["what"] == f"1 of 3 ranks did not report within {wait_s:g} s: rank 0 (localhost).", said.output
    assert said.statuses == [0, 2, 2]


def test_rank_0_ends_in_a_later_tier(tmp_path: Path) -> None:
    said = doctor(tmp_path, ENDS, SOUND, SOUND, arguments=())
    (only,) = said.verdict["findings"]
    assert only["what"] == "Ranks ended or hung in the tier 'import'.", said.output
    assert only["evidence"] == "rank 0 (localhost): no answer." and said.statuses == [7, 2, 2], said.output
    assert said.verdict["exclude"] == ["localhost"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("has_unread", [False, True])
def test_an_end_of_rank_0_shows_that_its_host_can_be_reached(has_unread: bool) -> None:
    """A process that ends with unread data resets its connections instead of closing them."""
    topology = Topology.from_environ(slurm_step(1, 2, job_id=next(_JOB_ID)))
    client = ReportClient(topology, Key(b""), ReportFolder(None), 1.0)
    client._client = Client(None, Key(b""))
    client._client._connection, of_rank_0 = socket.socketpair(socket.AF_UNIX)
    if has_unread:
        client._client._connection.sendall(b"a report")
    of_rank_0.close()
    assert client.told(scaled(5)) is None and client.was_closed


@pytest.mark.parametrize("sick", [0, 1])
def test_a_rank_that_is_aborted_in_a_collective(sick: int, tmp_path: Path) -> None:
    """As NCCL's watchdog does: only a child of the rank ends, and the rank says in what."""
    lines = [ABORTED if rank == sick else SOUND for rank in range(2)]
    said = doctor(tmp_path, *lines, arguments=(), CLUSTER_DDP_NOTES=str(tmp_path))
    assert (said.first["check"], said.first["ranks"]) == ("all_reduce", [sick]), said.output
    assert "SIGABRT" in said.first["evidence"] and said.statuses == [2, 2], said.output
    first, other = (Notes(tmp_path).failure(rank) for rank in range(2))
    assert first == FailureNote(f"{said.first['what']} {said.first['evidence']}")  # the job's log ends with it
    assert other is not None and other.kind == "peer"


def test_what_an_earlier_start_of_the_job_left_is_not_this_ones(tmp_path: Path) -> None:
    """A requeued job has the same job and step ID."""
    job_id = next(_JOB_ID)
    folder = tmp_path / f".doctor-{job_id}.0"
    folder.mkdir()
    (folder / "leads").touch()
    said = doctor(tmp_path, "", "", SLURM_RESTART_COUNT="1", SLURM_JOB_ID=str(job_id))
    assert said.verdict["sound"] and said.statuses == [0, 0], said.output
    assert folder.exists()


def test_the_verdict_comes_before_a_file_that_can_not_be_written(tmp_path: Path) -> None:
    lines = ["import os; os.environ['GLOO_SOCKET_IFNAME'] = 'ib0'\n"] * 2
    said = doctor(tmp_path, *lines, arguments=("--quick", "--exclude-file", "missing/sick"))
    assert said.first["check"] == "gloo_interface" and said.statuses == [2, 2], said.output
    assert "Hint:" in said.output.replace(json.dumps(said.verdict), ""), said.output


def test_a_refusal_after_a_lost_answer_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a firewall that drops packets: nothing listens yet."""
    answers = itertools.chain([TimeoutError()], itertools.repeat(ConnectionRefusedError()))

    def no_connection(*_: object, **__: object) -> None:
        raise next(answers)

    monkeypatch.setattr(socket, "create_connection", no_connection)
    with pytest.raises(ConnectionRefusedError):
        connecting.several_tries(lambda: socket.create_connection(("n1", 14000), 1.0))


def both_sides(folder: Path) -> tuple[ReportServer, ReportClient]:
    """Rank 0's side, and that of rank 1, which reports."""
    job_id = next(_JOB_ID)
    of_rank_0, of_rank_1 = (Topology.from_environ(slurm_step(rank, 2, job_id=job_id)) for rank in range(2))
    server = ReportServer(of_rank_0, Key(b""), ReportFolder(folder))
    client = ReportClient(of_rank_1, Key(b""), ReportFolder(folder), 10.0)
    client.start({"kind": "nodes", "rank": 1, "id": "x"})
    return server, client


def test_a_lost_greeting_is_no_silent_listener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict would be that rank 0's port does not answer, where the network loses packets."""
    lost, real = iter([True]), Client

    def client(*arguments: Any) -> Client:
        if next(lost, False):
            raise TimeoutError
        return real(*arguments)

    monkeypatch.setattr("cluster_ddp.doctor.step.connecting.Client", client)
    server, of_rank_1 = both_sides(tmp_path)
    assert server.gather("nodes", 1, scaled(10.0)) and server.settle("nodes", 1.0, scaled(5.0))[1]["by"] == "tcp"
    assert of_rank_1.failures == {}
    of_rank_1.close()
    server.close()


def test_a_connection_that_rank_0_closed_unheard_is_no_end_of_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 does so if it can open no more files: the others would say that its node gives no answer."""
    first, real = iter([True]), Client

    def client(*arguments: Any) -> Client:
        made = real(*arguments)
        if next(first, False):
            made.close()
            made._connection, of_rank_0 = socket.socketpair()
            of_rank_0.close()
        return made

    monkeypatch.setattr("cluster_ddp.doctor.step.connecting.Client", client)
    server, of_rank_1 = both_sides(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(of_rank_1.told, scaled(10.0))
        assert server.gather("nodes", 1, scaled(5.0)) and server.settle("nodes", 1.0, scaled(5.0))[1]["by"] == "tcp"
        server.tell("network")
        assert told.result() == {"kind": "network"}
    of_rank_1.close()
    server.close()
