"""What rank 0 makes of the answers of a tier; tests/slurm/doctor has real ones."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from cluster_ddp.doctor.step.leader_follower import Leader
from cluster_ddp.doctor.step.links import NetworkLink


class Server:
    """Has the answers of all ranks but the last one."""

    closed = frozenset[int]()

    def __init__(self, answers: dict[int, Any]) -> None:
        self._answers = answers

    def tell(self, tier: str, **fields: object) -> None:
        """Nobody hears it."""

    def put(self, message: object) -> None:
        """Rank 0's is there already."""

    def gather(self, tier: str, ranks: int, timeout_s: float) -> dict[int, Any]:
        return self._answers


@pytest.mark.parametrize(
    ("lost", "checks", "sick"), [(0.4, ["packet_loss", "missing_ranks"], ()), (0.0, ["missing_ranks"], ("node2",))]
)
def test_a_rank_whose_answer_is_lost_is_not_at_fault(lost: float, checks: list[str], sick: tuple[str, ...]) -> None:
    """Where the network loses packets, that is the first finding, and no node is left out because of it."""
    leader: Any = Leader.__new__(Leader)
    answers = {rank: {"links": [], "sees": None} for rank in range(3)}
    answers[0]["links"] = [asdict(NetworkLink(source="node1", target="node2", lost=lost))]
    leader._server = Server(answers)
    leader._reports = {rank: {"host": f"node{1 + rank // 2}"} for rank in range(4)}
    leader.options, leader.env = SimpleNamespace(run_dir=None), {}
    leader.identity = SimpleNamespace(world_size=4)
    leader.answer = lambda told: answers[0]
    found, _ = leader._network()
    assert [one.check for one in found] == checks
    assert found[-1].sick_nodes == sick
