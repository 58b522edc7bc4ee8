"""Checks before a job is submitted: the files that it names must exist, and the cluster must be able to run it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from cluster_ddp.errors import SlurmError, SpecError, counted
from cluster_ddp.run.names import Env
from cluster_ddp.slurm import commands, partitions
from cluster_ddp.submission import grids
from cluster_ddp.submission.backends.slurm import Slurm, ignored_options
from cluster_ddp.submission.checks import (
    account_limits,
    command_mistakes,
    feasibility,
    job_environment,
    job_warnings,
    script_mistakes,
)
from cluster_ddp.submission.checks.job_warnings import Advice
from cluster_ddp.submission.pack import jobs as pack_jobs
from cluster_ddp.submission.planning import Plan
from cluster_ddp.submission.spec import JobSpec


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
    warnings = job_environment.check(plan.spec) + job_warnings.of_secrets(plan.spec)
    warnings += job_warnings.of_shared_runs(plan.folder.parent)
    if plan.function is None:
        spec = plan.spec
        if command_mistakes.CODE not in accepted:
            size = {"tasks": spec.world_size, "gpus": spec.gpus_per_node}
            command_mistakes.check_launcher(spec.command, **size, is_submission=True)
        warnings += command_mistakes.check_program(plan.spec)
        warnings += script_mistakes.check(plan.spec, _folder(plan), on_slurm=on_slurm)
    job_environment.check_packages(plan.spec)
    cluster = _ask_cluster(plan, must_run) if on_slurm and (must_run or shutil.which("sinfo")) else _Cluster()
    warnings += [Advice("cluster", text) for text in cluster.warnings]
    warnings += _resumed(plan)
    for name, value in ignored_options(os.environ).items():
        say = "--run-dir for a new run directory, --resume for an earlier one" if name == Env.RUN_DIR else "an option"
        text = f"{name}={value} in your environment is ignored. Use {say}, or cluster.toml."
        warnings.append(Advice("environment", text))
    if on_slurm:
        folders = [plan.folder if plan.is_chosen else plan.folder.parent, Path.cwd()]
        warnings += job_warnings.advise(
            plan.for_slurm, cluster.groups, folders=folders, requeue_default=cluster.requeue_default
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


def _ask_cluster(plan: Plan, must_run: bool) -> _Cluster:
    spec = plan.for_slurm
    try:
        groups = partitions.read(cluster=_cluster(spec))
        config = commands.run(["scontrol", "show", "config"])
    except SlurmError as error:
        return _Cluster(warnings=[f"It was not checked whether the cluster can run the job: {error.found}"])
    requeue_default = re.search(r"^JobRequeue\s*= 1\s*$", config, re.MULTILINE) is not None
    try:
        _check_array_size(spec, config)
        if re.search(r"^AccountingStorageEnforce\s*=.*\blimits\b", config, re.MULTILINE):
            account_limits.check_chain(spec)
        warnings = _check_cluster(plan, groups)
        asked = list(feasibility.asked_partitions(spec, groups))
        warnings += account_limits.check_accounts(spec, asked, cluster=_cluster(spec))
    except SpecError as error:
        if must_run:
            raise
        warnings = [f"{error.asked} {error.found} Hint: {error.hint}"]
    return _Cluster(groups, requeue_default, warnings)


def _check_cluster(plan: Plan, groups: Sequence[partitions.NodeGroup]) -> list[str]:
    """Compare a job with the cluster. Raises SpecError: no node has what is asked for."""

    def fits(spec: JobSpec) -> bool:
        try:
            feasibility.check(spec, groups)
        except SpecError:
            return False
        return True

    try:
        return feasibility.check(plan.for_slurm, groups)
    except SpecError as error:
        raise (pack_jobs.explained(plan.spec, error, fits) if plan.holders else error) from error


def _check_array_size(spec: JobSpec, config: str) -> None:
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", config, re.MULTILINE)
    if match is None:
        return
    most = int(match[1]) - 1
    found = f"the highest task number on this cluster is {most} (MaxArraySize = {match[1]})."
    if spec.array is not None and grids.last(spec.array) > most:
        hint = "submit several smaller arrays, each numbered from 0"
        raise SpecError(f"An array {spec.array}:", found, hint).about("array")
    if spec.chain and spec.max_requeues > most:
        asked = f"A chain of up to {counted(spec.max_requeues + 1, 'job')}, an array:"
        raise SpecError(asked, found, f"--max-requeues {most}").about("chain", "max_requeues")


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
