"""Settings of a site in TOML, so that a command line need not repeat them.

Two files are read if they exist: the project's `cluster.toml`, the nearest in the working folder or its parents, and
the user's `$XDG_CONFIG_HOME/cluster_ddp/cluster.toml` (~/.config if that is unset). Keys at the top level apply to
every job; those of a table `[NAME]` apply with `--profile NAME`. Later ones win: the user's top level, the project's
top level, the user's `[NAME]`, the project's `[NAME]`, the command line. examples/profiles has examples. A file that
others could have written is refused until it is accepted (`settings_trust`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cluster_ddp.errors import ProfileError, SpecError, nearest
from cluster_ddp.submission.cli import settings_trust
from cluster_ddp.submission.cli.settings_trust import error as _error
from cluster_ddp.submission.spec import RESTARTS_BEFORE, JobSpec
from cluster_ddp.submission.spec_rules import ALTERNATIVES, node_counts

FILE_NAME = "cluster.toml"
# Keys beside JobSpec's fields: how a job is submitted, whether nodes may submit jobs, what a kWh makes of CO2.
SUBMISSION_KEYS: Mapping[str, type] = {
    **{"runs_dir": str, "accept": tuple},
    **{"nodes_submit": bool, "co2_g_per_kwh": float},
}

_NO_SETTINGS = ("command", "description", "grid")  # fields that belong to one job
_NOT_KEYS = (*_NO_SETTINGS, "max_nodes")  # nodes = "2-8" sets that one, too
# Fields that another field needs beside it when it is checked alone.
_COMPANIONS: Mapping[str, Mapping[str, Any]] = {
    "container_overlays": {"container": "image.sif"},
    "container_binds": {"container": "image.sif"},
    "spare_nodes": {"restarts": 1},
    "hang_restart_s": {"restarts": 1},
}
# Type of a value -> what it is in TOML, and how it looks.
_LEGAL: Mapping[type, tuple[str, str]] = {
    bool: ("true or false", "true"),
    int: ("an integer", "2"),
    str: ("a string", '"…"'),
    tuple: ("an array of strings", '["…", "…"]'),
}


class Settings(NamedTuple):
    """What the settings files set."""

    values: Mapping[str, Any]
    """Value of each key that is set, as JobSpec takes it."""
    origins: Mapping[str, str]
    """Where each comes from, such as "/path/cluster.toml" or "/path/cluster.toml [long]"."""


def load(profile: str | None, *, folder: Path, env: Mapping[str, str], accept: bool = False) -> Settings:
    """Read the user's and the project's settings.

    Args:
        profile: name of the profile to use; None for the keys at the top level only.
        folder: where the search for the project's file starts.
        env: environment that XDG_CONFIG_HOME and HOME are taken from.
        accept: whether the user accepts a file that others could have written, as it is now.

    Returns:
        The settings, empty where there is no file.

    Raises:
        ProfileError: a file can't be read, or has an error in any of its tables; there is no such profile; others could
            have written a file, and it was never accepted.
    """
    user, project = _user_path(env), _project_path(folder)
    accepted = user and user.with_name("accepted")
    there = [path for path in (user, project) if path is not None and os.path.lexists(path)]
    files = {path: _read(path, settings_trust.read(path, accepted, accept=accept)) for path in there}
    layers = [(str(path), top) for path, (top, _) in files.items()]
    if profile is not None:
        chosen = [(f"{path} [{profile}]", tables[profile]) for path, (_, tables) in files.items() if profile in tables]
        if not chosen:
            raise _unknown_profile(profile, {path: list(tables) for path, (_, tables) in files.items()}, folder, user)
        layers += chosen
    values: Mapping[str, Any] = {}
    for _, layer in layers:
        values = overlay(values, layer)
    origins = {key: origin for origin, layer in layers for key in layer if key in values}
    return Settings(values=values, origins=origins)


def line_of(key: str, origin: str) -> str:
    """Return where a key is set, such as "/path/cluster.toml, line 3".

    Args:
        key: the key.
        origin: its origin, from `Settings`: the path of a file, and " [NAME]" for a profile.
    """
    path, _, profile = origin.partition(" [")
    try:
        lines = Path(path).read_text("utf-8-sig").splitlines()
    except OSError:
        return origin
    table = ""
    for number, line in enumerate(lines, start=1):
        if match := re.match(r"\s*\[(.*)\]", line):
            table = match[1].strip(" \"'")
        elif table == profile.removesuffix("]") and re.match(rf"\s*[\"']?{key}[\"']?\s*=", line):
            return f"{path}, line {number}"
    return origin


def overlay(values: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Override values by others. One of two alternatives, such as venv, removes the other, such as conda_env."""
    replaced = {
        other for pair in ALTERNATIVES for one, other in (pair, pair[::-1]) if one in more and other not in more
    }
    return {**{key: value for key, value in values.items() if key not in replaced}, **more}


def legal_keys() -> tuple[str, ...]:
    """Return all legal keys, without earlier names."""
    return tuple(key for key in _kinds() if key not in RESTARTS_BEFORE)


def fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as fields of `JobSpec`. Raises SpecError if nodes is no number, and no range."""
    return {**values, **(node_counts(values["nodes"]) if "nodes" in values else {})}


def renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with their present names."""
    restarts = [values[name] for name in ("restarts", *RESTARTS_BEFORE) if name in values]
    kept = {key: value for key, value in values.items() if key not in RESTARTS_BEFORE}
    return {**kept, "restarts": max(restarts)} if restarts else kept


