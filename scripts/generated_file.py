"""Files that a script writes, and with `--check` compares: `make check` finds those that are not fresh."""

from __future__ import annotations

import argparse
from pathlib import Path


def only_compares(description: str | None) -> bool:
    """Parse the command line of such a script. Returns whether it has --check."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, only compare")
    return bool(parser.parse_args().check)


def was_fresh(path: Path, text: str, *, check: bool) -> bool:
    """Return whether a file has this text already. If not, write it, unless it is only to be compared."""
    is_fresh = path.exists() and path.read_text() == text
    if not is_fresh and not check:
        path.write_text(text)
    return is_fresh
