"""When rank 0 may judge the ranks that have not connected to it, and when it may end."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest
from slowness import LIMIT_S, scaled, stays

from cluster_ddp.agent.channel import Key
from cluster_ddp.doctor.step import report_channel
from cluster_ddp.doctor.step.report_channel import ReportServer
from cluster_ddp.doctor.step.report_folder import ReportFolder
from cluster_ddp.slurm.topology import Topology


@pytest.mark.parametrize("checks_s", [0.0, 100.0])
def test_a_refusal_from_before_rank_0_listened_is_not_the_last_word(checks_s: float, tmp_path: Path) -> None:
    """A rank whose next try takes long, where packets get lost, would be said to be refused by a firewall.

    However long the checks of tier 1 took, it has that time.
    """
    report = {"kind": "nodes", "rank": 1, "id": "x", "failures": {"14000": "refused"}, "tries": 3}
    (tmp_path / "report-1-x.json").write_text(json.dumps(report))
    with socket.create_server(("", 0)) as listener:  # not one that another test process may have
        free_port = {"MASTER_PORT": str(listener.getsockname()[1])}
    alone = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", **free_port}
    topology = Topology.from_environ(alone)
    server = ReportServer(topology, Key(b""), ReportFolder(tmp_path))
    server._begun -= checks_s
    assert server.gather("nodes", 1, 10.0)
    arrives = threading.Timer(0.3, server.put, [{**report, "by": "tcp"}])
    arrives.start()
    assert server.port_error is None
    assert server.settle("nodes", 2.0, scaled(LIMIT_S))[1]["by"] == "tcp"
    arrives.join()
    (tmp_path / "report-1-x.json").unlink()
    server._gone(report)
    server.close()


def test_rank_0_ends_only_when_the_others_have_heard_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """srun may end them with TERM then, before they handle that: the step's status would be 143."""
    monkeypatch.setattr(report_channel, "_READ_S", scaled(LIMIT_S))
    server, message = ReportServer(None, Key(b""), ReportFolder(tmp_path)), {"kind": "nodes", "rank": 1, "id": "x"}
    server._hear(message)
    ends = threading.Thread(target=server.close)
    ends.start()
    stays(ends.is_alive)
    server._gone(message)
    ends.join(scaled(LIMIT_S))
    assert not ends.is_alive()
