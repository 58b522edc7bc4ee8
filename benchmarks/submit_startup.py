"""How long the command line of a submission takes, compared with two Python imports and with TorchX.

    python benchmarks/submit_startup.py [--rounds 20] [--torchx PATH]

Each round runs each command once, as a whole process. This package must be installed; --torchx names the `torchx` of an
environment that has it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from record import Figure, report

IMPORTS = "import argparse, jinja2"
JOB = ("--nodes", "2", "--gpus-per-node", "2")
TIMES_IMPORTS_AT_MOST = 3.0
TIMES_TORCHX_AT_MOST = 0.5


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="runs of each (default: %(default)s)")
    parser.add_argument("--torchx", help="the torchx to compare with")
    options = parser.parse_args()
    submit = (sys.executable, "-m", "cluster_ddp.submit")
    commands: dict[str, tuple[str, ...]] = {
        f'python -c "{IMPORTS}"': (sys.executable, "-c", IMPORTS),
        "--help": (*submit, "--help"),
        "--dry-run": (*submit, *JOB, "--dry-run"),
        "--dry-run of a script": (*submit, *JOB, "--dry-run", "--", "python", "my_train.py"),
    }
    if options.torchx:
        dry_run = ("run", "--dryrun", "-s", "slurm", "dist.ddp", "-j", "2x2", "--script", "my_train.py")
        commands["torchx run --dryrun"] = (options.torchx, *dry_run)
    taken_s = measure(commands, options.rounds)
    report(*figures(taken_s), left_out=[] if options.torchx else ["TorchX: none was named"])


def measure(commands: Mapping[str, tuple[str, ...]], rounds: int) -> dict[str, list[float]]:
    """Command -> its seconds in each round."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "my_train.py").touch()
        for command in commands.values():
            _seconds(command, folder)  # Python keeps the compiled modules
        taken = [[_seconds(command, folder) for command in commands.values()] for _ in range(rounds)]
    return {name: list(seconds) for name, seconds in zip(commands, zip(*taken))}


def _seconds(command: tuple[str, ...], folder: str) -> float:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    start_s = time.perf_counter()
    subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True)
    return time.perf_counter() - start_s


def figures(taken_s: Mapping[str, Sequence[float]]) -> list[Figure]:
    """Compare each command with the imports, and the dry run of a script with TorchX's if it was measured."""
    imports, *ours = [name for name in taken_s if not name.startswith("torchx")]
    found = [Figure(what=imports, values=taken_s[imports], unit="s")]
    found += [_against(name, imports, taken_s, TIMES_IMPORTS_AT_MOST) for name in ours]
    for torchx in taken_s.keys() - {imports, *ours}:
        found.append(_against(torchx, imports, taken_s, None))
        found.append(_against(ours[-1], torchx, taken_s, TIMES_TORCHX_AT_MOST))
    return found


def _against(name: str, peer: str, taken_s: Mapping[str, Sequence[float]], at_most: float | None) -> Figure:
    ratios = [mine / theirs for mine, theirs in zip(taken_s[name], taken_s[peer])]
    return Figure(what=name, values=taken_s[name], unit="s", ratios=ratios, peer=peer, at_most=at_most)


if __name__ == "__main__":
    main()
