"""Options of sbatch (sbatch(1), 22.05 to 26.05), for hints to those who type them here."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from cluster_ddp.launch.notation import legal_name

_NAMES = """
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

# An option of sbatch -> the option here.
HERE = {
    "-N": "--nodes",
    "-n": "--gpus-per-node",
    "-G": "--gpus-per-node",
    "--gpus": "--gpus-per-node",
    "--gres": "--gpus-per-node",
    "-c": "--cpus-per-task",
    "--cpus-per-gpu": "--cpus-per-task",
    "-p": "--partition",
    "-A": "--account",
    "-q": "--qos",
    "-t": "--time",
    "-C": "--constraint",
    "-J": "--name",
    "--job-name": "--name",
    "-a": "--array",
    "-x": "--exclude",
    "-d": "--after",
    "--dependency": "--after",
    "-o": "leave it out; to read the logs: cluster-ddp logs JOB",
    "--output": "leave it out; to read the logs: cluster-ddp logs JOB",
}


HETEROGENEOUS = (":", "hetjob", "--het", "--het-group", "--pack-group")
"""What asks for a heterogeneous job (sbatch(1), HETEROGENEOUS JOB SUPPORT)."""


def is_one(word: str) -> bool:
    """Return whether a word of a command line is an option of sbatch, with its value or without."""
    name = word.partition("=")[0]
    return name[2:] in _NAMES.split() if name.startswith("--") else name[:1] == "-" and name[1:] in tuple(_LETTERS)


def gpus(value: str) -> str:
    """Return the value of --gpus-per-node, and the type if there is one, for Slurm's gpu:a100:2; empty if unclear."""
    match = re.fullmatch(r"(?:gpu:)?(?:([A-Za-z]\w*):)?(\d+)", value.partition(",")[0])
    return "" if match is None else match[2] + (f" --gpu-type {match[1]}" if match[1] else "")


def here(option: str, value: str) -> str:
    """Return what to write instead of an option of sbatch and its value: `--gpus-per-node 2` for --gres=gpu:2."""
    if option in ("--gres", "-G", "--gpus"):
        value = gpus(value)
    elif HERE[option] == "--name":
        value = legal_name(value)
    else:
        value = value and shlex.quote(value)
    if not HERE[option].startswith("-"):
        return HERE[option]
    together = " on one node; on two nodes, half of it and --nodes 2" if option in ("-n", "-G", "--gpus") else ""
    return f"use {HERE[option]}{f' {value}' if value else ''}{together}"


def joined(words: Sequence[str], option: str) -> list[str]:
    """Join an option whose value begins with dashes with that value: `--sbatch-options --nice` to `…=--nice`."""
    made: list[str] = []
    for word in words:
        if made and made[-1] == option and word.startswith("-"):
            made[-1] = f"{option}={word}"
        else:
            made.append(word)
    return made
