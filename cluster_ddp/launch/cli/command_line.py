"""A submission from the command line: from words to a job, and what is said about it."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from cluster_ddp.errors import SpecError
from cluster_ddp.launch import grids, planning, resume, run_dirs
from cluster_ddp.launch.backends.slurm import Slurm, test_only
from cluster_ddp.launch.checks import preflight
from cluster_ddp.launch.cli import options, site_config
from cluster_ddp.launch.planning import Plan
from cluster_ddp.launch.spec import JobSpec


class Reference(Protocol):
    """The job that is submitted where no command is given."""

    name: str

    def command(self, options: list[str], settings: Mapping[str, Any]) -> list[str]:
        """What to run. Raises ClusterDDPError, or exits, for options that it has not."""

    def check(self, options: list[str], settings: Mapping[str, Any]) -> None:
        """See whether it has what it needs. Raises ClusterDDPError."""


def run(
    argv: Sequence[str], *, program: str, description: str, reference: Reference, submit: Callable[[Plan, bool], int]
) -> int:
    """Parse, plan, check; then show, ask, or submit.

    Args:
        argv: the command line.
        program: how the command is called.
        description: for --help.
        reference: the job without a command of the user's own.
        submit: submits a plan, follows the job if wanted, and returns the exit status.

    Returns:
        The exit status.

    Raises:
        ClusterDDPError: it can't be submitted; nothing is left behind.
    """
    own, command = options.split(argv)
    parser = options.parser(program, description, with_texts="-h" in own or "--help" in own)
    parsed, rest = parser.parse_known_args(own)
    given = {key: value for key, value in vars(parsed).items() if value is not None}
    settings = site_config.load(parsed.profile, folder=Path.cwd(), env=os.environ)
    earlier = None
    if parsed.resume is not None:
        earlier = resume.find(parsed.resume, Path({"runs_dir": "runs", **settings.values, **given}["runs_dir"]))
        settings = _settings_of(earlier, settings, parsed.profile)
    values = _values(settings, given)
    if parsed.show_config:
        _show_config(values, settings, given)
        return 0
    advice = options.tasks_advice(vars(parsed), values.get("nodes", 1), values.get("gpus_per_node", 1))
    if command is not None:
        options.refuse(rest, parser, program)
    work = _work(command, rest, earlier, reference, values)
    plan = _plan(work, values, earlier, parsed, source=f"Submitted by: {program} {shlex.join(argv)}")
    if not parsed.no_check:
        advice += preflight.check(plan, ask_cluster=not parsed.dry_run)
        if work.of_reference is not None and not parsed.dry_run:
            reference.check(work.of_reference, values)
    for one in advice:
        if one.code not in values.get("accept", ()):
            print(f"warning: {one.text} (silence: --accept {one.code})", file=sys.stderr)
    if parsed.dry_run:
        print(plan, end="")
        return 0
    return _test_only(plan) if parsed.test_only else submit(plan, parsed.watch)


class _Work(NamedTuple):
    """What is to be run."""

    name: str
    command: Sequence[str]
    of_reference: list[str] | None = None
    """The options of the reference job, if it is that."""
    function: resume.Pickled | None = None
    code: str | None = None


def _work(
    command: list[str] | None,
    rest: list[str],
    earlier: resume.Earlier | None,
    reference: Reference,
    values: Mapping[str, Any],
) -> _Work:
    """The command; else what the earlier job ran, in its folder and copy of the code; else the reference job."""
    if command is not None:
        return _Work(options.job_name(command), command)
    if earlier is None:
        return _Work(reference.name, reference.command(rest, values), of_reference=rest)
    spec = earlier.enter()
    if list(spec.command[1:3]) == reference.command([], values)[1:3]:
        rest = [*spec.command[3:], *rest]
        return _Work(spec.name, reference.command(rest, values), of_reference=rest, code=earlier.code)
    if rest:
        hint = f"{run_dirs.resume_command(earlier.run_dir)} -- {shlex.join([*spec.command, *rest])}"
        raise SpecError(f"Resuming with {rest[0]}:", "there is no such option; is it the command's?", hint)
    return _Work(spec.name, spec.command, function=earlier.function(), code=earlier.code)


def _plan(
    work: _Work, values: Mapping[str, Any], earlier: resume.Earlier | None, parsed: argparse.Namespace, *, source: str
) -> Plan:
    job = {key: value for key, value in values.items() if key not in site_config.SUBMISSION_KEYS}
    return planning.plan(
        JobSpec(**{"name": work.name, **job, "command": tuple(work.command)}),
        function=work.function,
        backend=values.get("backend", "submitit"),
        runs_dir=Path(values.get("runs_dir", "runs")),
        run_dir=parsed.run_dir and Path(parsed.run_dir),
        earlier=earlier,
        code=work.code,
        take_snapshot=parsed.snapshot,
        source=source,
        must_run=not parsed.dry_run,
    )


def _settings_of(earlier: resume.Earlier, files: site_config.Settings, name: str | None) -> site_config.Settings:
    """An earlier job's settings, instead of the files' as they are now; but on top those of a profile that is named."""
    if earlier.spec is None:
        return files
    keys = [key for key in site_config.legal_keys() if key not in site_config.SUBMISSION_KEYS and key != "array"]
    before = {key: getattr(earlier.spec, key) for key in keys} | {"backend": earlier.backend}
    before = {key: value for key, value in before.items() if value is not None}
    now = {key: value for key, value in files.values.items() if name is not None or key == "accept"}
    origins = dict.fromkeys(before, f"job {earlier.job}") | {key: files.origins[key] for key in now}
    return site_config.Settings(values=site_config.overlay(before, now), origins=origins)


def _values(settings: site_config.Settings, given: Mapping[str, Any]) -> dict[str, Any]:
    """The files' settings with the command line's on top, as JobSpec takes them."""
    values = site_config.overlay(settings.values, {key: given[key] for key in site_config.legal_keys() if key in given})
    if "array" in given:
        values["grid"], values["array"] = grids.parse(given["array"])
    if not values.get("container") and not values.get("container_image") and "container_binds" not in given:
        values.pop("container_binds", None)  # a site's binds wait for a container
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def _show_config(values: Mapping[str, Any], settings: site_config.Settings, given: Mapping[str, Any]) -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(JobSpec)}
    defaults |= {"name": "from the command", "backend": "submitit", "runs_dir": "runs", "accept": ()}
    for key in site_config.legal_keys():
        value = values.get(key, defaults[key])
        origin = "command line" if key in given else settings.origins.get(key, "default")
        shown = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
        print(f"{key:20} {'-' if shown in (None, '') else shown!s:30} {origin}")


def _test_only(plan: Plan) -> int:
    if not isinstance(plan.scheduler, Slurm):
        raise SpecError("Asking the scheduler with --test-only:", "there is none here.", "leave --test-only out")
    print(test_only(plan.script, plan.options))
    return 0
