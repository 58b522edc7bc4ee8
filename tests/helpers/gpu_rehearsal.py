"""The GPU tests, called on the CPU, with torch and NumPy only."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

from slowness import LIMIT_S, scaled
from venvs import make_venv

ROOT = Path(__file__).parents[2]
GPU_TESTS = ROOT / "tests" / "gpu"
_FIRST = ROOT / "tests" / "helpers" / "every_python" / "sitecustomize.py"
# What the project needs besides, as a machine with GPUs may not have it.
_MISSING = ["tyro", "typeguard", "rich", "shtab", "submitit", "torchvision", "pooch", "requests", "pynvml"]


def run(
    *arguments: str, python: Path | str = sys.executable, timeout_s: float = LIMIT_S
) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [str(python), str(GPU_TESTS / "run.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=scaled(timeout_s))


def each_test_can_run(group: str, folder: Path) -> None:
    """One variant of each: a change in the package that breaks one shows here, not on somebody's GPUs."""
    packages = make_venv(folder / "venv")
    lines = [
        "import site, sys",
        f"site.addsitedir({sysconfig.get_path('purelib')!r})",
        f"sys.path.append({str(_FIRST.parent)!r})",
        f"sys.modules.update(dict.fromkeys({_MISSING}))",
    ]
    (packages / _FIRST.name).write_text("\n".join([*lines, _FIRST.read_text()]))
    python = folder / "venv" / "bin" / "python"
    done = run(group, "--rehearse", "--one-of-each", python=python, timeout_s=15 * LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(r"1\d passed, 0 failed, 0 skipped", done.stdout.splitlines()[-1])
