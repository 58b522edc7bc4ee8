"""How a group's table of tests is written: names, and what to call with the `Lab`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

from lab import Lab

Test = Callable[[Lab], None]


def both(name: str, test: Callable[..., None], **more: str) -> dict[str, Test]:
    """A test without graphs, and with them."""
    ways = {"eager": False, "graph": True}
    return {f"{name}-{way}": functools.partial(test, cuda_graph=is_on, **more) for way, is_on in ways.items()}


def each(name: str, test: Callable[..., None], parameter: str, values: Iterable[str]) -> dict[str, Test]:
    """A test for each value of a parameter."""
    return {f"{name}-{value.replace(' ', '_')}": functools.partial(test, **{parameter: value}) for value in values}
