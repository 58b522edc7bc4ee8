"""Tokens and passwords in what a submission keeps: its command, its setup lines, its grid."""

from __future__ import annotations

import re
from collections.abc import Iterator

from cluster_ddp.submission.checks.performance_warnings import Advice
from cluster_ddp.submission.spec import JobSpec

# NAME=value, --name=value or --name value. Shell variables ("$…") don't match: the text has no secret then.
_NAMED = re.compile(
    r"(?i)\b((?:\w+[_-])?(?:token|api[_-]?key|secret|secret[_-]?key|access[_-]?key|password|passwd))"
    r"(?:\s*=\s*|\s+)['\"]?[\w./+~-]{8,}"
)
# The forms of some services: Hugging Face, OpenAI and others, GitHub, GitLab, AWS, Slack.
_KNOWN = re.compile(r"\b(hf_|sk-|gh[pousr]_|github_pat_|glpat-|AKIA|xox[abp]-)[\w-]{16,}")


def advise(spec: JobSpec) -> list[Advice]:
    """Warn of what looks like a secret, by its name or first letters: files would keep it, and ps would show it."""
    found = list(dict.fromkeys(_found(spec)))
    if not found:
        return []
    text = (
        f"The job seems to contain a secret: {', '.join(found)}. It would be kept in spec.json and the job's script, "
        "and ps shows a command to everybody on its node. Export it in your shell instead, and take it out of the "
        "command: the job inherits it. Or write it to a file, printf 'NAME=VALUE\\0' >FILE, and submit with "
        "--sbatch-options=--export-file=FILE."
    )
    return [Advice("secret", text)]


def _found(spec: JobSpec) -> Iterator[str]:
    command = " ".join([*spec.command, *(f"{key}={value}" for key, values in spec.grid.items() for value in values)])
    for where, text in (("the command", command), ("--setup", "\n".join(spec.setup))):
        for match in _NAMED.finditer(text):
            yield f"{match[1]} in {where}"
        for match in _KNOWN.finditer(text):
            yield f"{match[1]}… in {where}"
