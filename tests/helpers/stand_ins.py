"""Executables that stand in for what is not there, on a temporary PATH, so that real quoting is crossed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Words that a shell, or sbatch, could take for more than words.
HOSTILE = [
    "two words",
    "'",
    '"',
    "$(touch pwned)",
    "`touch pwned`",
    "a\nb",
    ";touch pwned",
    "\\",
    "$HOME",
    "ü",
    "",
    "*",
]

APPTAINER = """#!/bin/bash
# Stands in for Apptainer: a scrubbed environment but for APPTAINERENV_*, and nothing else of a container.
[[ $1 == exec ]] || exit 64
shift
while [[ $1 == --* ]]; do
  echo "option $1"
  case $1 in --pwd | --bind | --overlay) echo "  $2"; shift ;; esac
  shift
done
echo "image $1"
shift
kept=()
for name in ${!APPTAINERENV_@}; do kept+=("${name#APPTAINERENV_}=${!name}"); done
exec env -i PATH="$PATH" PYTHONPATH="${PYTHONPATH:-}" CONTAINED=yes "${kept[@]}" "$@"
"""


class FakeSlurm:
    """A folder first on the PATH, with commands that note how they were called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def command(self, name: str, script: str) -> None:
        """Make a command: it notes its arguments, stdin and environment, then does what `script` (bash) says."""
        path = self.folder / name
        noted = f"{self.folder}/{name}"
        path.write_text(
            "#!/bin/bash\n"
            f'printf "%s\\n" "$@" >>"{noted}.arguments"; echo --- >>"{noted}.arguments"\n'
            f'env -0 >"{noted}.env"; cat >"{noted}.stdin"\n{script}\n'
        )
        path.chmod(0o755)

    def calls(self, name: str) -> list[list[str]]:
        """The arguments of each call of a command."""
        path = self.folder / f"{name}.arguments"
        text = path.read_text() if path.exists() else ""
        return [call.splitlines() for call in text.split("---\n")[:-1]]

    def stdin(self, name: str) -> str:
        """What the last call read."""
        return (self.folder / f"{name}.stdin").read_text()

    def env(self, name: str) -> dict[str, str]:
        """The environment of the last call."""
        pairs = (self.folder / f"{name}.env").read_text().split("\0")
        return dict(pair.split("=", 1) for pair in pairs if pair)


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """A cluster that takes every job as number 12."""
    fake = FakeSlurm(tmp_path / "fake slurm")
    monkeypatch.setenv("PATH", f"{fake.folder}:{os.environ['PATH']}")
    fake.command("sbatch", "echo 12")
    fake.command("scontrol", "true")
    fake.command("scancel", "true")
    fake.command("sinfo", "exit 1")
    return fake
