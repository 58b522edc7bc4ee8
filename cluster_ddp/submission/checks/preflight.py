"""Checks before a job is submitted: the files that it names must exist, and the cluster must be able to run it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from cluster_ddp.errors import SlurmError, SpecError
from cluster_ddp.protocol import Env
from cluster_ddp.slurm import commands, partitions
from cluster_ddp.submission import grids
from cluster_ddp.submission.backends import submit_env
from cluster_ddp.submission.backends.slurm import Slurm
from cluster_ddp.submission.checks import (
    command_words,
    exposed_tokens,
    feasibility,
    nested_launchers,
    partition_access,
    performance_warnings,
    python_packages,
    script_text,
    shared_runs,
)
from cluster_ddp.submission.checks.performance_warnings import Advice
from cluster_ddp.submission.planning import Plan
from cluster_ddp.submission.spec import JobSpec
from cluster_ddp.waiting_notice import named_if_slow

_NO_MODULES = 99


def check(plan: Plan, *, must_run: bool = True, accepted: Collection[str] = ()) -> list[Advice]:
    """Look for what would make the job fail or wait forever.

    Args:
        plan: the job to submit.
        must_run: False for a job that is only shown: what the cluster lacks is a warning then.
        accepted: codes of what the user accepts although it is refused otherwise.

    Returns:
        Warnings, each with the code that silences it.

    Raises:
        SpecError: the job can't work.
    """
    on_slurm = isinstance(plan.scheduler, Slurm)
    run_dir, runs_dir = plan.run_dir, plan.runs_dir
    warnings = _environment(plan.spec) + exposed_tokens.advise(plan.spec)
    warnings += shared_runs.advise(run_dir.parent if run_dir is not None else runs_dir)
    if plan.function is None:
        if nested_launchers.CODE not in accepted:
            nested_launchers.check(plan.spec)
        warnings += command_words.check(plan.spec)
        warnings += script_text.check(plan.spec, _folder(plan), on_slurm=on_slurm)
    python_packages.check(plan.spec)
    cluster = _ask_cluster(plan.spec, must_run) if on_slurm and (must_run or shutil.which("sinfo")) else _Cluster()
    warnings += [Advice("cluster", text) for text in cluster.warnings]
    warnings += _resumed(plan)
    for name, value in submit_env.ignored_options(os.environ).items():
        say = "--run-dir for a new run directory, --resume for an earlier one" if name == Env.RUN_DIR else "an option"
        text = f"{name}={value} in your environment is ignored. Use {say}, or cluster.toml."
        warnings.append(Advice("environment", text))
    if on_slurm:
        folders = [run_dir or runs_dir, Path.cwd()]
        warnings += performance_warnings.advise(
            plan.spec, cluster.groups, folders=folders, requeue_default=cluster.requeue_default
        )
    return warnings


def _folder(plan: Plan) -> Path:
    """The folder with the code that the job will run."""
    earlier, code = plan.earlier, plan.code
    return earlier.run_dir / code if earlier is not None and code is not None else Path.cwd()


class _Cluster(NamedTuple):
    """What the cluster says."""

    groups: Sequence[partitions.NodeGroup] = ()
    requeue_default: bool | None = None
    warnings: Sequence[str] = ()


def _ask_cluster(spec: JobSpec, must_run: bool) -> _Cluster:
    try:
        groups = partitions.read(cluster=_cluster(spec))
        config = commands.run(["scontrol", "show", "config"])
    except SlurmError as error:
        return _Cluster(warnings=[f"It was not checked whether the cluster can run the job: {error.found}"])
    requeue_default = re.search(r"^JobRequeue\s*= 1\s*$", config, re.MULTILINE) is not None
    try:
        _check_array_size(spec, config)
        warnings = feasibility.check(spec, groups)
        asked = list(feasibility.asked_partitions(spec, groups))
        warnings += partition_access.check(spec, asked, cluster=_cluster(spec))
    except SpecError as error:
        if must_run:
            raise
        warnings = [f"{error.asked} {error.found} Hint: {error.hint}"]
    return _Cluster(groups, requeue_default, warnings)


def _check_array_size(spec: JobSpec, config: str) -> None:
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", config, re.MULTILINE)
    if spec.array is None or match is None or grids.last(spec.array) < int(match[1]):
        return
    found = f"the highest task number on this cluster is {int(match[1]) - 1} (MaxArraySize = {match[1]})."
    hint = "submit several smaller arrays, each numbered from 0"
    raise SpecError(f"An array {spec.array}:", found, hint).about("array")


def _resumed(plan: Plan) -> list[Advice]:
    """Warn of a resumed run without a checkpoint."""
    earlier = plan.earlier
    if earlier is None or any(earlier.run_dir.glob("checkpoints/*.pt")):
        return []
    text = f"There is no checkpoint in {earlier.run_dir}: a training that uses cluster_ddp starts from the beginning."
    return [Advice("no-checkpoint", text)]


def _cluster(spec: JobSpec) -> str | None:
    options = (option.partition("=") for option in spec.sbatch_options)
    return next((value for name, _, value in options if name == "--clusters"), None)


def _environment(spec: JobSpec) -> list[Advice]:
    if spec.venv is not None and not Path(spec.venv, "bin", "activate").is_file():
        made = next((str(path) for path in Path(spec.venv).parents if (path / "bin" / "activate").is_file()), None)
        hint = f"make it: python -m venv {shlex.quote(spec.venv)}; or name another: --venv PATH"
        raise SpecError(
            f"Activating the virtual environment {spec.venv}:",
            "there is no bin/activate in it." if Path(spec.venv).exists() else "there is no such folder.",
            hint if made is None else f"--venv {shlex.quote(made)}",
        ).about("venv")
    if spec.container is not None and "://" not in spec.container and not Path(spec.container).exists():
        raise SpecError(
            f"Running in the container {spec.container}:",
            "there is no such file.",
            f"make one: apptainer pull {spec.container} docker://IMAGE",
        ).about("container")
    for bind in spec.container_binds:
        if not Path(bind.split(":")[0]).exists():
            raise SpecError(
                f"Binding {bind} into the container:", "there is no such folder here.", "change --container-binds"
            )
    for overlay in spec.container_overlays:
        if not Path(overlay).exists():
            raise SpecError(f"Overlaying {overlay}:", "there is no such file here.", "change --container-overlays")
    return _conda(spec.conda_env) + _modules(spec.modules)


def _conda(name: str | None) -> list[Advice]:
    if name is None:
        return []
    if shutil.which("conda") is None:
        raise SpecError(
            f"Activating the conda environment {name}:",
            "there is no conda on the PATH.",
            "load conda's module in your shell first, or use --venv",
        ).about("conda_env")
    listing = _words(["conda", "env", "list"])
    known = {word for line in listing.splitlines() if not line.startswith("#") for word in line.split()} - {"*"}
    if name in known or str(Path(name).expanduser().absolute()) in known or (Path(name) / "conda-meta").is_dir():
        return []
    raise SpecError(
        f"Activating the conda environment {name}:",
        f"there is no such environment; conda env list shows: {', '.join(sorted(known)) or 'none'}.",
        f"make it: conda create {'--prefix' if '/' in name else '--name'} {name} python",
    ).about("conda_env")


def _modules(modules: tuple[str, ...]) -> list[Advice]:
    if not modules:
        return []
    load = f"type module >/dev/null 2>&1 || exit {_NO_MODULES}; module load {' '.join(modules)}"
    try:
        with named_if_slow("module load to answer"):
            done = subprocess.run(
                ["bash", "-lc", load], capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL
            )
    except subprocess.TimeoutExpired:
        return [Advice("modules", f"The check of the modules {' '.join(modules)} took longer than 30 s: not checked.")]
    if done.returncode == _NO_MODULES:
        return [
            Advice("modules", "There is no module command here. Whether the nodes have these modules was not checked.")
        ]
    # Environment Modules before 5 always ends with status 0.
    if done.returncode != 0 or "unable to locate" in done.stderr.lower():
        raise SpecError(
            f"Loading the modules {' '.join(modules)}:", done.stderr.strip(), "look at what there is: module avail"
        )
    return []


def _words(command: list[str]) -> str:
    try:
        with named_if_slow(f"{command[0]} to answer"):
            return subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SpecError(f"Running {' '.join(command)}:", str(error), "try it in your shell") from error
