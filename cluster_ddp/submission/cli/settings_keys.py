"""The keys of the settings files: their types, and what each value is as a field of a job or of its submission."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

from cluster_ddp.errors import SpecError, nearest
from cluster_ddp.option_form import form_of
from cluster_ddp.submission.job_options import JobOptions
from cluster_ddp.submission.spec import JobSpec
from cluster_ddp.submission.spec_rules import node_counts

# Keys beside JobSpec's fields: how a job is submitted.
SUBMISSION_KEYS: Mapping[str, type] = {"runs_dir": str, "accept": tuple}

NO_SETTINGS = ("command", "description", "grid")
"""Fields that belong to one job."""
_NOT_KEYS = (*NO_SETTINGS, "max_nodes")  # nodes = "2-8" sets that one, too
# Of the job, then of its ranks.
_FIELDS = sorted(dataclasses.fields(JobSpec), key=lambda one: one.name not in JobOptions.__annotations__)
# Type of a value -> what it is in TOML, and how it looks.
_LEGAL: Mapping[type, tuple[str, str]] = {
    bool: ("true or false", "true"),
    int: ("an integer", "2"),
    str: ("a string", '"…"'),
    tuple: ("an array of strings", '["…", "…"]'),
}


def error(origin: str, found: str, hint: str) -> SpecError:
    """Return the error that a settings file has."""
    return SpecError(f"Reading the settings in {origin}:", found, hint)


def defaults() -> dict[str, Any]:
    """Return what each key is without a setting."""
    known: dict[str, Any] = {one.name: one.default for one in _FIELDS}
    known |= {"name": "from the command", "runs_dir": "runs", "accept": ()}
    return {key: known[key] for key in kinds()}


def fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what settings say of fields of `JobSpec`. Raises SpecError if nodes is no number, and no range."""
    counts = node_counts(values["nodes"]) if "nodes" in values else {}
    return {**{key: value for key, value in values.items() if key not in SUBMISSION_KEYS}, **counts}


@functools.cache
def kinds() -> dict[str, type]:
    """The type of each legal key's value: bool, int, str or tuple."""
    types = {one.name: str(one.type) for one in _FIELDS if one.name not in _NOT_KEYS}
    of_job = {
        name: next((kind for kind in _LEGAL if hint.startswith(kind.__name__)), str) for name, hint in types.items()
    }
    return {**of_job, **SUBMISSION_KEYS}


def value_of(origin: str, key: str, raw: Any) -> Any:
    """The value as JobSpec takes it."""
    if isinstance(raw, dict):
        raise error(origin, f"{key!r} is a table in a profile; profiles hold keys only.", f"write [{key}] on its own")
    if key not in kinds():
        raise _unknown_key(origin, key)
    kind, value = kinds()[key], raw
    if key == "time" and type(raw) is int:
        value = str(raw)
    elif key == "nodes" and isinstance(raw, str):
        kind = str
    elif kind is tuple and isinstance(raw, list) and all(isinstance(word, str) for word in raw):
        value = tuple(raw)
    if type(value) is not kind:
        legal = _LEGAL[kind][0] + (" or an integer of minutes" if key == "time" else "")
        raise error(origin, f"{key} must be {legal}. It is {raw!r}.", f"write {_line(key, raw)}")
    if key not in SUBMISSION_KEYS:
        try:
            JobSpec(**{"name": "x", "command": ("true",), **_needed(key), **fields({key: value})})
        except SpecError as wrong:
            hint = f"change {key} in that file"
            if wrong.meant is not None:
                hint = f"write {key} = {json.dumps(wrong.meant, ensure_ascii=False)}"
            raise error(origin, f"{wrong.found} It is {raw!r}.", hint) from wrong
    return value


def _needed(key: str) -> dict[str, Any]:
    """Values of the fields without which this one is illegal. They allow it any legal value: of a number, the least."""
    needs = form_of(next(one for one in _FIELDS if one.name == key)).needs
    first = next(iter(needs), None)
    if first is None:
        return {}
    return {first: 1 if isinstance(needs[first], int) else needs[first], **_needed(first)}


def _line(key: str, raw: Any) -> str:
    """The line in TOML for a key, with the value that was probably meant."""
    kind = kinds()[key]
    if kind is int and isinstance(raw, str) and raw.isdecimal():
        return f"{key} = {int(raw)}"
    if kind is tuple and isinstance(raw, str):
        return f'{key} = ["{raw}"]'
    if kind is str and not isinstance(raw, (bool, list)):
        return f'{key} = "{raw}"'  # 5 for "5", or 02:00:00, which is a time of day in TOML
    return f"{key} = {_LEGAL[kind][1]}"


def _unknown_key(origin: str, key: str) -> SpecError:
    if key in NO_SETTINGS:
        return error(origin, f"{key} belongs to one job, so it can't be a setting.", "give it on the command line")
    found = f"there is no key {key!r}.{nearest(key.replace('-', '_').lower(), kinds())}"
    return error(origin, found, f"the keys are {', '.join(kinds())}; a profile is a table, [NAME]")
