"""Warnings of secrets in what a submission keeps, and of run directories that others can replace."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from cluster_ddp.ownership import others
from cluster_ddp.submission.checks.performance_warnings import Advice
from cluster_ddp.submission.spec import JobSpec

# NAME=value, --name=value or --name value. Shell variables ("$…") don't match: the text has no secret then.
_NAMED = re.compile(
    r"(?i)\b((?:\w+[_-])?(?:token|api[_-]?key|secret|secret[_-]?key|access[_-]?key|password|passwd))"
    r"(?:\s*=\s*|\s+)['\"]?[\w./+~-]{8,}"
)
# The forms of some services: Hugging Face, OpenAI and others, GitHub, GitLab, AWS, Slack.
_KNOWN = re.compile(r"\b(hf_|sk-|gh[pousr]_|github_pat_|glpat-|AKIA|xox[abp]-)[\w-]{16,}")


def of_secrets(spec: JobSpec) -> list[Advice]:
    """Warn of what looks like a secret, by its name or first letters: files would keep it, and ps would show it."""
    values = [f"{key}={value}" for key, values in spec.grid.items() for value in values]
    texts = {"the command": " ".join([*spec.command, *values]), "--setup": "\n".join(spec.setup)}
    found: list[str] = []
    for where, text in texts.items():
        found += [f"{match[1]} in {where}" for match in _NAMED.finditer(text)]
        found += [f"{match[1]}… in {where}" for match in _KNOWN.finditer(text)]
    if not found:
        return []
    text = (
        f"The job seems to contain a secret: {', '.join(dict.fromkeys(found))}. It would be kept in spec.json and the "
        "job's script, and ps shows a command to everybody on its node. Export it in your shell instead, and take it "
        "out of the command: the job inherits it. Or write it to a file, printf 'NAME=VALUE\\0' >FILE, and submit with "
        "--sbatch-options=--export-file=FILE."
    )
    return [Advice("secret", text)]


def of_shared_runs(folder: Path) -> list[Advice]:
    """Warn if somebody else can rename what is in a folder of run directories: jobs load code from them.

    One that does not exist yet will be ours.
    """
    try:
        found = others(folder.stat())
    except OSError:
        return []
    if not found:
        return []
    text = (
        f"{folder} {found}. So others can put a run directory of theirs in the place of yours, and a job that waits"
        f" would run its code. If it is to be shared, its owner can prevent that: chmod +t {shlex.quote(str(folder))}"
    )
    return [Advice("shared-runs", text)]
