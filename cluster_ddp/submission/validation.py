"""What the fields of a job may hold, in sbatch(1)'s own syntax; and the error of one that holds something else."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from math import ceil

from cluster_ddp.errors import SpecError, nearest_name

_MIB = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
_DAYS = ("today", "tomorrow", "midnight", "noon", "teatime", "fika", "elevenses")

_DEPENDENCY = r"(singleton|(after|afterany|afterok|afternotok|aftercorr|afterburstbuffer|expand):[\w:+]+)"
_PATH = (r"[^\x00-\x1f\x7f]+", "a path without line breaks")

# What each text field may hold, and that in words: sbatch's own syntax, without what a shell or an #SBATCH line
# interprets: blanks, quotes, '$', '`', '\\', '#', line breaks. Paths, images and environments may have most of these,
# since the templates quote them. So may the description, which stands in a comment.
PATTERNS: dict[str, tuple[str, str]] = {
    "name": (r"[\w.+@=-]{1,128}", "letters, digits and . _ + - @ ="),
    "gpu_type": (r"[\w.-]+", "a type that sinfo -o %G shows, such as a100"),
    "mem": (r"\d+[KMGT]?", "a size such as 32G (per node; units K, M, G, T)"),
    "partition": (r"[\w.+@-]+(,[\w.+@-]+)*", "names that sinfo shows, separated by commas"),
    "account": (r"[\w.+@/-]+", "a name that sacctmgr show associations shows"),
    "qos": (r"[\w.+@-]+", "a name that sacctmgr show qos shows"),
    "constraint": (r"[\w.+@=:&|!*,()\[\]-]+", "features that sinfo -o %f shows, such as a100&nvlink"),
    "array": (
        r"{0}(,{0})*(%[1-9]\d{{0,17}})?".format(r"\d{1,18}(-\d{1,18}(:[1-9]\d{0,17})?)?"),
        "task numbers such as 0-7, 1,3,5 or 0-99%4",
    ),
    "signal": (
        r"(R:)?[A-Z0-9]+(@\d+)?",
        "a signal and seconds before the end, such as USR1@120 (not B:…, which would end the batch script and the job)",
    ),
    "exclude": (r"[\w.,\[\]-]+", "nodes that sinfo -N shows, such as node[3-4]"),
    "begin": (
        r"\d[\w:./-]*|now([+-]\d+[a-z]*)?|" + "|".join(_DAYS),
        "a time such as 16:00, tomorrow, now+2hours or 2030-01-31T12:00",
    ),
    "after": (
        r"{0}(:{0})*|{1}([,?]{1})*".format(r"\d+(_\d+)?", _DEPENDENCY),
        "a job id, such as 12, or a dependency, afterany:12",
    ),
    "venv": _PATH,
    "conda_env": (r"[^\x00-\x1f\x7f]+", "a name or path without line breaks"),
    "container": _PATH,
    "template": _PATH,
    "container_image": (r"[^\x00-\x20\x7f]+", "an image as Enroot names it, such as nvcr.io#nvidia/pytorch:25.10-py3"),
    "description": (r"[^\x00-\x1f\x7f]*", "one line"),
    "restart_args": (r"[^\x00-\x1f\x7f]*", "words in one line"),
}  # fmt: skip

# The same for each word of a field that holds several words.
WORD_PATTERNS: dict[str, tuple[str, str]] = {
    "modules": (r"[\w.+/][\w.+/-]*", "names that module avail shows, such as cuda/12.8"),
    "container_binds": (r"[^\x00-\x1f\x7f,]+", "paths such as /data or /scratch/me:/data, without commas"),
    "container_overlays": _PATH,
    "track": (r"[\w-]+", "names of trackers"),
    "sbatch_options": (r"--[a-z][a-z-]*(=[^\x00-\x20\x7f\"'`$\\#]+)?", "options such as --reservation=course"),
    "srun_options": (r"--[a-z][a-z-]*(=[^\x00-\x20\x7f\"'`$\\#]+)?", "options such as --cpu-bind=verbose"),
    "setup": (r"[^\x00]*", "lines of bash"),
}  # fmt: skip

_SET_ELSEWHERE = """
    account array begin chdir constraint cpus-per-task dependency error exclude gpus gpus-per-node gpus-per-task gres
    help hold job-name mem no-requeue nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket
    open-mode output parsable partition qos quiet requeue signal test-only time usage version wait wrap
