"""The tables of benchmarks/README.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import tables
from record import Figure
from tables import BEGIN, END, replaced, section

ABOUT = {
    "hardware": "2 cores of X",
    "versions": "Python 3.11",
    "date": "2026-01-31",
    "command": "python benchmarks/a.py",
    "others_percent": 12.3,
}


def table(*figures: Figure) -> list[list[str]]:
    """The cells of a section's table, without its head."""
    text = section("A title", "What it is about.", {"figures": [one.result() for one in figures], **ABOUT})
    assert text.startswith(
        "## A title\n\nWhat it is about.\n\n`python benchmarks/a.py`; 2 cores of X; Python 3.11; 2026-01-31; "
        "others used 12 % of the CPUs meanwhile.\n\n|"
    )
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    assert {len(row) for row in rows} == {9}
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_a_ratio_is_judged_where_there_is_one() -> None:
    speed = Figure(
        what="ours",
        values=[1300.4, 1250, 1400],
        unit="samples/s",
        ratios=[1.31, 1.2, 1.4],
        peer="theirs",
        limit="2,000 samples/s",
        at_least=1.25,
    )
    assert table(speed) == [
        [
            "ours",
            "1,300 samples/s",
            "1,250 … 1,400",
            "3",
            "theirs",
            "1.31 (1.2 … 1.4)",
            "at least 1.25 ×",
            "yes",
            "2,000 samples/s",
        ]
    ]


@pytest.mark.parametrize(("value", "met"), [(4.9, "yes"), (5.0, "yes"), (5.1, "**no**")])
def test_else_the_value_is(value: float, met: str) -> None:
    (cells,) = table(Figure(what="blocking", values=[value], unit="ms", at_most=5))
    assert cells == ["blocking", f"{value:.3g} ms", "", "1", "", "", "at most 5 ms", met, ""]


def test_a_figure_without_a_target_is_neither_met_nor_missed() -> None:
    (cells,) = table(Figure(what="theirs", values=[0.0123], unit="s"))
    assert cells == ["theirs", "0.0123 s", "", "1", "", "", "", "", ""]


@pytest.mark.parametrize(
    ("key", "words"), [("unable", "Not measured: it needs root."), ("failed", "Failed: it needs root.")]
)
def test_what_was_not_measured_is_told_and_has_no_table(key: str, words: str) -> None:
    text = section(
        "A title", "What it is about.", {key: "it needs root", "command": "python a.py", "date": "2026-01-31"}
    )
    assert text.splitlines()[-1] == f"{words} `python a.py`; 2026-01-31."
    assert "|" not in text


def test_who_was_left_out_is_told() -> None:
    figures = [Figure(what="ours", values=[1], unit="s").result()]
    text = section(
        "A title", "About.", {"figures": figures, "left_out": ["A: not installed", "B: not installed"], **ABOUT}
    )
    assert text.endswith("\n\nLeft out: A: not installed; B: not installed.")


def test_only_what_is_between_the_markers_is_replaced() -> None:
    once = replaced(f"# Head\n{BEGIN}\nold\n{END}\nfoot\n", "new")
    assert once == f"# Head\n{BEGIN}\n\nnew\n\n{END}\nfoot\n"
    assert replaced(once, "newer") == once.replace("new", "newer")


@pytest.mark.parametrize("document", ["no marker", f"{BEGIN} only", f"{END} before {BEGIN}"])
def test_a_document_without_markers_is_left_alone(document: str) -> None:
    with pytest.raises(ValueError, match="lacks"):
        replaced(document, "new")


def test_the_document_has_the_markers() -> None:
    document = Path(tables.__file__).with_name("README.md").read_text()
    assert replaced(document, "new").count("new") >= 1
