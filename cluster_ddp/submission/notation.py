"""Times and sizes in sbatch's notation, and the error of a field of `JobSpec`."""

from __future__ import annotations

import re
import shlex
from math import ceil

from cluster_ddp.errors import SpecError, nearest_name

_MIB = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
_DAYS = ("today", "tomorrow", "midnight", "noon", "teatime", "fika", "elevenses")
# What to do about a field that has an illegal value.
_EXAMPLES = {
    "nodes": "for two nodes: --nodes 2",
    "gpus_per_node": "for four ranks on each node: --gpus-per-node 4",
    "gpus_per_task": "for one GPU a rank: --gpus-per-task 1",
    "cpus_per_task": "for eight CPUs a rank: --cpus-per-task 8",
    "time": "for one hour: --time 1:00:00",
    "mem": "for 32 GiB: --mem 32G",
    "gpu_type": "see the types: sinfo -o %G",
    "partition": "see the names: sinfo -o %P",
    "account": "see yours: sacctmgr show associations user=$USER",
    "qos": "see yours: sacctmgr show associations user=$USER format=qos",
    "constraint": "see the features: sinfo -o %f",
    "exclude": "see the names: sinfo -N",
    "array": "for eight tasks: --array 0-7",
    "begin": "in two hours: --begin now+2hours",
    "after": "after job 12 has succeeded: --after 12; whatever became of it: --after afterany:12",
    "signal": "two minutes before the end: --signal USR1@120",
    "launcher": "leave it out, or --launcher srun",
    "restarts": "for three: --restarts 3",
    "hang_restart_s": "for a minute: --hang-restart-s 60",
    "restart_args": "for example --restart-args '--resume last.pth'",
    "trace": "for ten steps: --trace 10",
    "modules": "see the names: module avail",
    "sbatch_options": "for example --sbatch-options=--reservation=course",
    "srun_options": "for example --srun-options=--cpu-bind=verbose",
}


def normalized_time(text: str) -> str:
    """Return a time limit in the form D-HH:MM:SS, or UNLIMITED.

    Args:
        text: one of sbatch(1)'s forms: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S, UNLIMITED, INFINITE.

    Raises:
        SpecError: it has another form, or is 0.
    """
    total_s = seconds(text)
    if total_s is None:
        return "UNLIMITED"
    total_min, rest_s = divmod(total_s, 60)
    total_h, minutes = divmod(total_min, 60)
    return f"{total_h // 24}-{total_h % 24:02}:{minutes:02}:{rest_s:02}"


def seconds(time: str) -> int | None:
    """Return a time limit in seconds; None for UNLIMITED. Forms and errors are those of `normalized_time`."""
    if isinstance(time, str) and time.upper() in ("UNLIMITED", "INFINITE"):
        return None
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time, re.ASCII) if isinstance(time, str) else None
    if match is None:
        raise field_error(
            "time", time, "30 (minutes), 30:00 (minutes and seconds), 1:30:00, 2-12 (days-hours) or 2-12:30:00"
        )
    days, first, second, third = (None if part is None else int(part) for part in match.groups())
    assert first is not None
    if days is not None or third is not None:
        total_s = ((days or 0) * 24 + first) * 3600 + (second or 0) * 60 + (third or 0)
    else:
        total_s = first * 60 + (second or 0)
    if total_s == 0:
        raise field_error("time", time, "longer than 0, which sbatch takes as no limit")
    return total_s


def hours(duration_s: float) -> str:
    """Return a duration as H:MM:SS."""
    minutes, rest_s = divmod(round(duration_s), 60)
    whole_h, minutes = divmod(minutes, 60)
    return f"{whole_h}:{minutes:02}:{rest_s:02}"


def mebibytes(mem: str) -> int:
    """Return a size as --mem takes it, such as 32G or 500 (MiB), in MiB, rounded up."""
    digits = mem.rstrip("KMGT")
    return ceil(int(digits) * _MIB[mem[len(digits) :] or "M"])


def legal_name(text: str) -> str:
    """Return a text as the name of a job: other characters become _; "" if nothing is left."""
    return re.sub(r"[^\w.+@=-]", "_", text)[:128].lstrip("-")


def field_error(name: str, value: object, legal: str, *, meant: object = None, hint: str = "") -> SpecError:
    """Return the error of a field with an illegal value.

    Args:
        name: the field.
        value: its value.
        legal: what it must be.
        meant: a legal value that was probably meant, for the hint; for a text it is guessed.
        hint: what to do, if that is another thing than to change the value.
    """
    meant = meant_value(name, value) if meant is None and isinstance(value, str) else meant
    if meant is not None:
        hint = option_words(name, meant)
    by_default = f"what it takes: cluster-ddp submit --help; as a key: {name}"
    shown = " ".join(map(repr, value)) if isinstance(value, tuple) and value else repr(value)
    error = SpecError(
        f"A job with {name} {shown}:", f"{name} must be {legal}.", hint or _EXAMPLES.get(name, by_default)
    )
    error.meant = meant
    return error


def option_words(name: str, value: object) -> str:
    """Return how a field is given on the command line."""
    option = f"--{name.replace('_', '-')}"
    if name in ("sbatch_options", "srun_options") and isinstance(value, tuple):
        return " ".join(f"{option}={shlex.quote(word)}" for word in value)
    return f"{option} {shlex.join(value if isinstance(value, tuple) else [str(value)])}"


def meant_value(name: str, value: str) -> str | None:
    """Return a field's text in a legal form; None if that is not clear."""
    if name == "name":
        return legal_name(value) or None
    if name == "begin":
        return nearest_name(value, _DAYS)
    if name == "mem" and (match := re.fullmatch(r"(\d+)\s*([KMGT])i?B?", value, re.IGNORECASE)):
        return match[1] + match[2].upper()
    if name == "time" and (match := re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", _compact(value))):
        days, hours, minutes, rest_s = (int(part or 0) for part in match.groups())
        total_min = (days * 24 + hours) * 60 + minutes
        return f"{total_min // 60}:{total_min % 60:02}:{rest_s:02}" if total_min or rest_s else None
    return None


def _compact(time: str) -> str:
    """A time such as "2 hours 30 min" as "2h30m"."""
    return re.sub(r"\s*([dhms])[a-z]*\s*", r"\1", time.lower())
