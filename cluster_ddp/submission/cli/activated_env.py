"""The Python environment of a command that names none: the one that is activated in the shell that submits.

It is not that of cluster-ddp itself if that was installed on its own (pipx, uv tool), or is called by its path.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cluster_ddp.agent.command_program import program_words
from cluster_ddp.submission.checks.job_warnings import Advice

_NAMED = ("venv", "conda_env", "container", "container_image")


class Activated(NamedTuple):
    """An activated environment that is not cluster-ddp's own."""

    setting: str
    """The setting that names it: "venv" or "conda_env"."""
    path: str
    """Its folder."""
    why_not: str = ""
    """Why a job does not use it; empty if it does."""

    def advice(self) -> Advice:
        """Which one the job uses, and how to use the other."""
        own, here = f"cluster-ddp's own environment, {sys.prefix}", f"the activated environment {self.path}"
        if self.why_not:
            text = f"The job uses {own}, not {here}: {self.why_not}"
        else:
            text = f"The job uses {here}, not {own}. For that: --venv {sys.prefix}"
        return Advice("activated", text)


def find(command: Sequence[str], values: Mapping[str, Any], env: Mapping[str, str]) -> Activated | None:
    """Find the activated environment, if no other is named, and cluster-ddp's own is another.

    An environment counts as activated if its Python is the first on the PATH.

    Args:
        command: the job's. The path of a program of cluster-ddp's own environment names that one.
        values: the settings, with the options of the command line.
        env: the environment of the shell.
    """
    own, python = Path(sys.prefix), shutil.which("python", path=env.get("PATH", ""))
    if python is None or sys.prefix == sys.base_prefix or any(values.get(name) for name in _NAMED):
        return None
    if any(Path(word).parent == own / "bin" for word in program_words(command)[:1]):
        return None
    for setting, variable in (("venv", "VIRTUAL_ENV"), ("conda_env", "CONDA_PREFIX")):
        path = env.get(variable, "")
        if path and Path(python).parent == Path(path, "bin") and Path(path).resolve() != own.resolve():
            return Activated(setting, path, _why_not(setting, path, env))
    return None


def _why_not(setting: str, path: str, env: Mapping[str, str]) -> str:
    if setting == "venv":
        return ""
    if env.get("CONDA_DEFAULT_ENV") == "base":  # conda activates it in each shell, whether it is meant or not
        return "conda activates its base in every shell. If you mean it: --conda-env base"
    if shutil.which("conda", path=env.get("PATH", "")) is None:
        return f"there is no conda on the PATH to activate it with. Instead: --setup 'export PATH={path}/bin:$PATH'"
    return ""
