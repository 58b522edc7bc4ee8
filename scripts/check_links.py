"""Check the Markdown files: a relative link leads to a file, an #anchor to a heading, a `test_…` to a test."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
TEST = re.compile(r"`(tests/[\w/]*/)?(test_\w+(?:\.py)?)…?`")


def main() -> int:
    """Check all tracked Markdown files. Returns the exit status."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    tests = [*(ROOT / "tests").rglob("test_*.py")]
    known = "\n".join([*(f"def {path.name}" for path in tests), *(path.read_text() for path in tests)])
    broken = [complaint for name in listing.stdout.split() for complaint in _broken(ROOT / name, known)]
    print("\n".join(broken) or f"{len(listing.stdout.split())} documents, no broken links.")
    return 1 if broken else 0


def _broken(document: Path, tests: str) -> list[str]:
    where = document.relative_to(ROOT)
    named = TEST.findall(document.read_text())
    complaints = [
        f"{where}: {folder}{name}: no such test" for folder, name in named if not _is_test(folder, name, tests)
    ]
    for link in LINK.findall(document.read_text()):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = document.parent / path if path else document
        if not target.exists():
            complaints.append(f"{where}: {link}: no such file")
        elif anchor and anchor not in _anchors(target):
            complaints.append(f"{where}: {link}: no such heading")
    return complaints


def _is_test(folder: str, name: str, tests: str) -> bool:
    return (ROOT / folder / name).is_file() if folder and name.endswith(".py") else f"def {name}" in tests


def _anchors(document: Path) -> set[str]:
    """The anchors that GitHub makes of a document's headings."""
    headings = re.findall(r"^#+ +(.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


if __name__ == "__main__":
    sys.exit(main())
