"""Times and sizes in sbatch's notation, and the error of a field of `JobSpec`."""

from __future__ import annotations

import re
from math import ceil

from cluster_ddp.errors import SpecError

_MIB = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
_EXAMPLES = {"time": "for one hour: --time 1:00:00", "mem": "for 32 GiB: --mem 32G"}


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


def field_error(name: str, value: object, legal: str) -> SpecError:
    """Return the error of a field with an illegal value. Its hint has the value in the legal form, if that is clear."""
    meant = _meant(name, value) if isinstance(value, str) else None
    hint = f"--{name} {meant}" if meant else _EXAMPLES.get(name, f"change {name}")
    return SpecError(f"A job with {name} {value!r}:", f"{name} must be {legal}.", hint)


def _meant(name: str, value: str) -> str | None:
    """A time or a size in the form that sbatch takes, if that is clear."""
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
