"""The README's first picture shows the recorded text, and loads nothing."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
TEXT, IMAGE = ROOT / "docs" / "images" / "resumed.txt", ROOT / "docs" / "images" / "resumed.svg"


def words_of(image: Path) -> str:
    """All characters of a picture, without blanks."""
    return re.sub(r"\s", "", html.unescape("".join(re.findall(r"<text[^>]*>([^<]*)", image.read_text()))))


def test_the_picture_shows_the_text(tmp_path: Path) -> None:
    image = tmp_path / "new.svg"
    subprocess.run([sys.executable, "scripts/readme_picture.py", "--image", image], cwd=ROOT, check=True)
    for line in TEXT.read_text().splitlines():
        assert re.sub(r"\s", "", line) in words_of(image)
    assert words_of(IMAGE) == words_of(image), "renew it: python scripts/readme_picture.py"


def test_the_picture_loads_nothing() -> None:
    assert not re.search(r"url\((?!#)|href=|@import", IMAGE.read_text())
