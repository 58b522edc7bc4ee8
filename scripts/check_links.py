"""Check that every relative link in the Markdown files leads to a file, and every #anchor to a heading."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def main() -> int:
    """Check all tracked Markdown files. Returns the exit status."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    broken = [complaint for name in listing.stdout.split() for complaint in _broken(ROOT / name)]
    print("\n".join(broken) or f"{len(listing.stdout.split())} documents, no broken links.")
    return 1 if broken else 0


def _broken(document: Path) -> list[str]:
    complaints = []
    for link in LINK.findall(document.read_text()):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = document.parent / path if path else document
        if not target.exists():
            complaints.append(f"{document.relative_to(ROOT)}: {link}: no such file")
        elif anchor and anchor not in _anchors(target):
            complaints.append(f"{document.relative_to(ROOT)}: {link}: no such heading")
    return complaints


def _anchors(document: Path) -> set[str]:
    """The anchors that GitHub makes of a document's headings."""
    headings = re.findall(r"^#+ +(.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


if __name__ == "__main__":
    sys.exit(main())
