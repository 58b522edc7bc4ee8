"""docs/faults.md, made of the markers of tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "scripts"))
import render_faults  # noqa: E402

MARKED = """
import pytest

@pytest.mark.fault("a node | a link", "resumes", bound="seconds", also=("test_rare", "tests/ranks/test_it.py"))
@pytest.mark.fault("a rank", "ends")
def test_it() -> None: ...

@pytest.mark.full
def test_rare() -> None: ...
"""


def page(folder: Path, text: str) -> str:
    path = folder / "tests" / "ranks" / "test_it.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return render_faults.page(render_faults.tests_in(path, folder))


def test_a_marker_is_a_row(tmp_path: Path) -> None:
    rows = [line for line in page(tmp_path, MARKED).splitlines() if line.startswith("| a ")]
    assert rows == [
        r"| a node \| a link | resumes | seconds | `test_it`, `test_rare` (all), `tests/ranks/test_it.py` |",
        "| a rank | ends |  | `test_it` |",
    ]


@pytest.mark.parametrize("marks", ["pytest.mark.full", "[pytest.mark.full, pytest.mark.every_slurm]"])
def test_a_module_may_be_left_to_make_test_all(tmp_path: Path, marks: str) -> None:
    text = page(tmp_path, MARKED.replace("import pytest\n", f"import pytest\npytestmark = {marks}\n"))
    assert "`test_it` (all), `test_rare` (all), `tests/ranks/test_it.py` (all) |" in text


@pytest.mark.parametrize("arguments", ["", '"a rank"', '"a rank", ""'])
def test_a_row_without_a_text_is_an_error(tmp_path: Path, arguments: str) -> None:
    with pytest.raises(ValueError, match=r"^tests/ranks/test_it.py:5: fault\(…\) needs two texts"):
        page(tmp_path, MARKED.replace('"a rank", "ends"', arguments))
