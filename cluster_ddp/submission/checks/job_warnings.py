"""Warnings about jobs that would run, but worse than they could, or show secrets. Each has a code that silences it."""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from cluster_ddp.run.ownership import others
from cluster_ddp.slurm.partitions import NodeGroup
from cluster_ddp.submission.checks.feasibility import asked_partitions, holding
from cluster_ddp.submission.spec import JobSpec
from cluster_ddp.submission.spec_rules import EXPEDITE
from cluster_ddp.submission.validation import seconds

CODES = ("several-nodes", "one-gpu-per-node", "no-requeue", "node-local-path", "fork-of-one", "early-signal")
"""Codes of the warnings that `advise` may return."""
OTHER_CODES = (
    *("activated", "cluster", "cluster-toml", "command", "environment", "modules", "nested", "no-checkpoint", "ntasks"),
    *("placeholder", "range", "secret", "shared-runs", "shell", "short", "slurm-variable", "syntax"),
)
"""Codes of the warnings of other checks; "nested" and "cluster-toml" accept what is refused otherwise."""

LONG_S = 4 * 3600
"""Seconds. A job with a longer time limit should be requeued if its node is lost."""

# sbatch(1), --signal: default time before the limit, and how much earlier it may come. Limits are whole minutes.
_SIGNAL_S = 60
_SIGNAL_EARLY_S = 60

_NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm")


# NAME=value, --name=value or --name value. Shell variables ("$…") don't match: the text has no secret then.
_NAMED = re.compile(
    r"(?i)\b((?:\w+[_-])?(?:token|api[_-]?key|secret|secret[_-]?key|access[_-]?key|password|passwd))"
    r"(?:\s*=\s*|\s+)['\"]?[\w./+~-]{8,}"
)
# The forms of some services: Hugging Face, OpenAI and others, GitHub, GitLab, AWS, Slack.
_KNOWN = re.compile(r"\b(hf_|sk-|gh[pousr]_|github_pat_|glpat-|AKIA|xox[abp]-)[\w-]{16,}")


class Advice(NamedTuple):
    """A warning about a job that can be submitted all the same."""

    code: str
    """The code that silences it: --accept CODE."""
    text: str
    """Whole sentences: the reason, and what to do."""


def advise(
    spec: JobSpec,
    groups: Sequence[NodeGroup],
    *,
    folders: Sequence[Path] = (),
    requeue_default: bool | None = None,
) -> list[Advice]:
    """Warn of settings that are probably not meant.

    Args:
        spec: the job.
        groups: the cluster's nodes, from `cluster_ddp.slurm.partitions.read`; empty if unknown.
        folders: folders that the job uses, besides the paths in its command.
        requeue_default: whether the cluster requeues lost jobs by default (slurm.conf(5), JobRequeue); None if unknown.

    Returns:
        Warnings, at most one of each code.
    """
    texts = {
        **_spread(spec, groups),
        "no-requeue": _no_requeue(spec, requeue_default),
        "node-local-path": _node_local([*_paths(spec.command), *map(str, folders)]),
        "early-signal": _early_signal(spec),
    }
    if spec.launcher == "fork" and spec.ranks_per_node == 1:
        texts["fork-of-one"] = "With one rank on each node, --launcher fork gains nothing. Leave it out."
    return [Advice(code, text) for code, text in texts.items() if text]


def _paths(command: Sequence[str]) -> list[str]:
    """The arguments, and the part of each after "="."""
    return [word for argument in command for word in (argument, argument.partition("=")[2])]


def _node_local(paths: Sequence[str]) -> str:
    """A warning about absolute paths in folders that are usually local to each node."""
    roots = [*_NODE_LOCAL, os.path.normpath(tempfile.gettempdir())]
    absolute = [path for path in dict.fromkeys(paths) if path.startswith("/")]
    local = [path for path in absolute if any(PurePosixPath(os.path.normpath(path)).is_relative_to(r) for r in roots)]
    if not local:
        return ""
    verb, them = ("is", "it") if len(local) == 1 else ("are", "them")
    reason = f"{' and '.join(local)} {verb} in a folder that is usually local to each node"
    return f"{reason}: the job may not find {them} there. Use a folder that all nodes share."


