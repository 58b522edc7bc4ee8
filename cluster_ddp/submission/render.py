"""A job as text for bash: `JobSpec` and the templates in templates/. What it does is in `cluster_ddp.agent`."""

from __future__ import annotations

import functools
import shlex
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster_ddp.agent import launch_options
from cluster_ddp.agent.launch_options import AgentOptions, RankOptions
from cluster_ddp.run.names import File
from cluster_ddp.submission.checks import site_template
from cluster_ddp.submission.spec import JobSpec
from cluster_ddp.submission.validation import seconds

if TYPE_CHECKING:
    from jinja2 import Environment


TEMPLATE = "job.sbatch.j2"
"""The template of a batch script."""


def agent_options(spec: JobSpec, *, function: bool = False, **more: Any) -> AgentOptions:
    """Return what the agent needs of a specification, with further fields of `AgentOptions` or other values of them."""
    values = {one.name: getattr(spec, one.name) for one in fields(RankOptions)} | more
    if spec.max_nodes is not None:  # the job has no number of tasks then
        values = {"nodes": spec.node_range, "ranks_per_node": spec.ranks_per_node, **values}
    grid = {} if function else {key: list(grid) for key, grid in spec.grid.items()}
    return AgentOptions(**values, function=function, grid=grid)


def render(spec: JobSpec, asked: AgentOptions, *, source: str, agent: str = "") -> str:
    """Render the batch script of a job.

    Args:
        spec: the job.
        asked: what the agent is to do.
        source: what made the script and how to submit it, for its header; one or more lines.
        agent: the frozen agent, as a word for bash; empty for the one that is installed where the job runs.

    Returns:
        Text for sbatch, ending with a line break. Every value is either checked by `JobSpec` or quoted for the shell.

    Raises:
        SpecError: the site's template can't be used (see `site_template.rendered`).
    """
    values = _values(spec, asked, source, agent)
    ours = environment().get_template(TEMPLATE).render(values)
    site = spec.template and Path(spec.template)
    return site_template.rendered(site, values, environment, ours=ours) if site else ours


def render_local(spec: JobSpec, asked: AgentOptions, *, source: str, code: str | None) -> str:
    """Render the script that runs a job on this machine. It takes the run directory as its argument. See `render`.

    Args:
        code: working folder in the snapshot, relative to the run directory; None without one.
    """
    limit_s = None if spec.time is None else seconds(spec.time)
    asked = replace(asked, ranks=spec.world_size, cpus_per_task=spec.cpus_per_task, time_limit_s=limit_s)
    asked = replace(asked, nodes=None, ranks_per_node=None)  # of a range that has one node, too
    values = _values(spec, asked, source, f'"$1"/{File.AGENT}')
    in_run_dir = ['--run-dir="$1"', *([] if code is None else [f'--code="$1"/{shlex.quote(code)}'])]
    values |= {"options": [*in_run_dir, *values["options"]], "command": shlex.join(asked.command)}
    return environment().get_template("local.sh.j2").render(values)


def _values(spec: JobSpec, asked: AgentOptions, source: str, agent: str) -> dict[str, Any]:
    """The variables of a template."""
    words = launch_options.words(asked)
    at = words.index("--")
    return {
        "spec": spec,
        "source": source.splitlines(),
        "agent": agent,
        "python": sys.executable,
        "options": [*map(shlex.quote, words[:at])],
        "command": shlex.join(words[at + 1 :]) + ("" if asked.function else ' "$@"'),
    }


def templates_folder() -> Path:
    """Return the folder of the templates: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "templates"
    return inside if inside.is_dir() else package.parent / "templates"


@functools.cache
def environment(*folders: Path) -> Environment:
    """Return the Jinja environment: our templates, and those in `folders`, which come first.

    It is kept with the compiled templates: a scaling study renders many scripts. Jinja sees when a file changes.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader([*folders, templates_folder()]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        optimized=False,  # a command compiles a template and uses it a few times
    )
    made.filters["sh"] = shlex.quote
    return made
