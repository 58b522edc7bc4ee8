"""Parameter grids for job arrays: "seed=0..7 lr=0.1,1.0" is sixteen configurations, one per array task.

The last key varies fastest, as in nested loops.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from cluster_ddp.agent.array_values import ARRAY_TASK, PLACEHOLDER, ranges
from cluster_ddp.errors import SpecError, nearest, nearest_name
from cluster_ddp.submission.validation import field_error

Grid = Mapping[str, tuple[str, ...]]

ARRAY_TASK_PLACEHOLDER = f"{{{ARRAY_TASK}}}"

MAX_TASKS = 4_000_000
"""Limit of every cluster, for tasks and for their numbers: MaxArraySize is at most 4,000,001 (slurm.conf(5), 26.05)."""

_RANGE = re.compile(r"(-?\d{1,18})\.\.(-?\d{1,18})")


def parse(words: Sequence[str]) -> tuple[dict[str, tuple[str, ...]], str | None]:
    """Parse the words after --array.

    Args:
        words: Slurm's own form ("0-7%4"), or KEY=VALUES words. VALUES are values and ranges, separated by commas
            ("0..7", "0.1,1.0", "0..3,8"). A last word or suffix "%4" runs at most four tasks at a time.

    Returns:
        The grid, and the text for sbatch's --array. Slurm's own form gives an empty grid; `JobSpec` checks its text.

    Raises:
        SpecError: a word is not KEY=VALUES, repeats a key, or has an empty value or range.
    """
    if len(words) == 1 and "=" not in words[0]:
        return {}, words[0]
    *words, last = words
    last, percent, limit = last.rpartition("%") if re.search(r"%\d*$", last) else (last, "", "")
    grid: dict[str, tuple[str, ...]] = {}
    for word in filter(None, (*words, last)):
        key, equals, values = word.partition("=")
        if not equals or not PLACEHOLDER.fullmatch(f"{{{key}}}"):
            raise _error(word, "each word is KEY=VALUES, such as seed=0..7 or lr=0.1,1.0")
        if key in grid:
            raise _error(word, f"the key {key} is given twice")
        grid[key] = tuple(value for part in values.split(",") for value in _values(word, part))
    return grid, f"0-{size(grid) - 1}{percent}{limit}"


def count(array: str) -> int:
    """Count the task numbers of sbatch's --array without listing them. A repeated number counts each time."""
    return sum(map(len, ranges(array)))


def last(array: str) -> int:
    """Return the highest task number of sbatch's --array, which must not be empty."""
    return max(part[-1] for part in ranges(array) if part)


def size(grid: Grid) -> int:
    """Return the number of configurations."""
    return math.prod(len(values) for values in grid.values())


def placeholders(words: Sequence[str]) -> set[str]:
    """Return the names in braces."""
    return {name for word in words for name in PLACEHOLDER.findall(word)}


def _values(word: str, part: str) -> list[str]:
    match = _RANGE.fullmatch(part)
    if match is None:
        if not part:
            raise _error(word, "it has an empty value")
        return [part]
    first, last = int(match[1]), int(match[2])
    if last < first:
        raise _error(word, f"the range {part} is empty")
    if last - first >= MAX_TASKS:
        raise _error(word, f"no Slurm has arrays of more than {MAX_TASKS:,} tasks")
    return [str(value) for value in range(first, last + 1)]


def _error(word: str, found: str) -> SpecError:
    return SpecError(
        f"An array over {word!r}:", f"{found}.", "--array seed=0..7 lr=0.1,1.0, or Slurm's own: --array 0-7%4"
    )


def checked_array(array: str | None, grid: Grid) -> str | None:
    """Return the text for sbatch's --array: as it was given, or for all configurations of a grid.

    Raises:
        SpecError: it has no task, too many, or others than the grid has configurations.
    """
    if array is not None and count(array) == 0:
        raise field_error("array", array, "task numbers such as 0-7, not an empty range")
    of_grid = f"0-{size(grid) - 1}" if grid else None
    if of_grid and array is not None and array.partition("%")[0] != of_grid:
        raise field_error("array", array, f"{of_grid} for this grid")
    found = of_grid if array is None else array
    if found is not None and max(count(found), last(found)) > MAX_TASKS:
        raise field_error("array", found, f"of at most {MAX_TASKS:,} tasks, none with a higher number")
    return found


def check_placeholders(words: Sequence[str], grid: Grid, *, array: str | None) -> None:
    """Check the placeholders of a command against a grid and an array.

    Args:
        words: the command.
        grid: each of its keys must be used. If it is empty, unknown names in braces are left alone.
        array: sbatch's --array; if None, "{array_task_id}" is not allowed.

    Raises:
        SpecError: a key is not used, or a placeholder has no value.
    """
    names = placeholders(words)
    if array is None and ARRAY_TASK in names:
        legal = f"without {ARRAY_TASK_PLACEHOLDER} unless array is set"
        raise field_error("command", tuple(words), legal, hint="add an array of tasks: --array 0-7")
    unknown = sorted(names - {*grid, ARRAY_TASK}) if grid else []
    for name in unknown:
        found = f"--array gives values for {', '.join(grid)} only.{nearest(name, grid)}"
        used, unused = [key for key in grid if key in names], [key for key in grid if key not in names]
        hint = f"give values for {name}{' instead' if unused else ', too'}: "
        hint += f"--array {' '.join(f'{key}=…' for key in (*used, name))}"
        if unused:
            hint = f"write {{{nearest_name(name, unused) or unused[0]}}} in the command; or {hint}"
        raise SpecError(f"A command with {{{name}}}:", found, hint)
    for key in grid:
        if key not in names:
            found = f"the command has no {{{key}}}, so no task would get its value."
            raise SpecError(f"An array with {key}:", found, f"add it to the command, for example: --{key} {{{key}}}")
