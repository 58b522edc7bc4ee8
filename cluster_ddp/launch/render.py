"""A job as text for bash: `JobSpec` and the templates in templates/."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from cluster_ddp import contract
from cluster_ddp.launch import grids, parse_python_command, run_dirs
from cluster_ddp.launch.spec import ARRAY_TASK, JobSpec, seconds
from cluster_ddp.slurm import port

if TYPE_CHECKING:
    from jinja2 import Environment

# A job without a time limit, where a number is needed.
_FOR_EVER_S = 10 * 365 * 24 * 3600


def render(
    spec: JobSpec,
    *,
    source: str,
    run_prefix: str | None = None,
    run_dir: Path | None = None,
    runner: tuple[str, ...] | None = None,
    code: str | None = None,
) -> str:
    """The batch script of a job.

    Args:
        spec: the job.
        source: what made the script and how to submit it, for its header; one or more lines.
        run_prefix: path of the run directory up to the job's id; None for a script that writes where it is submitted.
        run_dir: the run directory, where it does not follow from the job's id.
        runner: what each task runs instead of the command, which a pickle holds that it loads.
        code: the snapshot to run in, relative to the run directory.

    Returns:
        Text for sbatch, ending with a line break. Every value is either checked by `JobSpec` or quoted for the shell.
    """
    template = _environment().get_template("job.sbatch.j2")
    return template.render(
        spec=spec,
        source=source.splitlines(),
        run_prefix=run_prefix,
        run_dir=run_dir and str(run_dir),
        resume=run_dirs.RESUME,
        code=code,
        pickled=runner is not None,
        command=shlex.join(runner) if runner else " ".join(_word(word, spec) for word in spec.command),
        strides=_strides(spec.grid),
        port=port,
        contract=contract,
        interpreter_words=_interpreter_words(spec),
        ranks='"$LOCAL_WORLD_SIZE"',
        imports_us=parse_python_command.imports_us(spec.command),
    )


def render_local(spec: JobSpec, *, source: str, runner: tuple[str, ...], code: str | None = None) -> str:
    """The script that runs a job on this machine; arguments and result as of `render`."""
    time_limit_s = seconds(spec.time) if spec.time is not None else None
    return (
        _environment()
        .get_template("local.sh.j2")
        .render(
            spec=spec,
            source=source.splitlines(),
            run_prefix="",
            resume=run_dirs.RESUME,
            contract=contract,
            code=code,
            command=shlex.join(runner),
            time_limit_s=time_limit_s or _FOR_EVER_S,
        )
    )


def task_command(spec: JobSpec, command: tuple[str, ...]) -> tuple[str, ...]:
    """What a task of a pickled job runs: the command, inside the container and under the launcher that `spec` names."""
    if spec.container is None and spec.launcher == "srun":
        return command
    template = _environment().get_template("task.sh.j2")
    text = template.render(
        spec=spec,
        interpreter_words=_interpreter_words(spec),
        ranks=spec.gpus_per_node,
        contract=contract,
        imports_us=parse_python_command.imports_us(spec.command),
    )
    return ("bash", "-c", text.strip(), "bash", *command)


def templates_folder() -> Path:
    """The templates: in the wheel inside the package, in a checkout beside it."""
    package = Path(__file__).parents[1]
    inside = package / "templates"
    return inside if inside.is_dir() else package.parent / "templates"


def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(templates_folder()),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        optimized=False,  # each template is compiled for one use
    )
    environment.filters["sh"] = shlex.quote
    return environment


def _interpreter_words(spec: JobSpec) -> int:
    return parse_python_command.interpreter_words(spec.command) if spec.launcher == "fork" else 0


def _word(argument: str, spec: JobSpec) -> str:
    """An argument quoted for bash, its placeholders replaced by variables."""
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
    """How many array tasks in a row share a key's value: the last key varies fastest."""
    sizes = [len(values) for values in grid.values()]
    return {key: math.prod(sizes[i + 1 :]) for i, key in enumerate(grid)}
