"""Tokens and passwords in what a submission keeps: its command, its setup lines, its grid."""

from __future__ import annotations

import re
from collections.abc import Iterator

from cluster_ddp.launch.checks.performance_warnings import Advice
from cluster_ddp.launch.spec import JobSpec

# NAME=value, --name=value or --name value. What a shell fills in ("$…") is not in the text.
_NAMED = re.compile(
    r"(?i)\b((?:\w+[_-])?(?:token|api[_-]?key|secret|secret[_-]?key|access[_-]?key|password|passwd))"
    r"(?:\s*=\s*|\s+)['\"]?[\w./+~-]{8,}"
)
# The forms of some services: Hugging Face, OpenAI and others, GitHub, GitLab, AWS, Slack.
_KNOWN = re.compile(r"\b(hf_|sk-|gh[pousr]_|github_pat_|glpat-|AKIA|xox[abp]-)[\w-]{16,}")


def advise(spec: JobSpec) -> list[Advice]:
    """Say what looks like a secret, by its name or first letters: it would be kept in files and shown by ps."""
    found = list(dict.fromkeys(_found(spec)))
    if not found:
        return []
    text = (
        f"What looks like a secret is in it: {', '.join(found)}. It would be kept in spec.json and the job's script, "
        "and ps shows a command to everybody on its node. Export it in your shell instead, which the job inherits, or "
        "name a file of it: --sbatch-options=--export-file=PATH (NAME=VALUE, each ended by a NUL byte)."
    )
    return [Advice("secret", text)]


def _found(spec: JobSpec) -> Iterator[str]:
    command = " ".join([*spec.command, *(f"{key}={value}" for key, values in spec.grid.items() for value in values)])
    for where, text in (("the command", command), ("--setup", "\n".join(spec.setup))):
        for match in _NAMED.finditer(text):
            yield f"{match[1]} in {where}"
        for match in _KNOWN.finditer(text):
            yield f"{match[1]}… in {where}"
