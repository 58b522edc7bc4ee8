"""A submission from the command line: from its words to a job, with warnings."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from cluster_ddp.argument_parser import HELP_ALL
from cluster_ddp.errors import SpecError, nearest
from cluster_ddp.submission import grids, planning, render, resume, run_dirs
from cluster_ddp.submission.checks import command_mistakes, preflight
from cluster_ddp.submission.checks.job_warnings import CODES, OTHER_CODES, Advice
from cluster_ddp.submission.cli import activated_env, options, settings_files, settings_keys
from cluster_ddp.submission.planning import Plan
from cluster_ddp.submission.spec import JobSpec

_TRAINING = ("-m", "cluster_ddp.train")


class CheckTraining(Protocol):
    """Checks the training that is submitted if no command is given."""

    def __call__(self, options: Sequence[str], grid: grids.Grid, *, with_data: bool) -> None:
        """Check its options, and that the data is there. Raises ClusterDDPError, or exits, for a wrong option."""


def run(
    argv: Sequence[str],
    *,
    program: str,
    description: str,
    submit: Callable[[Plan, bool], int],
    check_training: CheckTraining | None = None,
    others: Sequence[str] = (),
) -> int:
    """Parse the command line, plan, check; then show the plan, ask Slurm, or submit it. Returns the exit status.

    Args:
        argv: the words of the command line.
        program: name of the command, for messages.
        description: text for --help.
        submit: submits a plan, follows the job if its second argument is true, and returns the exit status.
        check_training: checks the training that is submitted if no command is given; None where one is always given.
        others: options of the verb beside those of a submission, for suggestions.

    Raises:
        ClusterDDPError: the job can't be submitted, or can't work. No job is left behind, unless the error names it.
    """
    asked = _Asked.parse(argv, program, description, others)
    if asked.parsed.show_template:
        print((render.templates_folder() / render.TEMPLATE).read_text(), end="")
        return 0
    if asked.parsed.show_config:
        _show_config(asked)
        return 0
    plan = _plan(asked, check_training, source=f"Submitted by: {program} {shlex.join(argv)}")
    _warn(asked, plan, check_training)
    if asked.parsed.dry_run:
        print(plan, end="")
        return 0
    if asked.parsed.test_only:
        print(plan.scheduler.test_only(plan.script, plan.options))
        return 0
    return submit(plan, asked.parsed.watch)


class _Asked(NamedTuple):
    """A parsed command line, with the settings files."""

    parsed: argparse.Namespace
    given: Mapping[str, Any]
    """The options that were given."""
    rest: list[str]
    """The options of the training that is submitted without a command."""
    command: list[str] | None
    """The words after the two dashes; None without them."""
    settings: settings_files.Settings
    values: dict[str, Any]
    """The settings, overridden by the options, as JobSpec takes them."""
    earlier: resume.Earlier | None
    """The run to resume."""

    @property
    def activated(self) -> activated_env.Activated | None:
        """The activated environment, if it is not cluster-ddp's own. A function runs in the one that loads it."""
        return None if self.command is None else activated_env.find(self.command, self.values, os.environ)

    @staticmethod
    def parse(argv: Sequence[str], program: str, description: str, others: Sequence[str]) -> _Asked:
        own, command = options.split(argv)
        asks = not {"-h", "--help", HELP_ALL}.isdisjoint(own)
        parser = options.parser(program, description, with_texts=asks, daily=not others)
        parsed, rest = parser.parse_known_args(own)
        if command is not None:
            options.refuse(rest, [*others, *parser.option_names()], parser.shows_all, () if others else command)
        given = {key: value for key, value in vars(parsed).items() if value is not None}
        accept = settings_files.CODE in (parsed.accept or ())
        settings = settings_files.load(parsed.profile, folder=Path.cwd(), env=os.environ, accept=accept)
        earlier = None
        if parsed.resume is not None:
            earlier = resume.find(parsed.resume, Path({"runs_dir": "runs", **settings.values, **given}["runs_dir"]))
            settings = _settings_of(earlier, settings, parsed.profile)
        return _Asked(parsed, given, rest, command, settings, _values(settings, given), earlier)


def _warn(asked: _Asked, plan: Plan, check_training: CheckTraining | None) -> None:
    """Print the warnings that are not accepted. Raises ClusterDDPError for what can't work."""
    for code in asked.values.get("accept", ()):
        if code not in (legal := (*CODES, *OTHER_CODES)):
            found = f"there is no warning with this code.{nearest(code, legal)}"
            raise SpecError(f"Accepting {code!r}:", found, f"the codes are {', '.join(sorted(legal))}")
    try:
        advice = _advice(asked, plan)
        if not asked.parsed.no_check and not asked.parsed.dry_run:
            _check(asked, plan.spec, check_training, with_data=True)
    except SpecError as error:
        raise _with_origins(error, asked) from error
    for one in advice:
        if one.code not in asked.values.get("accept", ()):
            print(f"warning: {one.text} (silence: --accept {one.code})", file=sys.stderr)


