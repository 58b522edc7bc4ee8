"""A job as text for bash: `JobSpec`, `TaskCommand` and the templates in templates/."""

from __future__ import annotations

import math
import shlex
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from cluster_ddp import contract
from cluster_ddp.errors import USAGE_EXIT_STATUS
from cluster_ddp.slurm import port
from cluster_ddp.submission import grids, run_dirs
from cluster_ddp.submission.backends import submitit_task
from cluster_ddp.submission.checks import site_template
from cluster_ddp.submission.notation import seconds
from cluster_ddp.submission.spec import ARRAY_TASK, JobSpec
from cluster_ddp.submission.task_command import TaskCommand

if TYPE_CHECKING:
    from jinja2 import Environment


TEMPLATE = "job.sbatch.j2"
"""The template of a batch script."""
_STOP_SIGNALS = ("USR1", "USR2", "HUP", "INT", "TERM")


def render(
    spec: JobSpec,
    task: TaskCommand,
    *,
    source: str,
    run_prefix: str | None = None,
    run_dir: Path | None = None,
    code: str | None = None,
    venv_archive: Path | None = None,
) -> str:
    """Render the batch script of a job.

    Args:
        spec: the job.
        task: what its tasks run.
        source: what made the script and how to submit it, for its header; one or more lines.
        run_prefix: path of the run directory up to the job's id; None: none, logs go to the folder that calls sbatch.
        run_dir: the run directory, if it does not follow from the job's id.
        code: working folder in the snapshot, relative to the run directory (for an array, to the whole array's).
        venv_archive: the virtual environment as one file, for each node to unpack; None to use it where it is.

    Returns:
        Text for sbatch, ending with a line break. Every value is either checked by `JobSpec` or quoted for the shell.

    Raises:
        SpecError: the site's template can't be used (see `site_template.rendered`).
    """
    values: dict[str, object] = {
        "task": task,
        "source": source.splitlines(),
        "run_prefix": run_prefix,
        "run_dir": run_dir and str(run_dir),
        "code": code,
        "venv_archive": venv_archive and str(venv_archive),
        "command": shlex.join(task.argv) if task.is_function else " ".join(_word(word, spec) for word in task.argv),
        "strides": _strides(spec.grid),
    }
    ours = _rendered(TEMPLATE, spec=spec, **values)
    site = spec.template and Path(spec.template)
    return site_template.rendered(site, _values(spec, **values), environment, ours=ours) if site else ours


def render_local(spec: JobSpec, task: TaskCommand, *, source: str, code: str | None = None) -> str:
    """Render the script that runs a job on this machine. It takes the run directory as its argument. See `render`."""
    return _rendered(
        "local.sh.j2",
        spec=spec,
        task=task,
        source=source.splitlines(),
        run_prefix="",
        code=code,
        venv_archive=None,
        command=shlex.join(task.argv),
        supervisor=shlex.join(submitit_task.module("cluster_ddp.submission.backends.local_supervisor")),
        time_limit_s=None if spec.time is None else seconds(spec.time),
    )


def _rendered(template: str, *, spec: JobSpec, **values: object) -> str:
    return environment().get_template(template).render(_values(spec, **values))


def _values(spec: JobSpec, **values: object) -> dict[str, object]:
    """The variables of a template."""
    ours = {"resume": run_dirs.RESUME, "contract": contract, "port": port, "signals": _signals(spec)}
    return {"spec": spec, **ours, "usage_exit_status": USAGE_EXIT_STATUS, **values}


def _signals(spec: JobSpec) -> list[str]:
    """Signals that a task's shell passes on: those that may stop a training, and the one of --signal."""
    asked = (spec.signal or "").removeprefix("R:").partition("@")[0]
    found = [one.name.removeprefix("SIG") for one in signal.Signals if asked.removeprefix("SIG") in _spellings(one)]
    return list(dict.fromkeys([*_STOP_SIGNALS, *found]))


def _spellings(one: signal.Signals) -> tuple[str, str]:
    return one.name.removeprefix("SIG"), str(one.value)


def templates_folder() -> Path:
    """Return the folder of the templates: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "templates"
    return inside if inside.is_dir() else package.parent / "templates"


def environment(*folders: Path) -> Environment:
    """Return the Jinja environment: our templates, and those in `folders`, which come first."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader([*folders, templates_folder()]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        optimized=False,  # each template is compiled and used once
    )
    made.filters["sh"] = shlex.quote
    return made


def _word(argument: str, spec: JobSpec) -> str:
    """Quote an argument for bash, with its placeholders replaced by variables."""
    variables = {key: f"grid_{key}" for key in spec.grid}
    if spec.array is not None:
        variables[ARRAY_TASK] = "SLURM_ARRAY_TASK_ID"
    text, end = "", 0
    for match in grids.PLACEHOLDER.finditer(argument):
        if match[1] in variables:
            text += _quoted(argument[end : match.start()]) + f'"${{{variables[match[1]]}}}"'
            end = match.end()
    return text + _quoted(argument[end:]) or "''"


def _quoted(text: str) -> str:
    return shlex.quote(text) if text else ""


def _strides(grid: grids.Grid) -> dict[str, int]:
    """How many consecutive array tasks share a key's value. The last key varies fastest."""
    sizes = [len(values) for values in grid.values()]
    return {key: math.prod(sizes[i + 1 :]) for i, key in enumerate(grid)}