@functools.cache
def _kinds() -> dict[str, type]:
    """The type of each legal key's value: bool, int, str or tuple."""
    types = {field.name: str(field.type) for field in dataclasses.fields(JobSpec) if field.name not in _NOT_KEYS}
    kinds = {
        name: next((kind for kind in _LEGAL if hint.startswith(kind.__name__)), str) for name, hint in types.items()
    }
    return {**kinds, **SUBMISSION_KEYS, **dict.fromkeys(RESTARTS_BEFORE, int)}


def _user_path(env: Mapping[str, str]) -> Path | None:
    config = Path(env.get("XDG_CONFIG_HOME", ""))
    if config.is_absolute():  # relative paths are ignored, as the XDG base directory specification says
        return config / "cluster_ddp" / FILE_NAME
    return Path(env["HOME"], ".config", "cluster_ddp", FILE_NAME) if env.get("HOME") else None


def _project_path(folder: Path) -> Path | None:
    start = folder.resolve()
    return next((here / FILE_NAME for here in (start, *start.parents) if os.path.lexists(here / FILE_NAME)), None)


def _read(path: Path, content: bytes) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The checked keys of the top level, and those of each profile."""
    table = _parse(path, content)
    profiles = {name: keys_of for name, keys_of in table.items() if isinstance(keys_of, dict)}
    for name in profiles:
        if name in _kinds() or name in _NO_SETTINGS:
            found = f"the table [{name}] has the name of a key, and a profile needs another name."
            raise _error(str(path), found, f"rename [{name}]")
    top = {key: _value(str(path), key, raw) for key, raw in table.items() if key not in profiles}
    return renamed(top), {
        name: renamed({key: _value(f"{path} [{name}]", key, raw) for key, raw in profile.items()})
        for name, profile in profiles.items()
    }


def _parse(path: Path, content: bytes) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        table: dict[str, Any] = tomllib.loads(content.decode("utf-8-sig"))  # some editors write a byte order mark
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise _error(str(path), f"it is not UTF-8: {error.reason} in line {line}.", "save it as UTF-8") from error
    except (ValueError, RecursionError) as error:
        hint = 'write keys as nodes = 2, partition = "gpu", modules = ["cuda/12.8"]'
        raise _error(str(path), f"it is not TOML: {error}.", hint) from error
    return table


def _value(origin: str, key: str, raw: Any) -> Any:
    """The value as JobSpec takes it."""
    if isinstance(raw, dict):
        raise _error(origin, f"{key!r} is a table in a profile; profiles hold keys only.", f"write [{key}] on its own")
    if key not in _kinds():
        raise _unknown_key(origin, key)
    kind = _kinds()[key]
    value = _co2(origin, raw) if kind is float else raw
    if key == "time" and type(raw) is int:
        value = str(raw)
    elif key == "nodes" and isinstance(raw, str):
        kind = str
    elif kind is tuple and isinstance(raw, list) and all(isinstance(word, str) for word in raw):
        value = tuple(raw)
    if type(value) is not kind:
        legal = _LEGAL[kind][0] + (" or an integer of minutes" if key == "time" else "")
        raise _error(origin, f"{key} must be {legal}. It is {raw!r}.", f"write {_line(key, raw)}")
    if key not in SUBMISSION_KEYS:
        try:
            JobSpec(**{"name": "x", "command": ("true",), **_COMPANIONS.get(key, {}), **fields({key: value})})
        except SpecError as error:
            hint = f"change {key} in that file" if error.meant is None else f"write {_toml(key, error.meant)}"
            raise _error(origin, f"{error.found} It is {raw!r}.", hint) from error
    return value


def _co2(origin: str, raw: Any) -> float:
    """Grams of CO2 for a kWh. Reports use it, which know no profile."""
    if origin.endswith("]") or type(raw) not in (int, float) or not 0 <= raw <= 10_000:
        found = f"co2_g_per_kwh must be a number of 0 to 10000, outside of profiles. It is {raw!r}."
        raise _error(origin, found, "write co2_g_per_kwh = 230 above the first [NAME]")
    return float(raw)


def _toml(key: str, value: object) -> str:
    return f"{key} = {json.dumps(value, ensure_ascii=False)}"


def _line(key: str, raw: Any) -> str:
    """The line in TOML for a key, with the value that was probably meant."""
    kind = _kinds()[key]
    if kind is int and isinstance(raw, str) and raw.isdecimal():
        return f"{key} = {int(raw)}"
    if kind is tuple and isinstance(raw, str):
        return f'{key} = ["{raw}"]'
    if kind is str and not isinstance(raw, (bool, list)):
        return f'{key} = "{raw}"'  # 5 for "5", or 02:00:00, which is a time of day in TOML
    return f"{key} = {_LEGAL[kind][1]}"


def _unknown_key(origin: str, key: str) -> ProfileError:
    if key in _NO_SETTINGS:
        return _error(origin, f"{key} belongs to one job, so it can't be a setting.", "give it on the command line")
    found = f"there is no key {key!r}.{nearest(key.replace('-', '_').lower(), legal_keys())}"
    return _error(origin, found, f"the keys are {', '.join(legal_keys())}; a profile is a table, [NAME]")


def _unknown_profile(profile: str, names: Mapping[Path, list[str]], folder: Path, user: Path | None) -> ProfileError:
    listed = [f"{name} (in {path})" for path, in_file in names.items() for name in in_file]
    guess = nearest(profile, [name for in_file in names.values() for name in in_file])
    if listed:
        found = f"there is no such profile.{guess} There are: {', '.join(listed)}."
    elif names:
        found = f"there is no profile in {' or '.join(map(str, names))}."
    else:
        found = f"there is no {FILE_NAME} in {folder} or a parent of it" + (f", and no {user}." if user else ".")
    hint = f"write a table [{profile}] into {FILE_NAME}, or leave --profile out"
    return ProfileError(f"Using the profile {profile!r}:", found, hint)
