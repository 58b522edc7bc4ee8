"""What a check has found: one problem, its evidence by rank and node, and what mends it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from cluster_ddp.errors import ClusterDDPError

_SHOWN_AT_MOST = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A problem, as one rank or rank 0 sees it."""

    check: str
    """Name of the check."""
    what: str
    """The problem in one sentence. Equal on all ranks that have the same problem."""
    evidence: str
    """What was read or measured."""
    hint: str
    """The option, variable or command that mends it."""
    is_warning: bool = False
    """Whether training works with it, only slowly or not for long."""
    sick_nodes: tuple[str, ...] = ()
    """Nodes at fault, if it is they and not the user's settings."""
    ranks: tuple[int, ...] = ()
    """The ranks that have the problem; empty if it is not a matter of ranks."""
    host: str = ""
    """The host of those ranks, or the node that has the problem."""

    def seen_by(self, rank: int, host: str) -> Finding:
        """Return the same finding, with the rank that has it."""
        return replace(self, ranks=(rank,), host=host)

    def seen_on(self, host: str) -> Finding:
        """Return the same finding, with the node that has it."""
        return replace(self, host=host)

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> Finding:
        """Return the finding of a JSON object."""
        lists = {name: tuple(value.get(name, ())) for name in ("ranks", "sick_nodes")}
        return Finding(**{**value, **lists})

    @staticmethod
    def of_error(check: str, error: ClusterDDPError) -> Finding:
        """Return an error of this package as a finding: first what failed."""
        return Finding(check=check, what=error.asked.rstrip(":") + " failed.", evidence=error.found, hint=error.hint)

    @staticmethod
    def of_cause(check: str, error: ClusterDDPError) -> Finding:
        """Return an error of this package as a finding: first its cause, the first sentence of what was found."""
        cause, _, rest = error.found.partition(". ")
        what = cause[0].upper() + cause[1:].rstrip(".") + "."
        return Finding(check=check, what=what, evidence=rest or error.asked.rstrip(":") + " failed.", hint=error.hint)

    def __str__(self) -> str:
        """Return it as three lines."""
        return f"{self.what}\n  {self.evidence}\n  Hint: {self.hint}"


def folded(findings: Iterable[Finding]) -> list[Finding]:
    """Make one finding of those that several ranks have. Errors come first, else the order stays.

    Those of contradicting variables have the rank's values in their first sentence: one hint makes them one.
    """
    same: dict[tuple[str, str, bool], list[Finding]] = {}
    for one in findings:
        problem = one.hint if one.check == "topology" else one.what
        same.setdefault((one.check, problem, one.is_warning), []).append(one)
    return sorted(map(_folded, same.values()), key=lambda one: one.is_warning)


def _folded(same: Sequence[Finding]) -> Finding:
    by_evidence: dict[str, list[Finding]] = {}
    for one in same:
        by_evidence.setdefault(one.evidence, []).append(one)
    parts = [f"{_who(those)}{evidence}" for evidence, those in by_evidence.items()]
    more = f"; and {len(parts) - _SHOWN_AT_MOST} more" if len(parts) > _SHOWN_AT_MOST else ""
    return replace(
        same[0],
        evidence="; ".join(part.rstrip(".") for part in parts[:_SHOWN_AT_MOST]) + more + ".",
        ranks=tuple(sorted({rank for one in same for rank in one.ranks})),
        sick_nodes=tuple(dict.fromkeys(node for one in same for node in one.sick_nodes)),
        host="",
    )


def _who(those: Sequence[Finding]) -> str:
    """The ranks and hosts of findings, such as "ranks 0-3 (node1, node2): " or "node1, node2: "; empty without."""
    ranks = sorted({rank for one in those for rank in one.ranks})
    hosts = list(dict.fromkeys(one.host for one in those if one.host))
    shown = ", ".join(hosts[:_SHOWN_AT_MOST]) + (" …" if len(hosts) > _SHOWN_AT_MOST else "")
    if not ranks:
        return f"{shown}: " if shown else ""
    return f"{shown_ranks(ranks)}{f' ({shown})' if shown else ''}: "


def shown_ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words: "rank 3", "ranks 0-2, 5"."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    words = ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
    return f"rank{'s' if len(ranks) > 1 else ''} {words}"
