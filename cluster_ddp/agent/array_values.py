"""The values of an array's tasks: each runs one combination of a grid."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

ARRAY_TASK = "array_task_id"
"""The placeholder for the number of an array's task."""

PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""A name in braces, in a word of a command."""


def ranges(array: str) -> list[range]:
    """Return the task numbers of an array, as sbatch takes it, part by part: 1 to 1, and 3, 5, 7, 9 for "1,3-9:2%4"."""
    found = []
    for part in array.partition("%")[0].split(","):
        first, _, rest = part.partition("-")
        end, _, step = rest.partition(":")
        found.append(range(int(first), int(end or first) + 1, int(step or 1)))
    return found


def numbers(array: str) -> list[int]:
    """Return the task numbers of an array, as sbatch takes it, sorted: 1, 3, 5, 7, 9 for "1,3-9:2%4"."""
    return sorted({number for part in ranges(array) for number in part})


def share(tasks: Sequence[int], jobs: int, job: int) -> list[int]:
    """Return the tasks that one of several jobs holds: task number `job` of the list, and every `jobs`-th after it."""
    return [*tasks[job::jobs]]


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
