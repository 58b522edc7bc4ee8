"""A job's batch script as text: `JobSpec` and the template templates/job.sbatch.j2."""

from __future__ import annotations

import shlex
from pathlib import Path

from cluster_ddp.launch.spec import ARRAY_TASK_PLACEHOLDER, JobSpec
from cluster_ddp.slurm import port


def render(spec: JobSpec, *, source: str) -> str:
    """The batch script of a job.

    Args:
        spec: the job.
        source: what made the script and how to submit it, for its header; one or more lines.

    Returns:
        Text for sbatch, ending with a line break. Every value is either checked by `JobSpec` or quoted for the shell.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(templates_folder()),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["sh"] = shlex.quote
    template = environment.get_template("job.sbatch.j2")
    return template.render(
        spec=spec,
        source=source.splitlines(),
        output=spec.output or ("%x-%A_%a.out" if spec.array else "%x-%j.out"),
        command=" ".join(map(_word, spec.command)),
        port=port,
    )


def templates_folder() -> Path:
    """The templates: in the wheel inside the package, in a checkout beside it."""
    package = Path(__file__).parents[1]
    inside = package / "templates"
    return inside if inside.is_dir() else package.parent / "templates"


def _word(argument: str) -> str:
    """An argument quoted for bash, the array placeholder in it replaced by the variable."""
    parts = (shlex.quote(part) if part else "" for part in argument.split(ARRAY_TASK_PLACEHOLDER))
    return '"${SLURM_ARRAY_TASK_ID}"'.join(parts) or "''"