"""
SET_ELSEWHERE = frozenset(_SET_ELSEWHERE.split())
"""Options of sbatch that other fields, the template or the submission set. Also --wait, --help, --usage, --version and
--quiet: with them, sbatch does not simply submit a job and print its id."""

_AT_LEAST_ONE = ("nodes", "gpus_per_node", "gpus_per_task")  # and what may be left out

# What to do about a field that has an illegal value.
_HINTS = {
    "nodes": "for two nodes: --nodes 2; for two to eight: --nodes 2-8; in Python: nodes=2, max_nodes=8",
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
    "modules": "see the names: module avail",
    "sbatch_options": "for example --sbatch-options=--reservation=course",
    "srun_options": "for example --srun-options=--cpu-bind=verbose",
}


def check_field(name: str, kind: str, value: object) -> None:
    """Check the value of a field; `kind` is its annotation in the source.

    Raises:
        SpecError: it has another type or form, or is too small a number.
    """
    kind, _, optional = kind.partition(" | ")
    if optional and value is None:
        return
    least = 1 if optional or name in _AT_LEAST_ONE else 0
    if kind == "int" and (type(value) is not int or value < least):
        hint = _HINTS.get(name, f"for example {option_words(name, 1)}")
        raise field_error(name, value, f"a whole number of {least} or more", hint=hint)
    if kind == "bool" and type(value) is not bool:
        raise field_error(name, value, "true or false")
    if kind == "tuple[str, ...]" and not (isinstance(value, tuple) and all(isinstance(word, str) for word in value)):
        raise field_error(name, value, "a tuple of strings")
    if name in PATTERNS:
        _check_text(name, value)
    if name in WORD_PATTERNS and isinstance(value, tuple):
        _check_words(name, value)


def _check_text(name: str, value: object) -> None:
    pattern, legal = PATTERNS[name]
    flags = re.UNICODE if name == "name" else re.ASCII
    if not isinstance(value, str) or not re.fullmatch(pattern, value, flags):
        raise field_error(name, value, legal)
    if name == "name" and value.startswith("-"):
        raise field_error(name, value, "a name that does not begin with '-'")


def _check_words(name: str, words: Sequence[str]) -> None:
    """Check each word. If only its parts have the right form, the error's hint has them as words."""
    pattern, legal = WORD_PATTERNS[name]
    if _all_match(pattern, words):
        return
    parts = tuple(filter(None, " ".join(words).split(" ")))
    if not parts or not _all_match(pattern, parts):
        raise field_error(name, words, legal)
    raise field_error(name, words, f"{legal}, not several in one pair of quotes", meant=parts)


def _all_match(pattern: str, words: Sequence[str]) -> bool:
    return all(re.fullmatch(pattern, word, re.ASCII) for word in words)


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
    by_default = f"what it takes: cluster-ddp submit --help-all; as a key: {name}"
    shown = " ".join(map(repr, value)) if isinstance(value, tuple) and value else repr(value)
    error = SpecError(f"A job with {name} {shown}:", f"{name} must be {legal}.", hint or _HINTS.get(name, by_default))
    return error.about(name, meant=meant)


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


def normalized_time(text: str) -> str:
    """Return a time limit in the form D-HH:MM:SS, or UNLIMITED.

    Args:
        text: one of sbatch(1)'s forms: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S, UNLIMITED, INFINITE.

    Raises:
        SpecError: it has another form, or is 0.
    """
    total_s = seconds(text)
    return "UNLIMITED" if total_s is None else slurms_time(total_s)


def slurms_time(total_s: int) -> str:
    """Return seconds in the form D-HH:MM:SS."""
    return f"{total_s // 86400}-{total_s // 3600 % 24:02}:{total_s // 60 % 60:02}:{total_s % 60:02}"


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


def mebibytes(mem: str) -> int:
    """Return a size as --mem takes it, such as 32G or 500 (MiB), in MiB, rounded up."""
    digits = mem.rstrip("KMGT")
    return ceil(int(digits) * _MIB[mem[len(digits) :] or "M"])
