"""Draw the README's first picture: `python scripts/readme_picture.py [TEXT] [--image docs/images/resumed.svg]`.

TEXT is what a terminal showed, shortened: lines that begin with `$` were typed, those with `#` say what happened
elsewhere. The picture loads no fonts, and has its own background, for light and dark pages.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

STYLES = {"$": "bold", "#": "bold red"}
GOOD = re.compile(r"Resuming|Starting again|COMPLETED|Accuracy: \S+ \(\S+\)")
TIME = re.compile(r"^ *\d+ s")
FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # from a network


def main() -> int:
    """Parse the options and write the picture. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", type=Path, default=Path("docs/images/resumed.txt"))
    parser.add_argument("--image", type=Path, default=Path("docs/images/resumed.svg"), help="default: %(default)s")
    arguments = parser.parse_args()
    lines = arguments.text.read_text().splitlines()
    console = Console(record=True, width=max(map(len, lines)), file=io.StringIO(), force_terminal=True)
    for line in lines:
        text = Text(line, style=STYLES.get(line[0], ""))
        text.highlight_regex(GOOD, "bold green")
        text.highlight_regex(TIME, "dim")
        console.print(text, highlight=False)
    title = "a job that is killed, restarted, stopped, requeued, and completes"
    svg = FONTS.sub("", console.export_svg(title=title, unique_id="resumed"))
    arguments.image.write_text(svg.replace("Fira Code, monospace", "monospace"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
