"""Which variables a loop carries, by its source."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from cluster_ddp.runtime.checkpoint.exactness import loop_variables
from cluster_ddp.runtime.checkpoint.exactness.loop_variables import RepeatedCode

ONE_LOOP = {
    "assigned anew": ("loss = x\nx = loss + 1", ""),
    "counted": ("steps += 1", "steps"),
    "counted, with a type": ("steps: int = steps + 1", "steps"),
    "of the turn before": ("print(last)\nlast = x", "last"),
    "the best so far": ("if x > best:\n  best = x", "best"),
    "in one branch": ("if x:\n  value = 1\nprint(value)", "value"),
    "in both branches": ("if x:\n  value = 1\nelse:\n  value = 2\nprint(value)", ""),
    "in the only branch that continues the turn": ("if x:\n  continue\nelse:\n  value = 2\nprint(value)", ""),
    "in an inner loop": ("for y in some:\n  value = y\nprint(value)", ""),
    "summed in each turn": ("total = 0\nfor y in some:\n  total += y\nprint(total)", ""),
    "summed in all": ("for y in some:\n  total += y", "total"),
    "made anew at its end": ("try:\n  x = next(it)\nexcept StopIteration:\n  it = iter(some)\n  x = next(it)", "it"),
    "in a try alone": ("try:\n  value = f(x)\nexcept ValueError:\n  pass\nprint(value)", "value"),
    "in all ways out of a try": ("try:\n  value = f(x)\nexcept ValueError:\n  continue\nprint(value)", ""),
    "by a walrus": ("if (best := max(best, x)) > 1:\n  pass", "best"),
    "of a comprehension": ("some = [x for x in other]\nprint([y for y in some])", ""),
    "read in a comprehension": ("print([y + last for y in other])\nlast = x", "last"),
    "read in a function": ("def f():\n  return last\nf()\nlast = x", "last"),
    "of a function alone": ("def f(last):\n  last = last + 1\n  return last\nf(1)", ""),
    "changed by a function": ("def f():\n  global steps\n  steps += 1\nf()", "steps"),
    "imported": ("import math as m\nprint(m)", ""),
    "by with": ("with open(x) as file:\n  print(file)", ""),
    "unpacked": ("a, (b, *c) = x\nprint(a, b, c)", ""),
    "exchanged": ("a, b = b, a", "a b"),
    "by match": ("match x:\n  case [first, *_]:\n    print(first)", ""),
    "a time": ("print(time.time() - begun)\nbegun = time.time()", ""),
    "deleted": ("value = x\ndel value", ""),
    "an attribute": ("self.steps += 1", ""),
}


class LookedError(Exception):
    """Ends a script once it was looked at."""


def seen_in(path: Path, text: str, *, depth: int = 1) -> RepeatedCode | None:
    """What a script's loop carries around its call of `look`, or the function `depth` further out."""
    found: list[RepeatedCode | None] = []

    def look() -> None:
        found.append(loop_variables.around(sys._getframe(depth)))
        raise LookedError

    path.write_text(text)
    with pytest.raises(LookedError):
        exec(compile(text, path, "exec", dont_inherit=True), {"look": look, "some": [1], "steps": 0})
    return found[0]


@pytest.mark.parametrize("kind", ONE_LOOP)
def test_a_loop_carries_what_it_may_read_before_it_assigns_it(tmp_path: Path, kind: str) -> None:
    body, names = ONE_LOOP[kind]
    lines = [f"  {line}" for line in ["look()", *body.splitlines()]]
    seen = seen_in(tmp_path / "script.py", "\n".join(["for x in some:", *lines]))
    assert seen is not None
    assert seen.is_loop
    assert sorted(seen.carried) == names.split()


def test_both_loops_around_a_line_count(tmp_path: Path) -> None:
    text = "for epoch in some:\n  total = 0\n  for x in some:\n    look()\n    total += x\n  best = max(best, total)\n"
    seen = seen_in(tmp_path / "script.py", text)
    assert seen is not None
    assert sorted(seen.carried) == ["best", "total"]
    assert {"some", "look"} <= seen.read
    assert "total" not in seen.read


def test_what_an_inner_loop_may_leave_counts_if_it_is_read_behind_it(tmp_path: Path) -> None:
    body = "look()\n    if x:\n      first = own = x\n      print(own)\n    last = x\n"
    seen = seen_in(
        tmp_path / "script.py", f"for epoch in some:\n  first = 0\n  for x in some:\n    {body}  f(first, last)"
    )
    assert seen is not None
    assert sorted(seen.carried) == ["first"]


def test_what_is_read_outside_a_loop_alone_is_none_of_its_own(tmp_path: Path) -> None:
    """Before it or behind it, but not before it is assigned there."""
    inner = "if x:\n    for p in some:\n      p\n"
    text = "def main():\n  for p in some:\n    p\n  for x in some:\n    look()\n    {}\n  p = 1\n  p\nmain()\n"
    seen = seen_in(tmp_path / "script.py", text.format(inner.replace("\n", "\n  ")))
    assert seen is not None
    assert sorted(seen.carried) == []
    behind = text.replace("  p = 1\n", "").format(inner.replace("\n", "\n  "))
    seen = seen_in(tmp_path / "behind.py", behind)
    assert seen is not None
    assert sorted(seen.carried) == ["p"]


def test_a_function_in_a_loop_carries_what_is_not_its_own(tmp_path: Path) -> None:
    text = "def step():\n  global steps\n  own = steps\n  own += 1\n  steps = own\n  look()\nfor x in some:\n  step()\n"
    seen = seen_in(tmp_path / "script.py", text)
    assert seen is not None
    assert (sorted(seen.carried), seen.is_loop) == (["steps"], False)
    seen = seen_in(tmp_path / "script.py", text, depth=2)
    assert seen is not None
    assert (sorted(seen.carried), seen.is_loop) == ([], True)
    assert "step" in seen.read


@pytest.mark.parametrize("text", ["look()", "look()\nfor x in some:\n  steps += 1\n"])
def test_without_a_loop_nothing_is_carried(tmp_path: Path, text: str) -> None:
    assert seen_in(tmp_path / "script.py", text) is None


@pytest.mark.parametrize("now", [None, "for x in some:\n  look()\n  last = x\n", "for x in (", "a\0b"])
def test_a_source_that_is_not_what_runs_says_nothing(tmp_path: Path, now: str | None) -> None:
    """It was edited since, or is gone."""
    path = tmp_path / "script.py"
    change = f"import os; os.unlink({str(path)!r})" if now is None else f"open({str(path)!r}, 'w').write({now!r})"
    assert seen_in(path, f"{change}\nfor x in some:\n  look()\n  steps += 1\n") is None


def test_a_function_that_a_loop_calls(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("@abs\ndef step(x):\n  global steps\n  for y in x:\n    steps += y\n  return other\n")
    variables: dict[str, Any] = {"abs": lambda one: one}
    exec(compile(path.read_text(), path, "exec", dont_inherit=True), variables)
    seen = loop_variables.of_function(variables["step"])
    assert seen is not None
    assert (sorted(seen.carried), seen.is_loop) == (["steps"], False)
    assert "other" in seen.read
