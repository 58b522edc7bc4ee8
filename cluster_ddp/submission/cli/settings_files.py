"""Settings of a site in TOML, so that a command line need not repeat them.

Two files are read if they exist: the project's `cluster.toml`, the nearest in the working folder or its parents, and
the user's `$XDG_CONFIG_HOME/cluster_ddp/cluster.toml` (~/.config if that is unset). Keys at the top level apply to
every job; those of a table `[NAME]` apply with `--profile NAME`. Later ones win: the user's top level, the project's
top level, the user's `[NAME]`, the project's `[NAME]`, the command line. examples/profiles has examples.

Setup lines run as us: a file that others could have written must be accepted. In a folder that a group shares, that is
normal. So `--accept cluster-toml` notes the content's hash in a file of the user's, ~/.config/cluster_ddp/accepted:
that content is then read without a question, wherever it is.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cluster_ddp.errors import SpecError, nearest
from cluster_ddp.run.files import make_dir, open_own
from cluster_ddp.run.ownership import others, refuse_others
from cluster_ddp.submission.cli import settings_keys
from cluster_ddp.submission.cli.settings_keys import error
from cluster_ddp.submission.spec_rules import ALTERNATIVES

FILE_NAME = "cluster.toml"
CODE = "cluster-toml"
"""The code that accepts a file that others could have written: --accept cluster-toml."""


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
        SpecError: a file can't be read, or has an error in any of its tables; there is no such profile; others could
            have written a file, and it was never accepted.
        RunDirError: others could have written the user's file with the hashes.
    """
    user, project = _user_path(env), _project_path(folder)
    accepted = user and user.with_name("accepted")
    there = [path for path in (user, project) if path is not None and os.path.lexists(path)]
    files = {path: _read(path, _content(path, accepted, accept=accept)) for path in there}
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
        if name in settings_keys.kinds() or name in settings_keys.NO_SETTINGS:
            found = f"the table [{name}] has the name of a key, and a profile needs another name."
            raise error(str(path), found, f"rename [{name}]")
    top = {key: settings_keys.value_of(str(path), key, raw) for key, raw in table.items() if key not in profiles}
    return top, {
        name: {key: settings_keys.value_of(f"{path} [{name}]", key, raw) for key, raw in profile.items()}
        for name, profile in profiles.items()
    }


def _content(path: Path, accepted: Path | None, *, accept: bool) -> bytes:
    """The content of a settings file. `accepted` is the file with the hashes; `accept`: take the file as it is now.

    Raises:
        SpecError: it can't be read; or others could have written it, and this content was never accepted.
        RunDirError: others could have written the file with the hashes.
    """
    try:
        real = Path(os.path.realpath(path, strict=True))
        found = _others_of(path, real)
        if found and not real.is_file():
            raise error(str(path), f"{found}, and is no regular file.", f"see what it is: ls -ld {_quoted(path)}")
        content = real.read_bytes()
        if found and not _is_accepted(content, accepted, accept=accept):
            hint = (
                f"read it: cat {_quoted(path)}; then submit with --accept {CODE} once, which holds until it changes; "
                f"or copy it to a folder of your own; if it is yours alone: chmod go-w {_quoted(path)}"
            )
            raise error(str(path), f"{found}. Its settings and setup lines would run as you.", hint)
    except OSError as failed:
        raise error(str(path), f"{failed.strerror}.", f"see what it is: ls -ld {_quoted(path)}") from failed
    return content


def _others_of(*paths: Path) -> str:
    """Who else could have written or replaced one of these, or its folder; empty if nobody could."""
    entries = dict.fromkeys(entry for path in paths for entry in (path, path.parent))
    return next((f"{entry} {found}" for entry in entries if (found := others(entry.lstat()))), "")


def _is_accepted(content: bytes, accepted: Path | None, *, accept: bool) -> bool:
    digest = hashlib.sha256(content).hexdigest()
    if accepted is None:
        return accept
    if os.path.lexists(accepted):
        refuse_others(accepted)
        if digest in accepted.read_text().split():
            return True
    if accept:
        if not accepted.parent.exists():
            make_dir(accepted.parent, shared=False)
        with open(open_own(accepted, os.O_WRONLY | os.O_CREAT | os.O_APPEND, shared=False), "w") as file:
            file.write(f"{digest}\n")
        refuse_others(accepted)
    return accept


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def _parse(path: Path, content: bytes) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        table: dict[str, Any] = tomllib.loads(content.decode("utf-8-sig"))  # some editors write a byte order mark
    except UnicodeDecodeError as failed:
        line = content.count(b"\n", 0, failed.start) + 1
        raise error(str(path), f"it is not UTF-8: {failed.reason} in line {line}.", "save it as UTF-8") from failed
    except (ValueError, RecursionError) as failed:
        hint = 'write keys as nodes = 2, partition = "gpu", modules = ["cuda/12.8"]'
        raise error(str(path), f"it is not TOML: {failed}.", hint) from failed
    return table


def _unknown_profile(profile: str, names: Mapping[Path, list[str]], folder: Path, user: Path | None) -> SpecError:
    listed = [f"{name} (in {path})" for path, in_file in names.items() for name in in_file]
    guess = nearest(profile, [name for in_file in names.values() for name in in_file])
    if listed:
        found = f"there is no such profile.{guess} There are: {', '.join(listed)}."
    elif names:
        found = f"there is no profile in {' or '.join(map(str, names))}."
    else:
        found = f"there is no {FILE_NAME} in {folder} or a parent of it" + (f", and no {user}." if user else ".")
    hint = f"write a table [{profile}] into {FILE_NAME}, or leave --profile out"
    return SpecError(f"Using the profile {profile!r}:", found, hint)
