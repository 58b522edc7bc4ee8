"""How long the command line of a submission takes, against two Python imports and against TorchX.

    python benchmarks/submit_startup.py [--rounds 20] [--torchx PATH]

Runs each command once a round, in turn, and prints JSON: the median of each in seconds, and the medians of the ratios
within a round. Needs this package, installed; --torchx names the `torchx` of an environment that has it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

IMPORTS = "import argparse, jinja2"
JOB = ("--nodes", "2", "--gpus-per-node", "2")


def main() -> int:
    """Measure, print. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="times that each is run (default: %(default)s)")
    parser.add_argument("--torchx", help="the torchx to compare with")
    arguments = parser.parse_args()
    submit = (sys.executable, "-m", "cluster_ddp.submit")
    commands: dict[str, tuple[str, ...]] = {
        "imports": (sys.executable, "-c", IMPORTS),
        "help": (*submit, "--help"),
        "dry_run": (*submit, *JOB, "--dry-run"),
        "dry_run_script": (*submit, *JOB, "--dry-run", "--", "python", "my_train.py"),
    }
    if arguments.torchx:
        dry_run = ("run", "--dryrun", "-s", "slurm", "dist.ddp", "-j", "2x2", "--script", "my_train.py")
        commands["torchx_dry_run"] = (arguments.torchx, *dry_run)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "my_train.py").touch()
        for command in commands.values():
            _seconds(command, folder)  # Python keeps the compiled modules
        rounds = [
            {name: _seconds(command, folder) for name, command in commands.items()} for _ in range(arguments.rounds)
        ]
    print(json.dumps(_summary(rounds), indent=2))
    return 0


def _seconds(command: tuple[str, ...], folder: str) -> float:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True)
    return time.perf_counter() - start


def _summary(rounds: list[dict[str, float]]) -> dict[str, object]:
    names = list(rounds[0])
    pairs = [(name, "imports") for name in names[1:]]
    if "torchx_dry_run" in names:
        pairs.append(("dry_run_script", "torchx_dry_run"))
    return {
        "rounds": len(rounds),
        "median_s": {name: round(statistics.median(one[name] for one in rounds), 4) for name in names},
        "ratio": {f"{a}/{b}": round(statistics.median(one[a] / one[b] for one in rounds), 2) for a, b in pairs},
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "date": date.today().isoformat(),
    }


if __name__ == "__main__":
    sys.exit(main())
