"""Expand Slurm's compressed hostlists without scontrol, which containers often lack.

    expand("gpu[001-003,7]-ib,login") == ["gpu001-ib", "gpu002-ib", "gpu003-ib", "gpu7-ib", "login"]

The result is that of `scontrol show hostnames`: it keeps order, repetitions and leading zeros. Several brackets make a
product whose last bracket varies fastest. Text after a bracket is a suffix; scontrol 22.05 still refuses it.

Grammar (scontrol(1), "show hostnames"; src/common/hostlist.c):

    hostlist := item ("," item)*        item := (text | "[" range ("," range)* "]")+        range := digits ["-" digits]
"""

from __future__ import annotations

import re
from itertools import product
from math import prod

from cluster_ddp.errors import TopologyError
from cluster_ddp.slurm.variables import Variables

# Slurm's own limit on the hosts of one range (MAX_RANGE, 64k): a typing error must not fill the memory.
MAX_RANGE = 65536

MAX_HOSTS = 1 << 20

_ITEM = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")
_SEPARATOR = re.compile(r"[,\s]*")  # scontrol skips empty items and spaces
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand(text: str) -> list[str]:
    """Return the host names of a hostlist, in its order; none of an empty one.

    Raises:
        TopologyError: brackets that don't match, an empty or backward range, a range of over 65,536 hosts,
            over a million hosts from one item.
    """
    hosts: list[str] = []
    position = _SEPARATOR.match(text).end()  # type: ignore[union-attr]  # it also matches empty text
    while position < len(text):
        item = _ITEM.match(text, position)
        if item is None:
            raise _error(text, f"unexpected {text[position]!r} at character {position + 1}")
        alternatives = _alternatives(text, item[0])
        if prod(map(len, alternatives)) > MAX_HOSTS:
            raise _error(text, f"{item[0]} holds more than {MAX_HOSTS} hosts")
        hosts += ("".join(parts) for parts in product(*alternatives))
        position = _SEPARATOR.match(text, item.end()).end()  # type: ignore[union-attr]
    return hosts


def of_variable(v: Variables, *names: str) -> tuple[str, ...]:
    """Return the hosts of the first variable in `names` that is set; none if none is. See `expand` for errors."""
    try:
        return tuple(expand(v.text(*names) or ""))
    except TopologyError as error:
        raise TopologyError(f"Reading {v.first(*names)}: {error.asked}", error.found, error.hint) from error


def _alternatives(text: str, item: str) -> list[list[str]]:
    """The alternatives of each part of an item: one literal, or the numbers of a bracket."""
    return [
        [part[2]] if part[2] else [number for piece in part[1].split(",") for number in _numbers(text, piece)]
        for part in _PART.finditer(item)
    ]


def _numbers(text: str, piece: str) -> list[str]:
    match = _RANGE.fullmatch(piece.strip())
    if match is None:
        raise _error(text, f"[{piece}] is neither a number nor a range of numbers")
    first, last = match[1], match[2] or match[1]
    low, high = int(first), int(last)
    if high < low:
        raise _error(text, f"the range {piece} runs backward")
    if high - low >= MAX_RANGE:
        raise _error(text, f"the range {piece} holds more than {MAX_RANGE} hosts")
    return [f"{number:0{len(first)}d}" for number in range(low, high + 1)]


def _error(text: str, found: str) -> TopologyError:
    return TopologyError(
        f"Reading the hostlist {text!r}:",
        f"{found}.",
        f"compare with Slurm's own expansion: scontrol show hostnames '{text}'",
    )
