"""An option is a field of one dataclass: what it may hold, how a person writes it, and what to do about a wrong value.

Command lines, the keys of cluster.toml, checks and the agent's words are made from it. Its docstring is the help.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import Field, field
from types import MappingProxyType
from typing import Any, NamedTuple


class Form(NamedTuple):
    """What is known of an option beside its type, its default and its help."""

    pattern: str = ""
    """What a text, or each word of several, must match; empty for any."""
    legal: str = ""
    """That in words."""
    one_of: Sequence[str] = ()
    """The texts, or words, that are legal; empty for any."""
    least: int = 0
    """The smallest number. One that may be left out is 1 or more."""
    needs: Mapping[str, Any] = MappingProxyType({})
    """Options: without one of these, it is illegal. Each has a value for an example."""
    hint: str = ""
    """What to do about an illegal value; empty: shown by an example."""
    names: Sequence[str] = ()
    """Other names of it on the command line: sbatch's."""
    metavar: str = ""
    """What stands for its value in the help; empty: as its type says."""
    by_default: str = ""
    """What the help calls its default; empty: the default itself."""
    is_for_agent: bool = False
    """Whether a submission alone gives it to a job's agent, so that `launch` has no such option."""


def option(default: Any, **form: Any) -> Any:
    """Return the field of an option. The arguments are its default and what its `Form` holds."""
    return field(default=default, metadata={"form": Form(**form)})


def form_of(one: Field[Any]) -> Form:
    """Return what is known of an option."""
    form: Form = one.metadata.get("form", Form())
    return form


def default_of(one: Field[Any]) -> Any:
    """Return the default of an option; `dataclasses.MISSING` without one."""
    return one.default if one.default_factory is dataclasses.MISSING else one.default_factory()


def flag(name: str) -> str:
    """Return how a field is called on the command line."""
    return f"--{name.replace('_', '-')}"
