"""The values of an array's tasks: each runs one combination of a grid."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

ARRAY_TASK = "array_task_id"
"""The placeholder for the number of an array's task."""

PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""A name in braces, in a word of a command."""


def configuration(grid: Mapping[str, Sequence[str]], task: int) -> dict[str, str]:
    """Return the values of array task number `task`, from 0 on. The last key varies fastest."""
    values: dict[str, str] = {}
    for key in reversed(list(grid)):
        task, index = divmod(task, len(grid[key]))
        values[key] = grid[key][index]
    return {key: values[key] for key in grid}


def fill_in(word: str, values: Mapping[str, str]) -> str:
    """Replace the placeholders of `values` in a word. Other braces stay."""
    return PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), word)


def filled(command: Sequence[str], grid: Mapping[str, Sequence[str]], env: Mapping[str, str]) -> list[str]:
    """Return a command with the values of the array's task that this environment describes; outside one, as it is."""
    number = env.get("SLURM_ARRAY_TASK_ID", "")
    values = {**configuration(grid, int(number)), ARRAY_TASK: number} if number else {}
    return [fill_in(word, values) for word in command]
