"""Runs a verb on another machine, if its command line has --on."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cluster_ddp._version import __version__
from cluster_ddp.errors import RemoteError


def split(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Take --on out of a command line, up to its first "--". Returns its value, None without it, and the other words.

    Raises:
        RemoteError: the option has no value.
    """
    end = list(words).index("--") if "--" in words else len(words)
    own, rest = list(words[:end]), list(words[end:])
    for at, word in enumerate(own):
        if word.startswith("--on="):
            return word.partition("=")[2], own[:at] + own[at + 1 :] + rest
        if word == "--on":
            if at + 1 == len(own) or own[at + 1].startswith("-"):
                raise RemoteError("Reading --on:", "it names no machine.", "write --on HOST, or --on HOST:FOLDER")
            return own[at + 1], own[:at] + own[at + 2 :] + rest
    return None, [*own, *rest]


def run_there(verb: str, words: Sequence[str]) -> int | None:
    """Run a verb on another machine if its command line says so. Returns its exit status; None if it is to run here.

    Raises:
        RemoteError: the machine can't be reached, or lacks what is needed; this folder is not in a git checkout.
    """
    where, rest = split(words)
    if where is None:
        return None
    from cluster_ddp.remote.project import connected

    with connected(where) as project:
        if verb == "submit":
            project.update()
        else:
            project.require()
        program, version = project.program(needs_slurm=verb == "submit" and "--local" not in rest)
        if version != __version__:
            found = f"{project.host.name} has cluster-ddp {version}, this machine has {__version__}"
            print(f"warning: {found}: options may differ.", file=sys.stderr)
        status = project.run(program, verb, *rest)
    if verb == "submit" and status == 0:
        then = f"There: cluster-ddp logs --on {where} -f JOB; also status, cancel, fetch."
        print(f"This was on {project.place}. {then}", file=sys.stderr)
    return status
