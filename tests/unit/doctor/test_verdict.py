"""What the doctor prints, its exit status, and the file for --exclude."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster_ddp.doctor.finding import Finding
from cluster_ddp.doctor.verdict import Verdict

SICK = Finding(check="a", what="It is full.", evidence="no space", hint="rm", sick_nodes=("node2",))
SLOW = Finding(
    check="b", what="It is slow.", evidence="9 MB/s", hint="--exclude", is_warning=True, sick_nodes=("node1",)
)


def verdict(*found: Finding) -> Verdict:
    made = Verdict(subject="2 ranks on node1, node2")
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
    verdict(SICK, SLOW).show(as_json=True, exclude_file=path)
    told = json.loads(capsys.readouterr().out)
    assert (told["sound"], told["broken_tier"], told["exclude"]) == (False, "nodes", ["node1", "node2"])
    assert [one["check"] for one in told["findings"]] == ["a", "b"]
    assert path.read_text() == "node1\nnode2\n"
