"""What the values of options are: numbers, a number of nodes or a range of them."""

from __future__ import annotations

import argparse
import re


def count(text: str) -> int:
    """Return an option's whole number of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"is a whole number of 1 or more, not {text!r}")
    return int(text)


def node_range(text: str) -> tuple[int, int]:
    """Return both ends of a number of nodes, or of a range: 2-8.

    Raises:
        ValueError: it is neither.
    """
    match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text, re.ASCII)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise ValueError(f"is a number of nodes, or a range such as 2-8, not {text!r}")
    return least, most


def one_range(text: str) -> str:
    """Return an option's number of nodes, or range of them, as it is."""
    try:
        node_range(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def number(text: str) -> int:
    """Return an option's whole number of 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"is a whole number of 0 or more, not {text!r}")
    return int(text)
