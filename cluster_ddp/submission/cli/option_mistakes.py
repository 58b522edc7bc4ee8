"""Options that were probably meant otherwise: those of sbatch(1), 22.05 to 26.05, ranges, tiny times and sizes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cluster_ddp.argument_parser import value_at
from cluster_ddp.errors import SpecError, counted
from cluster_ddp.submission.checks.job_warnings import Advice
from cluster_ddp.submission.spec import JobSpec
from cluster_ddp.submission.validation import PATTERNS, SET_ELSEWHERE, WORD_PATTERNS, meant_value

_SBATCHS = """
    account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment constraint container
    container-id contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot
    dependency distribution error exclude exclusive export export-file extra extra-node-info get-user-env gid gpu-bind
    gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint hold ignore-pbs input job-name
    kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nice
    no-kill no-requeue nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket
    open-mode output overcommit oversubscribe partition power prefer priority profile propagate qos quiet reboot requeue
    reservation segment signal sockets-per-node spread-job stepmgr switches test-only thread-spec threads-per-core time
    time-min tmp tres-bind tres-per-task uid use-min-nodes verbose wait wait-all-nodes wckey wrap
"""
_LETTERS = "AabCcDdeFGHiJkLMNnOopqSstwx"
# An option of sbatch -> the option here. All others are passed on by --sbatch-options.
_HERE: Mapping[str, str] = {
    **dict.fromkeys(("-n", "-G", "--gpus", "--gres"), "--gpus-per-node"),
    **dict.fromkeys(("-c", "--cpus-per-gpu"), "--cpus-per-task"),
    **dict.fromkeys(("-J", "--job-name"), "--name"),
    **dict.fromkeys(("-d", "--dependency"), "--after"),
    **{"-N": "--nodes", "-p": "--partition", "-A": "--account", "-q": "--qos", "-t": "--time"},
    **{"-C": "--constraint", "-a": "--array", "-x": "--exclude"},
}
_HETEROGENEOUS = (":", "hetjob", "--het", "--het-group", "--pack-group")  # sbatch(1), HETEROGENEOUS JOB SUPPORT


def is_sbatchs(word: str) -> bool:
    """Return whether a word of a command line is an option of sbatch, with its value or without."""
    name = word.partition("=")[0]
    return name[2:] in _SBATCHS.split() if name.startswith("--") else name[:1] == "-" and name[1:] in tuple(_LETTERS)


def refuse(words: Sequence[str]) -> None:
    """Refuse options of sbatch that are written otherwise here, and heterogeneous jobs.

    Raises:
        SpecError: there is one. The error names the option to use, or what to do instead.
    """
    for at, word in enumerate(words):
        option, value = word.partition("=")[0], value_at(words, at)
        if said := _instead(option, value):
            raise SpecError(f"Submitting with {option}:", *said)


def _instead(option: str, value: str) -> tuple[str, str] | None:
    """What is wrong with an option of sbatch, and what to write instead; None for another option."""
    if option in _HETEROGENEOUS:
        found = "heterogeneous jobs are not possible here: all ranks of a job have the same GPUs, CPUs and memory."
        return found, "use equal nodes for all ranks: --nodes and --gpus-per-node; or submit independent jobs"
    if option in ("-o", "--output"):
        return "each run directory has the job's logs.", "leave it out; to read the logs: cluster-ddp logs JOB"
    if ours := _HERE.get(option):
        name = ours[2:].replace("-", "_")
        meant = gpus(value) if name == "gpus_per_node" else meant_value(name, value) or value
        pattern, legal = PATTERNS.get(name, (".*", ""))
        words = f" {shlex.quote(meant) if legal else meant}" if re.fullmatch(pattern, meant) else f": {legal}"
        others = [part for part in value.split(",") if option == "--gres" and not part.startswith("gpu")]
        more = f"; {', '.join(others)} can't be asked for here" if any(others) else ""
        return f"that is sbatch's name; here it is {ours}.", f"use {ours}{words}".rstrip() + more
    if option[2:] in SET_ELSEWHERE and is_sbatchs(option):
        return "cluster-ddp submit sets it itself, or has no use for it.", "leave it out"
    if option.startswith("--") and is_sbatchs(option):
        word = f"{option}={value}" if value else option
        is_legal = re.fullmatch(WORD_PATTERNS["sbatch_options"][0], word, re.ASCII)
        hint = shlex.quote(word) if is_legal else f"{option}=VALUE, with no blanks, quotes, $ or # in VALUE"
        return "it is an option of sbatch; --sbatch-options passes it on.", f"--sbatch-options={hint}"
    return None


def gpus(value: str) -> str:
    """The value of --gpus-per-node, and the type if there is one, for Slurm's gpu:a100:2; empty if unclear."""
    part = next((part for part in value.split(",") if part.startswith("gpu")), value)
    match = re.fullmatch(r"(?:gpu:)?(?:([A-Za-z]\w*):)?(\d+)", part)
    return "" if match is None else match[2] + (f" --gpu-type {match[1]}" if match[1] else "")


