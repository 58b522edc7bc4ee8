"""What the doctor says: a line for each tier that is sound, and the first problem in three lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster_ddp.doctor.finding import Finding, folded
from cluster_ddp.errors import USAGE_EXIT_STATUS, SpecError
from cluster_ddp.files import atomic_write


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
        """All findings: errors first, those of several ranks folded."""
        return folded(self.raw)

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
        return 1 if strict and self.findings else 0

    def nodes_at_fault(self) -> dict[str, str]:
        """Return the nodes to do without, and what is wrong with each.

        Warnings do not count; and what all of several nodes have is not the fault of a node.
        """
        errors = [one for one in self.findings if not one.is_warning]
        found = {node: one.what for one in reversed(errors) for node in one.sick_nodes}
        return {} if len(found) >= self.num_nodes != 1 else dict(sorted(found.items()))

    def __str__(self) -> str:
        """Return it as one screen of text."""
        lines = [f"cluster-ddp doctor: {self.subject}"]
        lines += [f"  {name:12} ok  {seconds:5.1f} s  {measured}".rstrip() for name, seconds, measured in self.tiers]
        if self.broken_tier:
            lines.append(f"  {self.broken_tier:12} problem")
        errors = [one for one in self.findings if not one.is_warning]
        for one in errors[:1]:
            lines.append(f"error: {one}")
        if len(errors) > 1:
            lines.append(f"{len(errors) - 1} more, which may follow from it:")
            lines += [f"  - {one.what}" for one in errors[1:5]]
        lines += [f"warning: {one}" for one in self.findings if one.is_warning]
        if not self.findings:
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
            "findings": [one.to_json() for one in self.findings],
            "exclude": list(self.nodes_at_fault()),
        }

    def show(self, *, as_json: bool) -> None:
        """Print it.

        Args:
            as_json: print one line of JSON.
        """
        print(json.dumps(self.to_json()) if as_json else self, flush=True)

    def write_nodes(self, path: Path | None) -> None:
        """Write the nodes at fault to a file for `sbatch --exclude=FILE`.

        Args:
            path: the file; it must contain a "/", for sbatch to take it for one (sbatch(1), --exclude). None: no file.

        Raises:
            SpecError: the file can't be written.
        """
        if path is None:
            return
        try:
            with atomic_write(path) as file:
                file.write("".join(f"{node}\n" for node in self.nodes_at_fault()).encode())
        except OSError as error:
            hint = "--exclude-file ./FILE, in a folder that you may write"
            raise SpecError(f"Writing the nodes at fault to {path}:", str(error.strerror or error), hint) from error
