"""What a check has found, and what the doctor says: a line for each sound tier, the first problem in three lines."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cluster_ddp.errors import USAGE_EXIT_STATUS, ClusterDDPError, SpecError
from cluster_ddp.run.files import atomic_write
from cluster_ddp.runtime.failure.hang_verdict import ranges

_SHOWN_AT_MOST = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A problem, as one rank or rank 0 sees it."""

    check: str = ""
    """Name of the check; that of a node or rank is filled in by `Check.run`."""
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

    def seen_on(self, host: str, *ranks: int) -> Finding:
        """Return the same finding, with the node that has it, and its ranks if it is a matter of ranks."""
        return replace(self, host=host, ranks=ranks)

    @staticmethod
    def from_json(value: dict[str, Any]) -> Finding:
        """Return the finding of a JSON object, which `asdict` makes."""
        return Finding(**{**value, "ranks": tuple(value["ranks"]), "sick_nodes": tuple(value["sick_nodes"])})

    @staticmethod
    def of_error(check: str, error: ClusterDDPError) -> Finding:
        """Return an error of this package as a finding: first its cause, the first sentence of what was found."""
        cause, _, rest = error.found.partition(". ")
        what = cause[0].upper() + cause[1:].rstrip(".") + "."
        return Finding(check=check, what=what, evidence=rest or error.asked.rstrip(":") + " failed.", hint=error.hint)

    def __str__(self) -> str:
        """Return it as three lines."""
        return f"{self.what}\n  {self.evidence}\n  Hint: {self.hint}"


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Make one finding of those that several ranks or nodes have. Errors come first, otherwise the order stays."""
    by_problem: dict[tuple[str, str, bool], list[Finding]] = {}
    for one in findings:
        # The first sentence on contradicting variables has the rank's own values: only the hint is the same on all.
        problem = one.hint if one.check == "topology" else one.what
        by_problem.setdefault((one.check, problem, one.is_warning), []).append(one)
    found = [
        replace(
            same[0],
            evidence=_evidence_of_all(same),
            ranks=tuple(sorted({rank for one in same for rank in one.ranks})),
            sick_nodes=tuple(dict.fromkeys(node for one in same for node in one.sick_nodes)),
            host="",
        )
        for same in by_problem.values()
    ]
    return sorted(found, key=lambda one: one.is_warning)


def _evidence_of_all(same: Sequence[Finding]) -> str:
    """Return the evidence for one problem, such as "ranks 0-1, 3 (node1, node2): x; rank 2 (node2): y."."""
    by_evidence: dict[str, list[Finding]] = {}
    for one in same:
        by_evidence.setdefault(one.evidence, []).append(one)
    parts = [f"{_who(those)}{evidence}".rstrip(".") for evidence, those in by_evidence.items()]
    more = f"; and {len(parts) - _SHOWN_AT_MOST} more" if len(parts) > _SHOWN_AT_MOST else ""
    return "; ".join(parts[:_SHOWN_AT_MOST]) + more + "."


def _who(those: Sequence[Finding]) -> str:
    """Return who has a finding, such as "ranks 0-3 (node1, node2): " or "node1, node2: "; "" if that is unknown."""
    ranks = {rank for one in those for rank in one.ranks}
    hosts = list(dict.fromkeys(one.host for one in those if one.host))
    shown = ", ".join(hosts[:_SHOWN_AT_MOST]) + (" …" if len(hosts) > _SHOWN_AT_MOST else "")
    if ranks:
        return f"{shown_ranks(ranks)}{f' ({shown})' if shown else ''}: "
    return f"{shown}: " if shown else ""


def shown_ranks(ranks: Collection[int]) -> str:
    """Return ranks in words: "rank 3", "ranks 0-2, 5"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks).replace(',', ', ')}"


@dataclass(kw_only=True)
class Verdict:
    """The findings, tier by tier."""

    subject: str
    """What was examined, such as "4 ranks on node1, node2 (step 12.0)"."""
    num_nodes: int
    """Number of nodes examined; 0 if they are not those of a job."""
    tiers: list[tuple[str, float, str]] = field(default_factory=list)
    """Name of each sound tier, its seconds, and what was measured."""
    broken_tier: str = ""
    """The tier with the first error; empty without one."""
    raw: list[Finding] = field(default_factory=list)
    """All findings, as ranks have made them."""

    @property
    def findings(self) -> list[Finding]:
        """All findings: errors first, those of several ranks merged."""
        return merged(self.raw)

    def add(self, tier: str, seconds: float, found: Sequence[Finding], measured: str = "") -> bool:
        """Add a tier. Returns whether the next one makes sense."""
        self.raw += found
        if any(not one.is_warning for one in found):
            self.broken_tier = tier
            return False
        if seconds:
            self.tiers.append((tier, seconds, measured))
        return True

    def status(self, *, strict: bool) -> int:
        """Return the exit status: 0; 2 for an error; 1 for a warning, if warnings count."""
        if self.broken_tier:
            return USAGE_EXIT_STATUS
        return 1 if strict and self.raw else 0

    def nodes_at_fault(self) -> dict[str, str]:
        """Return the nodes to do without, and what is wrong with each.

        Warnings do not count; and what all of several nodes have is not the fault of a node.
        """
        errors = [one for one in self.findings if not one.is_warning]
        found = {node: one.what for one in reversed(errors) for node in one.sick_nodes}
        return {} if len(found) >= self.num_nodes != 1 else dict(sorted(found.items()))

    def __str__(self) -> str:
        """Return it as one screen of text."""
        findings = self.findings
        errors = [one for one in findings if not one.is_warning]
        lines = [f"cluster-ddp doctor: {self.subject}"]
        lines += [f"  {name:12} ok  {seconds:5.1f} s  {measured}".rstrip() for name, seconds, measured in self.tiers]
        if self.broken_tier:
            lines.append(f"  {self.broken_tier:12} problem")
        lines += [f"error: {one}" for one in errors[:1]]
        if len(errors) > 1:
            lines.append(f"{len(errors) - 1} more, which may follow from it:")
            lines += [f"  - {one.what}" for one in errors[1:5]]
        lines += [f"warning: {one}" for one in findings if one.is_warning]
        if not findings:
            lines.append("No problem found.")
        if self.broken_tier:
            lines.append(f"Ending with exit status {USAGE_EXIT_STATUS}.")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {
            "subject": self.subject,
            "sound": not self.broken_tier,
            "broken_tier": self.broken_tier or None,
            "tiers": [{"name": name, "seconds": seconds, "measured": words} for name, seconds, words in self.tiers],
            "findings": [asdict(one) for one in self.findings],
            "exclude": list(self.nodes_at_fault()),
        }

    def show(self, *, as_json: bool) -> None:
        """Print it: one line of JSON, or one screen of text."""
        print(json.dumps(self.to_json()) if as_json else self, flush=True)

    def write_nodes(self, path: Path | None) -> None:
        """Write the nodes at fault to a file for `sbatch --exclude=FILE`; if it can't be written, it is a SpecError.

        The path must contain a "/", for sbatch to take it for a file (sbatch(1), --exclude).
        """
        if path is None:
            return
        try:
            with atomic_write(path) as file:
                file.write("".join(f"{node}\n" for node in self.nodes_at_fault()).encode())
        except OSError as error:
            hint = "--exclude-file ./FILE, in a folder that you may write"
            raise SpecError(f"Writing the nodes at fault to {path}:", str(error.strerror or error), hint) from error
