"""Words of a command line that were probably meant otherwise: they are legal, so each is a warning."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cluster_ddp.agent.grid import ARRAY_TASK
from cluster_ddp.submission.checks.performance_warnings import Advice

_OPERATORS = ("|", "||", "&&", "&", ";", ">", ">>", "<", "2>", "2>&1", "&>")


def advise(given: Mapping[str, Any], command: Sequence[str]) -> Iterator[Advice]:
    """Warn of grids in another notation, placeholders without a grid, tiny times and sizes, a shell's operators.

    Args:
        given: the options that were given.
        command: the words after the two dashes.
    """
    array = given.get("array") or ()
    yield from (Advice("range", text) for text in map(_of_grid, array) if text)
    if not any("=" in word for word in array) and (names := _lone_placeholders(command)):
        text = f"The command gets {' and '.join(f'{{{name}}}' for name in names)} as plain text. To give values: "
        yield Advice("placeholder", f"{text}--array {' '.join(f'{name}=…' for name in names)}")
    if match := re.fullmatch(r"[1-4]:\d\d", given.get("time") or ""):
        text = f"--time {match[0]} means minutes and seconds. For hours and minutes: --time {match[0]}:00"
        yield Advice("short", text)
    if re.fullmatch(r"[1-9]\d{0,2}", given.get("mem") or ""):
        yield Advice("short", f"--mem {given['mem']} means MiB. For GiB: --mem {given['mem']}G")
    if operators := [word for word in command if word in _OPERATORS]:
        text = f"The command gets {' and '.join(operators)} as plain text; no shell reads it. To use a shell: "
        status = "-o pipefail " if "|" in operators else ""  # else that of tee, not that of the training
        yield Advice("shell", f"{text}-- bash {status}-c {shlex.quote(' '.join(command))}")


def _of_grid(word: str) -> str:
    """What was probably meant by a word of --array; "" if it is clear."""
    key, _, values = word.partition("=")
    if match := re.fullmatch(r"(\d+)[-:](\d+)", values):
        first, last = int(match[1]), int(match[2])
    elif match := re.fullmatch(r"range\((?:(\d+),\s*)?(\d+)\)", values):  # its end is not in it
        first, last = int(match[1] or 0), int(match[2]) - 1
    elif match := re.fullmatch(r"[\[({](.+)[\])}]", values):
        return f"{word} has brackets in its values. Without them: {key}={match[1].replace(' ', '')}"
    else:
        return ""
    return f"{word} is text, not a range of numbers. For the numbers {first} to {last}: {key}={first}..{last}"


def _lone_placeholders(command: Sequence[str]) -> list[str]:
    """The names in words such as {lr} and --lr={lr}. Other braces may be meant for the program."""
    found = (re.fullmatch(r"(?:--?[\w-]+=)?\{([A-Za-z_]\w*)\}", word) for word in command)
    return [match[1] for match in found if match and match[1] != ARRAY_TASK]