def _spread(spec: JobSpec, groups: Sequence[NodeGroup]) -> dict[str, str]:
    """Warnings about GPUs on more nodes than necessary."""
    if spec.nodes == 1 or spec.max_nodes is not None:
        return {}
    partitions = asked_partitions(spec, groups)
    one = _regrouped(spec, 1)
    holder = next((name for name, nodes in partitions.items() if _fits(one, nodes)), None)
    if holder is not None:
        gpus = spec.nodes * spec.gpus_per_node
        reason = f"One node of partition {holder} has the {gpus} GPUs that the job asks of {spec.nodes} nodes"
        text = f"{reason}. Inside a node, they exchange gradients faster than over the network: {_options(spec, one)}"
        return {"several-nodes": f"{text}."}
    if spec.gpus_per_node > 1:
        return {}
    most = max((group.gpus_of(spec.gpu_type) for nodes in partitions.values() for group in nodes), default=None)
    if most is not None and most <= 1:
        return {}
    smaller = [_regrouped(spec, nodes) for nodes in range(2, spec.nodes) if spec.nodes % nodes == 0]
    fitting = (other for other in smaller if any(_fits(other, nodes) for nodes in partitions.values()))
    better = next((f": {_options(spec, other)}" for other in fitting), " with --nodes and --gpus-per-node")
    reason = f"With one GPU on each of {spec.nodes} nodes, all gradients go over the network"
    return {"one-gpu-per-node": f"{reason}. Ask for several GPUs on fewer nodes{better}."}


def _regrouped(spec: JobSpec, nodes: int) -> JobSpec:
    """The same ranks on fewer nodes, with the same memory per rank."""
    digits = (spec.mem or "").rstrip("KMGT")
    mem = f"{int(digits) * spec.nodes // nodes}{spec.mem[len(digits) :]}" if spec.mem else None
    return replace(spec, nodes=nodes, gpus_per_node=spec.nodes * spec.gpus_per_node // nodes, mem=mem)


def _fits(spec: JobSpec, groups: Sequence[NodeGroup]) -> bool:
    return sum(group.nodes for group in holding(spec, groups) if group.up and group.usable) >= spec.all_nodes


def _options(spec: JobSpec, other: JobSpec) -> str:
    mem = f" --mem {other.mem}" if other.mem != spec.mem else ""
    return f"--nodes {other.nodes} --gpus-per-node {other.gpus_per_node}{mem}"


def _no_requeue(spec: JobSpec, requeue_default: bool | None) -> str:
    """A long job that is lost with its node."""
    requeued = requeue_default if spec.requeue is None else spec.requeue
    if requeued is not False or spec.chain or EXPEDITE in spec.sbatch_options or spec.time is None:
        return ""
    limit_s = seconds(spec.time)
    if limit_s is not None and limit_s <= LONG_S:
        return ""
    reason = f"A job of up to {spec.time} that is preempted or loses a node is not requeued"
    return f"{reason}. With --requeue (or, where that is forbidden, --chain) a script resumes from its last checkpoint."


def _early_signal(spec: JobSpec) -> str:
    """A warning signal that may come as soon as the job starts."""
    limit_s = seconds(spec.time) if spec.time is not None else None
    if spec.signal is None or limit_s is None:
        return ""
    before_s = int(spec.signal.partition("@")[2] or _SIGNAL_S)
    limit_s = -(-limit_s // 60) * 60
    if limit_s > before_s + _SIGNAL_EARLY_S:
        return ""
    reason = f"The limit is {limit_s} s, and Slurm may send --signal {spec.signal} {_SIGNAL_EARLY_S} s early"
    return f"{reason}: as soon as the job starts. Each start would then train for one step. Use a larger --time."


def of_secrets(spec: JobSpec) -> list[Advice]:
    """Warn of what looks like a secret, by its name or first letters: files would keep it, and ps would show it."""
    values = [f"{key}={value}" for key, values in spec.grid.items() for value in values]
    texts = {"the command": " ".join([*spec.command, *values]), "--setup": "\n".join(spec.setup)}
    found: list[str] = []
    for where, text in texts.items():
        found += [f"{match[1]} in {where}" for match in _NAMED.finditer(text)]
        found += [f"{match[1]}… in {where}" for match in _KNOWN.finditer(text)]
    if not found:
        return []
    text = (
        f"The job seems to contain a secret: {', '.join(dict.fromkeys(found))}. It would be kept in spec.json and the "
        "job's script, and ps shows a command to everybody on its node. Export it in your shell instead, and take it "
        "out of the command: the job inherits it. Or write it to a file, printf 'NAME=VALUE\\0' >FILE, and submit with "
        "--sbatch-options=--export-file=FILE."
    )
    return [Advice("secret", text)]


def of_shared_runs(folder: Path) -> list[Advice]:
    """Warn if somebody else can rename what is in a folder of run directories: jobs load code from them.

    One that does not exist yet will be ours.
    """
    try:
        found = others(folder.stat())
    except OSError:
        return []
    if not found:
        return []
    text = (
        f"{folder} {found}. So others can put a run directory of theirs in the place of yours, and a job that waits"
        f" would run its code. If it is to be shared, its owner can prevent that: chmod +t {shlex.quote(str(folder))}"
    )
    return [Advice("shared-runs", text)]
