"""Figures that a command prints, read from its log by a regular expression: for scripts that know nothing of us."""

from __future__ import annotations

import re
from pathlib import Path

from cluster_ddp.errors import SpecError
from cluster_ddp.protocol import File
from cluster_ddp.run_files import LOG_BYTES, tail

_EXAMPLE = r"--metric 'images/s: ([0-9.]+)'"


def compiled(pattern: str) -> re.Pattern[str]:
    """Return a regular expression that finds figures.

    Args:
        pattern: of --metric, with a group for each figure.

    Raises:
        SpecError: it is no regular expression, or has no group.
    """
    try:
        found = re.compile(pattern)
    except re.error as error:
        raise SpecError(f"Reading --metric {pattern!r}:", f"{error}.", _EXAMPLE) from error
    if not found.groups:
        words = "it has no group, so it does not say which part is the number."
        raise SpecError(f"Reading --metric {pattern!r}:", words, _EXAMPLE)
    return found


def read(run_dir: Path, pattern: re.Pattern[str]) -> dict[str, list[float]]:
    """Return the figures that rank 0 has printed, in order: of each group of the pattern, by name or number.

    Args:
        run_dir: a run directory.
        pattern: from `compiled`. What a group finds may have commas, as in 1,234.5.
    """
    names = {number: name for name, number in pattern.groupindex.items()}
    for path in (run_dir / File.TASK_LOG.format(0), run_dir / File.JOB_LOG):
        found: dict[str, list[float]] = {}
        for match in pattern.finditer(tail(path, LOG_BYTES)):
            for number, text in enumerate(match.groups(), 1):
                try:
                    found.setdefault(names.get(number, str(number)), []).append(float((text or "").replace(",", "")))
                except ValueError:
                    continue
        if found:
            return found
    return {}
