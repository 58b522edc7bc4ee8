"""What the fields of a job may hold, in sbatch(1)'s own syntax; and the error of one that holds something else."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import fields

from cluster_ddp.agent.launch_options import AgentOptions, RankOptions
from cluster_ddp.errors import SpecError, hours, nearest_name
from cluster_ddp.option_form import Form, flag, form_of
from cluster_ddp.submission.job_options import DAYS, JobOptions

_SET_ELSEWHERE = """
    account array begin chdir constraint cpus-per-task dependency error exclude gpus gpus-per-node gpus-per-task gres
    help hold job-name mem no-requeue nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket
    open-mode output parsable partition qos quiet requeue signal test-only time usage version wait wrap
"""
SET_ELSEWHERE = frozenset(_SET_ELSEWHERE.split())
"""Options of sbatch that other fields, the template or the submission set. Also --wait, --help, --usage, --version and
--quiet: with them, sbatch does not simply submit a job and print its id."""

_FORMS = {one.name: form_of(one) for options in (AgentOptions, JobOptions) for one in fields(options)}


def check_fields(asked: RankOptions) -> None:
    """Check the value of each field, by itself.

    Raises:
        SpecError: one has another type or form, or is too small a number.
    """
    for one in fields(asked):
        _check(one.name, str(one.type), form_of(one), getattr(asked, one.name))


def _check(name: str, kind: str, form: Form, value: object) -> None:
    kind, _, optional = kind.partition(" | ")
    if optional and value is None:
        return
    least = max(form.least, 1 if optional else 0)
    if kind == "int" and (type(value) is not int or value < least):
        raise field_error(name, value, f"a whole number of {least} or more")
    if kind == "bool" and type(value) is not bool:
        raise field_error(name, value, "true or false")
    if kind == "str" and not isinstance(value, str):
        raise field_error(name, value, form.legal or "a text")
    if kind == "tuple[str, ...]" and not (isinstance(value, tuple) and all(isinstance(word, str) for word in value)):
        raise field_error(name, value, "a tuple of strings")
    words = value if isinstance(value, tuple) else (value,)
    if form.one_of and not {*words} <= {*form.one_of}:
        near = [word if word in form.one_of else nearest_name(word, form.one_of) for word in words]
        meant = None if None in near else tuple(near) if isinstance(value, tuple) else near[0]
        raise field_error(name, value, f"one of {', '.join(form.one_of)}", meant=meant)
    if form.pattern and isinstance(value, str):
        _check_text(name, form, value)
    if form.pattern and isinstance(value, tuple):
        _check_words(name, form, value)


def _check_text(name: str, form: Form, value: str) -> None:
    if not re.fullmatch(form.pattern, value, re.UNICODE if name == "name" else re.ASCII):
        raise field_error(name, value, form.legal)
    if name == "name" and value.startswith("-"):
        raise field_error(name, value, "a name that does not begin with '-'")


def _check_words(name: str, form: Form, words: Sequence[str]) -> None:
    """Check each word. If only its parts have the right form, the error's hint has them as words."""
    if _all_match(form.pattern, words):
        return
    parts = tuple(filter(None, " ".join(words).split(" ")))
    if not parts or not _all_match(form.pattern, parts):
        raise field_error(name, words, form.legal)
    raise field_error(name, words, f"{form.legal}, not several in one pair of quotes", meant=parts)


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
    meant = None if meant == value else meant  # it contradicts another one
    if meant is not None:
        hint = option_words(name, meant)
    by_default = f"what it takes: cluster-ddp submit --help-all; as a key: {name}"
    if type(value) is int:
        by_default = f"for example {option_words(name, 1)}"
    shown = " ".join(map(repr, value)) if isinstance(value, tuple) and value else repr(value)
    hint = hint or _FORMS.get(name, Form()).hint or by_default
    return SpecError(f"A job with {name} {shown}:", f"{name} must be {legal}.", hint).about(name, meant=meant)


def option_words(name: str, value: object) -> str:
    """Return how a field is given on the command line."""
    if name in ("sbatch_options", "srun_options") and isinstance(value, tuple):
        return " ".join(f"{flag(name)}={shlex.quote(word)}" for word in value)
    return f"{flag(name)} {shlex.join(value if isinstance(value, tuple) else [str(value)])}"


def meant_value(name: str, value: str) -> str | None:
    """Return a field's text in a legal form; None if that is not clear."""
    if name == "name":
        return legal_name(value) or None
    if name == "begin":
        return nearest_name(value, DAYS)
    if name in ("mem", "max_mem") and (match := re.fullmatch(r"(\d+)\s*([KMGT])i?B?", value, re.IGNORECASE)):
        return match[1] + match[2].upper()
    if name == "time" and (match := re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", _compact(value))):
        days, whole_h, minutes, rest_s = (int(part or 0) for part in match.groups())
        total_s = ((days * 24 + whole_h) * 60 + minutes) * 60 + rest_s
        return hours(total_s) if total_s else None
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
