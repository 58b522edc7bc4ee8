"""What the fields of a job say of each other: those that exclude, need or contradict others."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields

from cluster_ddp.agent.launch_options import RankOptions, mebibytes, node_range
from cluster_ddp.errors import TopologyError
from cluster_ddp.option_form import default_of, flag, form_of
from cluster_ddp.slurm import hostlist
from cluster_ddp.submission.job_options import JobOptions
from cluster_ddp.submission.validation import SET_ELSEWHERE, field_error, option_words

ALTERNATIVES = (("venv", "conda_env"), ("container", "container_image"))
"""Pairs of fields that exclude each other."""

EXPEDITE = "--requeue=expedite"
"""The one form of --requeue with a value, from Slurm 25.11 on; a word of `JobSpec.sbatch_options`."""


def node_counts(value: object) -> dict[str, object]:
    """Return the fields of a job that --nodes, or the key nodes of cluster.toml, sets: `nodes` and `max_nodes`.

    Args:
        value: a whole number, or a text such as 2 or 2-8.

    Raises:
        SpecError: it is another text.
    """
    if not isinstance(value, str):
        return {"nodes": value, "max_nodes": None}
    try:
        least, most = node_range(value)
    except ValueError as error:
        ends = re.fullmatch(r"\s*(\d+)\s*(?:-|:|,|\.\.|–|to)\s*(\d+)\s*", value, re.ASCII)
        meant = "-".join(map(str, sorted(max(1, int(end)) for end in ends.groups()))) if ends else None
        legal = "a whole number of 1 or more, or a range of them, MIN-MAX, such as 2-8"
        raise field_error("nodes", value, legal, meant=meant) from error
    return {"nodes": least, "max_nodes": most}


def check(asked: JobOptions) -> None:
    """Check whether fields of a `JobSpec` contradict each other. Each is legal by itself.

    Raises:
        SpecError: one contradicts another. The error names it.
    """
    _check_choices(asked)
    _check_range(asked)
    _check_chain(asked)
    _check_sbatch_options(asked)
    check_ranks(asked)
    _check_max_mem(asked)


def _check_choices(asked: JobOptions) -> None:
    if asked.gpus_per_node % asked.gpus_per_task:
        raise field_error("gpus_per_task", asked.gpus_per_task, f"a divisor of gpus_per_node={asked.gpus_per_node}")
    for one, other in ALTERNATIVES:
        if getattr(asked, one) is not None and (value := getattr(asked, other)) is not None:
            hint = f"leave out {flag(one)} or {flag(other)}"
            raise field_error(other, value, f"left out when {one} is given", hint=hint)
    if asked.exclude is not None:
        _check_exclude(asked.exclude)
    if asked.doctor and (asked.container or asked.container_image):
        hint = "leave out --doctor; inside the container: cluster-ddp doctor --container …"
        raise field_error("doctor", True, "left out with a container", hint=hint)


def _check_range(asked: JobOptions) -> None:
    if asked.max_nodes is None:
        return
    if asked.max_nodes < asked.nodes:
        meant = f"{asked.max_nodes}-{asked.nodes}"
        raise field_error("nodes", f"{asked.nodes}-{asked.max_nodes}", "MIN-MAX, the smaller number first", meant=meant)
    if asked.spare_nodes:
        hint = f"leave out --spare-nodes; for fewer nodes than {asked.nodes}, lower MIN"
        legal = "0 with a range of nodes: after the loss of a node, the job continues with those that are left"
        raise field_error("spare_nodes", asked.spare_nodes, legal, hint=hint)


def _check_chain(asked: JobOptions) -> None:
    if not asked.chain:
        return
    if asked.array is not None or asked.grid:
        hint = "submit one job for each task, or --no-chain: each task is requeued"
        raise field_error("chain", True, "left out with an array", hint=hint)
    if asked.requeue or EXPEDITE in asked.sbatch_options:
        hint = "--requeue, where jobs may be requeued; else --chain --no-requeue"
        raise field_error("chain", True, "left out with requeue: Slurm would start the same job twice", hint=hint)


def _check_max_mem(asked: JobOptions) -> None:
    if mebibytes(asked.max_mem) and asked.requeue is False and not asked.chain:
        hint = "leave out --no-requeue or --max-mem"
        raise field_error("max_mem", asked.max_mem, "left out without a requeue, which raises the memory", hint=hint)


def _check_sbatch_options(asked: JobOptions) -> None:
    for option in asked.sbatch_options:
        name = option[2:].partition("=")[0]
        if option == EXPEDITE and asked.requeue is not False:
            continue
        if any(ours.startswith(name) for ours in SET_ELSEWHERE):  # sbatch takes abbreviations
            own = name.replace("-", "_") in {field.name for field in fields(asked)}
            hint = f"--{option[2:].replace('=', ' ')}, without --sbatch-options" if own else "leave it out"
            raise field_error("sbatch_options", option, "an option that cluster-ddp does not set itself", hint=hint)


def check_ranks(asked: RankOptions) -> None:
    """Check what the options of a `JobSpec`, or of `launch`, need of each other.

    Raises:
        SpecError: one is given without another that it needs, or no shell could split the words for later starts.
    """
    for one in fields(asked):
        name, value, needs = one.name, getattr(asked, one.name), form_of(one).needs
        if needs and value != default_of(one) and not any(getattr(asked, other) for other in needs):
            other, example = next(iter(needs.items()))
            hint = f"{option_words(other, example)} {option_words(name, value)}; or leave out {flag(name)}"
            raise field_error(name, value, f"left out without {' or '.join(needs)}", hint=hint)
    try:
        shlex.split(asked.restart_args)
    except ValueError as error:
        legal = f"words that a shell could split: {str(error).lower()}"
        raise field_error("restart_args", asked.restart_args, legal) from error


def _check_exclude(nodes: str) -> None:
    try:
        if not hostlist.expand(nodes):
            raise field_error("exclude", nodes, "at least one node")
    except TopologyError as error:
        raise field_error("exclude", nodes, f"a hostlist such as node[3-4]: {error.found.rstrip('.')}") from error
