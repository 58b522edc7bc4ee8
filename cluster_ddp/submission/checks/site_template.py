"""A site's own template of the batch script: it must render, and ask for the same nodes, tasks and GPUs as ours."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from cluster_ddp.errors import SpecError, nearest

if TYPE_CHECKING:
    from jinja2 import Environment

# The directives that must match the ranks that the script starts.
_COUNTS = ("nodes", "ntasks", "ntasks-per-node", "gres", "gpus", "gpus-per-node", "gpus-per-task", "cpus-per-gpu")
_SHORT = {"-N": "--nodes", "-n": "--ntasks", "-G": "--gpus"}
_DIRECTIVE = re.compile(r"^#SBATCH\s+(-\w|--[\w-]+)(?:[=\s]+(\S+))?", re.MULTILINE)


def rendered(path: Path, values: Mapping[str, object], environment: Callable[[Path], Environment], *, ours: str) -> str:
    """Render a site's template.

    Args:
        path: the template.
        values: the variables of a template.
        environment: makes a Jinja environment that finds the templates of a folder, and ours.
        ours: what our template makes of the same job.

    Raises:
        SpecError: it can't be read, is not valid, uses an unknown variable, or its counts differ from ours.
    """
    import jinja2

    asked = f"Rendering the template {path}:"
    try:
        text = environment(path.parent).get_template(path.name).render(values)
    except jinja2.TemplateNotFound as error:
        found = f"there is no template {error.name}."
        raise SpecError(
            asked,
            found,
            'to extend our template: {% extends "job.sbatch.j2" %}; to see it: cluster-ddp submit --show-template',
        ) from error
    except jinja2.TemplateSyntaxError as error:
        raise SpecError(
            asked, f"line {error.lineno}: {error.message}.", f"look at it: {shlex.quote(str(path))}"
        ) from error
    except jinja2.UndefinedError as error:
        raise SpecError(asked, *_unknown(str(error), values)) from error
    except (OSError, UnicodeDecodeError, TypeError, ValueError) as error:
        raise SpecError(asked, f"{error}.", f"look at it: {shlex.quote(str(path))}") from error
    text = text if text.endswith("\n") else f"{text}\n"
    _check_counts(asked, _counts(text), _counts(ours))
    return text


def _unknown(said: str, values: Mapping[str, object]) -> tuple[str, str]:
    """What was found, and the hint, for jinja2's words about a name that is not there."""
    name = (re.findall(r"'(\w+)'", said) or [said])[-1]
    if "has no attribute" in said:
        legal = [field.name for field in dataclasses.fields(values["spec"])]  # type: ignore[arg-type]
        return f"{said}.{nearest(name, legal)}", f"a job's fields are {', '.join(legal)}"
    return f"there is no variable {name}.{nearest(name, values)}", f"the variables are {', '.join(sorted(values))}"


def _counts(script: str) -> dict[str, str]:
    """The counts that a script asks for. sbatch takes the last of two equal directives."""
    counts = {}
    for option, value in _DIRECTIVE.findall(script.partition("\nset -eo pipefail")[0]):
        name = _SHORT.get(option, option).removeprefix("--")
        if name in _COUNTS:
            counts[name] = value
    return counts


def _check_counts(asked: str, theirs: Mapping[str, str], ours: Mapping[str, str]) -> None:
    wrong = sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))
    if not wrong:
        return
    lines = "; ".join(f"--{name}={theirs[name]}" if name in theirs else f"no --{name}" for name in wrong)
    needed = " ".join(f"--{name}={ours[name]}" for name in wrong if name in ours) or "none of these"
    found = f"its directives have {lines}, but the ranks of this job need {needed}."
    hint = "let the block directives begin with {{ super() }}, and leave these out; the job's options set them"
    raise SpecError(asked, found, hint)