def _advice(asked: _Asked, plan: Plan) -> list[Advice]:
    """Warnings before the submission. Raises ClusterDDPError for what can't work."""
    advice = [*options.advise(asked.given, plan.spec)]
    advice += command_mistakes.advise(asked.command or (), plan.spec.grid)
    advice += [active.advice() for active in (asked.activated,) if active]
    if not asked.parsed.no_check:
        advice += preflight.check(plan, must_run=not asked.parsed.dry_run, accepted=asked.values.get("accept", ()))
    return advice


def _with_origins(error: SpecError, asked: _Asked) -> SpecError:
    """The error, with the places of the settings that it is about: the user may not know that they are set."""
    named = [key for key in asked.settings.values if key in error.fields and key not in asked.given]
    places = [f"{key} is set in {settings_files.line_of(key, asked.settings.origins[key])}" for key in named]
    if not places:
        return error
    return SpecError(error.asked, f"{error.found} ({'; '.join(places)})", error.hint)


class _Work(NamedTuple):
    """What to run: a command, or a function."""

    name: str
    command: tuple[str, ...]
    function: Callable[..., Any] | None = None


def _work(asked: _Asked) -> _Work:
    """The command; without one, what the earlier job ran, in its folder; without that, the training of mnist/."""
    if asked.command is not None:
        return _Work(options.job_name(asked.command), tuple(asked.command))
    _refuse_no_options(asked.rest)
    if asked.earlier is None:
        return _Work("mnist", (_python(asked.values), *_TRAINING, *asked.rest))
    spec = asked.earlier.enter()
    if asked.rest and spec.command[1:3] != _TRAINING:
        hint = f"{run_dirs.resume_command(asked.earlier.run_dir)} -- {shlex.join([*spec.command, *asked.rest])}"
        raise SpecError(f"Resuming with {asked.rest[0]}:", "there is no such option here.", hint)
    return _Work(spec.name, (*spec.command, *asked.rest), asked.earlier.function())


def _check(asked: _Asked, spec: JobSpec, check_training: CheckTraining | None, *, with_data: bool) -> None:
    """Check the options of the training that is submitted if no command is given."""
    if asked.command is None and check_training is not None and spec.command[1:3] == _TRAINING:
        check_training(spec.command[3:], spec.grid, with_data=with_data)


def _python(values: Mapping[str, Any]) -> str:
    """The Python of the environment that the job loads; without one, this one."""
    names = ("venv", "conda_env", "container", "container_image")
    return "python" if planning.own_venv() or any(values.get(name) for name in names) else sys.executable


def _refuse_no_options(words: Sequence[str]) -> None:
    """Refuse, in place of the training's options, a command without dashes, and options of sbatch."""
    if words and not words[0].startswith("-"):
        shown = shlex.join(words)
        started = f"python {shown}" if words[0].endswith(".py") else shown
        hint = f"cluster-ddp submit [OPTIONS] -- {started}"
        raise SpecError(f"Submitting {shown}:", "a command comes after two dashes.", hint)
    options.refuse_sbatchs(words)


def _plan(asked: _Asked, check_training: CheckTraining | None, *, source: str) -> Plan:
    work, parsed, values, earlier = _work(asked), asked.parsed, asked.values, asked.earlier
    job = settings_keys.fields(values)
    if (active := asked.activated) is not None and not active.why_not:
        job[active.setting] = active.path
    spec = JobSpec(**{"name": work.name, **job, "command": work.command})
    _check(asked, spec, check_training, with_data=False)
    return Plan(
        spec=spec,
        function=work.function,
        local=earlier is not None and earlier.local if parsed.local is None else parsed.local,
        runs_dir=Path(values.get("runs_dir", "runs")),
        run_dir=parsed.run_dir and Path(parsed.run_dir),
        earlier=earlier,
        code=earlier.code if earlier is not None and asked.command is None else None,
        take_snapshot=parsed.snapshot,
        source=source,
        must_run=not parsed.dry_run,
    )


def _settings_of(earlier: resume.Earlier, files: settings_files.Settings, name: str | None) -> settings_files.Settings:
    """The earlier job's settings instead of those in the files; with --profile, the files' settings override them."""
    if earlier.spec is None:
        return files
    keys = [key for key in settings_keys.kinds() if key not in settings_keys.SUBMISSION_KEYS and key != "array"]
    before = {key: value for key in keys if (value := getattr(earlier.spec, key)) is not None}
    before["nodes"] = earlier.spec.node_range
    now = {key: value for key, value in files.values.items() if name is not None or key == "accept"}
    origins = dict.fromkeys(before, f"job {earlier.job}") | {key: files.origins[key] for key in now}
    return settings_files.Settings(values=settings_files.overlay(before, now), origins=origins)


def _values(settings: settings_files.Settings, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the files, overridden by the command line, as JobSpec takes them."""
    values = settings_files.overlay(settings.values, {key: given[key] for key in settings_keys.kinds() if key in given})
    if "array" in given:
        values["grid"], values["array"] = grids.parse(given["array"])
    if not values.get("container") and not values.get("container_image") and "container_binds" not in given:
        values.pop("container_binds", None)  # binds in the settings apply only to a container
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def _show_config(asked: _Asked) -> None:
    for key, default in settings_keys.defaults().items():
        value = asked.values.get(key, default)
        origin = "command line" if key in asked.given else asked.settings.origins.get(key, "default")
        shown = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
        print(f"{key:20} {'-' if shown in (None, '') else shown!s:30} {origin}")
