"""What the doctor prints, its exit status, and the file for --exclude."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cluster_ddp.doctor.findings import Finding, Verdict
from cluster_ddp.errors import SpecError

SICK = Finding(check="a", what="It is full.", evidence="no space", hint="rm", sick_nodes=("node2",))
SLOW = Finding(
    check="b", what="It is slow.", evidence="9 MB/s", hint="--exclude", is_warning=True, sick_nodes=("node1",)
)


def verdict(*found: Finding) -> Verdict:
    made = Verdict(subject="2 ranks on node1, node2", num_nodes=2)
    made.add("nodes", 0.25, found, "22 checks")
    return made


@pytest.mark.parametrize(
    ("found", "status", "strict"), [((), 0, 0), ((SLOW,), 0, 1), ((SICK,), 2, 2), ((SLOW, SICK), 2, 2)]
)
def test_the_exit_status(found: tuple[Finding, ...], status: int, strict: int) -> None:
    assert verdict(*found).status(strict=False) == status
    assert verdict(*found).status(strict=True) == strict


def test_one_screen() -> None:
    assert str(verdict()).splitlines() == [
        "cluster-ddp doctor: 2 ranks on node1, node2",
        "  nodes        ok    0.2 s  22 checks",
        "No problem found.",
    ]
    assert str(verdict(SLOW, SICK)).splitlines() == [
        "cluster-ddp doctor: 2 ranks on node1, node2",
        "  nodes        problem",
        "error: It is full.",
        "  no space.",
        "  Hint: rm",
        "warning: It is slow.",
        "  9 MB/s.",
        "  Hint: --exclude",
        "Ending with exit status 2.",
    ]


def test_what_follows_from_the_first_error_is_said_shortly() -> None:
    others = [Finding(check=str(number), what=f"Problem {number}.", evidence="e", hint="h") for number in range(7)]
    text = str(verdict(SICK, *others))
    assert "7 more, which may follow from it:\n  - Problem 0." in text and text.count("  - Problem") == 4


def test_json_and_the_file_for_exclude(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "it's sick"
    made = verdict(SICK, SLOW)
    made.show(as_json=True)
    made.write_nodes(path)
    told = json.loads(capsys.readouterr().out)
    assert (told["sound"], told["broken_tier"], told["exclude"]) == (False, "nodes", ["node2"])
    assert [one["check"] for one in told["findings"]] == ["a", "b"]
    assert path.read_text() == "node2\n"
    with pytest.raises(SpecError, match="--exclude-file"):
        made.write_nodes(tmp_path / "missing" / "sick")


def test_what_all_nodes_have_excludes_none(tmp_path: Path) -> None:
    """Such as a mistyped --data-dir."""
    made = verdict(*(replace(SICK, sick_nodes=(node,)).seen_on(node) for node in ("node1", "node2")))
    made.write_nodes(tmp_path / "sick")
    assert made.to_json()["exclude"] == [] and (tmp_path / "sick").read_text() == ""


def test_what_ranks_have_is_said_once_after_several_tiers() -> None:
    made = verdict(*(SLOW.seen_on("node1", rank) for rank in range(2)))
    for tier in ("network", "training"):
        made.add(tier, 0.5, [SLOW.seen_on("node2", 2)] if tier == "network" else [])
    assert [one.evidence for one in made.findings] == ["ranks 0-2 (node1, node2): 9 MB/s."]
