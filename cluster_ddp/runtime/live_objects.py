"""The objects of some classes in this process, as the garbage collector knows them."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from typing import Any

_PADDING = 1000  # more than the objects that listing objects makes


def objects_of(*wanted: type) -> list[Any]:
    """Return all objects of these classes. There may be a million others: no Python code looks at each.

    No other thread runs while all objects are listed: where one makes a tuple that is also referred to here, it would
    get a SystemError (CPython: _PyTuple_Resize, Objects/tupleobject.c).
    """
    kinds = set[type]()
    left = list(wanted)
    while left:
        kinds.add(kind := left.pop())
        left += kind.__subclasses__()
    collects = gc.isenabled()
    gc.disable()  # it could run Python code, and would move objects
    try:
        return [one for number in range(len(gc.get_count())) for one in _of_generation(number, kinds)]
    finally:
        if collects:
            gc.enable()


def _of_generation(number: int, kinds: set[type]) -> list[Any]:
    """The objects of these classes in a generation of the garbage collector.

    It is listed twice, and both lists are read to their ends, which frees them. The second has some more, at its end.
    """

    def objects() -> Iterator[object]:
        return itertools.chain.from_iterable(map(gc.get_objects, (number,)))

    padded = itertools.chain(objects(), itertools.repeat(None, _PADDING))
    return list(itertools.compress(padded, map(kinds.__contains__, map(type, objects()))))