def advise(given: Mapping[str, Any], spec: JobSpec) -> Iterator[Advice]:
    """Warn of numbers of tasks, which follow from the GPUs, of ranges in another notation, of tiny times and sizes.

    Args:
        given: the options that were given.
        spec: the job.

    Raises:
        SpecError: a number of tasks does not match the GPUs.
    """
    drives = "one task drives " + ("one GPU" if spec.gpus_per_task == 1 else f"{spec.gpus_per_task} GPUs")
    tasks = (
        ("--ntasks", spec.world_size, spec.nodes, ""),
        ("--ntasks-per-node", spec.ranks_per_node, 1, " on each node"),
    )
    for option, needed, nodes, where in tasks:
        asked = given.get(option[2:].replace("-", "_"))
        if asked is not None and asked != needed:
            size = f"{counted(spec.nodes, 'node')} x {counted(spec.gpus_per_node, 'GPU')}"
            found = f"{drives}: {size} are {counted(needed, 'task')}{where}, not {asked}."
            hint = f"leave {option} out, and choose --nodes and --gpus-per-node"
            if asked and asked % nodes == 0:
                hint = f"instead: --gpus-per-node {asked * spec.gpus_per_task // nodes}"
            raise SpecError(f"Submitting with {option} {asked}:", found, hint)
        if asked is not None:
            text = f"{option} is not needed: {drives}, so the tasks follow from the GPUs. Leave it out."
            yield Advice("ntasks", text)
    yield from (Advice("range", text) for word in given.get("array") or () if (text := _range(word)))
    if match := re.fullmatch(r"[1-4]:\d\d", given.get("time") or ""):
        text = f"--time {match[0]} means minutes and seconds. For hours and minutes: --time {match[0]}:00"
        yield Advice("short", text)
    if re.fullmatch(r"[1-9]\d{0,2}", given.get("mem") or ""):
        yield Advice("short", f"--mem {given['mem']} means MiB. For GiB: --mem {given['mem']}G")


def _range(word: str) -> str:
    """What was probably meant by a word of --array; "" if it is clear."""
    key, _, values = word.partition("=")
    if match := re.fullmatch(r"[\[({](.+)[\])}]", values):
        return f"{word} has brackets in its values. Without them: {key}={match[1].replace(' ', '')}"
    if match := re.fullmatch(r"(\d+)[-:](\d+)", values):
        first, last = int(match[1]), int(match[2])
    elif match := re.fullmatch(r"range\((?:(\d+),\s*)?(\d+)\)", values):  # its end is not in it
        first, last = int(match[1] or 0), int(match[2]) - 1
    else:
        return ""
    return f"{word} is text, not a range of numbers. For the numbers {first} to {last}: {key}={first}..{last}"
