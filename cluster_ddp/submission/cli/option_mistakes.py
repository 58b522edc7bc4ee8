"""Options that were probably meant otherwise: those of sbatch(1), 22.05 to 26.05, ranges, tiny times and sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cluster_ddp.errors import SpecError, counted
from cluster_ddp.submission.checks.job_warnings import Advice
from cluster_ddp.submission.spec import JobSpec
from cluster_ddp.submission.validation import SET_ELSEWHERE

_PASSED_ON = """
    acctg-freq batch bb bbf cluster-constraint clusters comment container container-id contiguous core-spec
    cores-per-socket cpu-freq cpus-per-gpu deadline delay-boot distribution exclusive export export-file extra
    extra-node-info get-user-env gid gpu-bind gpu-freq gpus-per-socket gres-flags hint ignore-pbs input
    kill-on-invalid-dep licenses mail-type mail-user mcs-label mem-bind mem-per-cpu mem-per-gpu mincpus network nice
    no-kill nodefile nodelist overcommit oversubscribe power prefer priority profile propagate reboot reservation
    segment sockets-per-node spread-job stepmgr switches thread-spec threads-per-core time-min tmp tres-bind
    tres-per-task uid use-min-nodes verbose wait-all-nodes wckey
"""
_SBATCHS = SET_ELSEWHERE.union(_PASSED_ON.split()) - {"help", "parsable", "usage", "version"}  # of any program
_LETTERS = "AabCcDdeFGHiJkLMNnOopqSstwx"
# An option of sbatch -> the option here.
_HERE: Mapping[str, str] = {
    **dict.fromkeys(("-n", "-G", "--gpus", "--gres"), "--gpus-per-node (and --gpu-type)"),
    **dict.fromkeys(("-c", "--cpus-per-gpu"), "--cpus-per-task"),
    **dict.fromkeys(("-J", "--job-name"), "--name"),
    **dict.fromkeys(("-d", "--dependency"), "--after"),
    **{"-N": "--nodes", "-p": "--partition", "-A": "--account", "-q": "--qos", "-t": "--time"},
    **{"-C": "--constraint", "-a": "--array", "-x": "--exclude"},
}
_HETEROGENEOUS = (":", "hetjob", "--het", "--het-group", "--pack-group")  # sbatch(1), HETEROGENEOUS JOB SUPPORT
_NO_GRID = r"[\[({].+[\])}]|\d+[-:]\d+|range\(.*\)"  # [1, 2]; 0-3; 0:3; range(3)


def is_sbatchs(word: str) -> bool:
    """Return whether a word of a command line is an option of sbatch, with its value or without."""
    name = word.partition("=")[0]
    return name[2:] in _SBATCHS if name.startswith("--") else name[:1] == "-" and name[1:] in tuple(_LETTERS)


def refuse(words: Sequence[str]) -> None:
    """Refuse options of sbatch that are written otherwise here, and heterogeneous jobs.

    Raises:
        SpecError: there is one. The error names the option to use, or what to do instead.
    """
    for word in words:
        option = word.partition("=")[0]
        if option in _HETEROGENEOUS:
            found = "heterogeneous jobs are not possible here: all ranks of a job have the same GPUs, CPUs and memory."
            hint = "use equal nodes for all ranks: --nodes and --gpus-per-node; or submit independent jobs"
        elif option in _HERE:
            found, hint = "that is sbatch's name; here it is called otherwise.", f"use {_HERE[option]}"
        elif option == "-o" or (option[2:] in SET_ELSEWHERE and is_sbatchs(option)):
            found = "cluster-ddp submit sets it itself, or has no use for it."
            hint = "leave it out; to read the logs: cluster-ddp logs JOB"
        elif option.startswith("--") and is_sbatchs(option):
            found = "it is an option of sbatch; --sbatch-options passes it on."
            hint = f"--sbatch-options={option}, or --sbatch-options={option}=VALUE, without blanks"
        else:
            continue
        raise SpecError(f"Submitting with {option}:", found, hint)


def advise(given: Mapping[str, Any], spec: JobSpec) -> Iterator[Advice]:
    """Warn of numbers of tasks, which follow from the GPUs, of ranges in another notation, of tiny times and sizes.

    Args:
        given: the options that were given.
        spec: the job.

    Raises:
        SpecError: a number of tasks does not match the GPUs.
    """
    cure = "use --nodes and --gpus-per-node instead: the tasks follow from the GPUs"
    for option, needed in (("--ntasks", spec.world_size), ("--ntasks-per-node", spec.ranks_per_node)):
        asked = given.get(option[2:].replace("-", "_"))
        if asked not in (None, needed):
            found = f"one task drives {counted(spec.gpus_per_task, 'GPU')}, so it is {needed} here."
            raise SpecError(f"Submitting with {option} {asked}:", found, cure)
        if asked is not None:
            yield Advice("ntasks", f"{option} is not needed; {cure}.")
    for word in given.get("array") or ():
        key, _, values = word.partition("=")
        if re.fullmatch(_NO_GRID, values):
            text = f"{word} is plain text. For a range of numbers: {key}=FIRST..LAST; for a list: {key}=VALUE,VALUE"
            yield Advice("range", text)
    if match := re.fullmatch(r"[1-4]:\d\d", given.get("time") or ""):
        text = f"--time {match[0]} means minutes and seconds. For hours and minutes: --time {match[0]}:00"
        yield Advice("short", text)
    if re.fullmatch(r"[1-9]\d{0,2}", given.get("mem") or ""):
        yield Advice("short", f"--mem {given['mem']} means MiB. For GiB: --mem {given['mem']}G")
