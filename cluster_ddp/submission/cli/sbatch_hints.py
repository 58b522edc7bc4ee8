"""Options of sbatch (sbatch(1), 22.05 to 26.05), for hints to those who type them here."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from cluster_ddp.submission.spec_fields import PATTERNS, SET_ELSEWHERE, WORD_PATTERNS, meant_value

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

# An option of sbatch -> the option here; empty if there is none.
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
    "-o": "",
    "--output": "",
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


def here(option: str, value: str) -> tuple[str, str]:
    """Return what an option of sbatch is here, and what to write: `use --gpus-per-node 2` for --gres=gpu:2."""
    ours = HERE[option]
    if not ours:
        return "each run directory has the job's logs.", "leave it out; to read the logs: cluster-ddp logs JOB"
    name, more = ours[2:].replace("-", "_"), ""
    if option == "--gres":
        others = [part for part in value.split(",") if part and not part.startswith("gpu")]
        value = gpus(next((part for part in value.split(",") if part.startswith("gpu")), ""))
        more = f"; {', '.join(others)} can't be asked for here" if others else ""
    elif name == "gpus_per_node":
        value = gpus(value)
        count, blank, kind = value.partition(" ")
        if count and int(count) % 2 == 0:
            more = f"; or on two nodes: --nodes 2 {ours} {int(count) // 2}{blank}{kind}"
    elif value:
        value = meant_value(name, value) or value
        pattern, legal = PATTERNS.get(name, (".*", ""))
        if not re.fullmatch(pattern, value):
            value, more = "", f": {legal}"
        value = value and shlex.quote(value)
    return f"that is sbatch's name; here it is {ours}.", f"use {ours}{f' {value}' if value else ''}{more}"


def passed_on(option: str, value: str) -> tuple[str, str]:
    """Return how sbatch gets an option that has no name here, and what to write."""
    if option[2:] in SET_ELSEWHERE:
        return "cluster-ddp submit sets it itself, or has no use for it.", "leave it out"
    found, word = "it is an option of sbatch; --sbatch-options passes it on.", f"{option}={value}" if value else option
    if re.fullmatch(WORD_PATTERNS["sbatch_options"][0], word, re.ASCII):
        return found, f"--sbatch-options={shlex.quote(word)}"
    return found, f"--sbatch-options={option}=VALUE, with no blanks, quotes, $ or # in VALUE"


def joined(words: Sequence[str], option: str) -> list[str]:
    """Join an option whose value begins with dashes with that value: `--sbatch-options --nice` to `…=--nice`."""
    made: list[str] = []
    for word in words:
        if made and made[-1] == option and word.startswith("-"):
            made[-1] = f"{option}={word}"
        else:
            made.append(word)
    return made
