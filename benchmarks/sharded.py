"""Sharded models: memory, saves and loads. `python benchmarks/sharded.py [--rounds 5] [--folder FOLDER]`.

Memory per rank of a GPT under DDP and under FSDP on 2 and 4 ranks; how long a save blocks the training, and how long a
load takes, against torch.distributed.checkpoint (DCP) on the same model in one run; and a resume with many tensors. The
ranks are processes of this machine (gloo).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from record import Figure, report

RANKS = Path(__file__).with_name("sharded_ranks.py")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="saves and loads of each kind (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    report(*all_figures(parser.parse_args()))


def run(ranks: int, options: argparse.Namespace, *arguments: str) -> dict[str, list[float]]:
    """Run one measurement on so many ranks; of each value the slowest or largest rank's."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nproc-per-node={ranks}",
            "--standalone",
            str(RANKS),
        ]
        command += [f"--rounds={options.rounds}", f"--folder={folder}", *arguments]  # the last one counts
        # Without this, freed memory stays with the process.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env)
    found: dict[str, list[float]] = json.loads(next(one for one in done.stdout.splitlines() if one.startswith("{")))
    return found


def all_figures(options: argparse.Namespace) -> list[Figure]:
    """All figures."""
    return [
        *of_memory(options),
        *of_saves(options, 512, "58 M parameters with AdamW on 2 ranks"),
        *of_saves(options, 1024, "222 M parameters"),
        *of_many(options, 16, 10_000),
        *of_many(options, 4, 100_000),
    ]


def of_memory(options: argparse.Namespace) -> list[Figure]:
    """Memory per rank, against DDP."""
    how = ("--measure=memory", "--width=512")
    ddp, figures = run(2, options, *how, "--strategy=ddp"), []
    figures += [Figure(what=f"58 M parameters, DDP: {name}", values=ddp[name], unit="MiB") for name in ddp]
    for ranks, at_most in ((2, None), (4, 0.5)):
        for name, values in run(ranks, options, *how, "--strategy=fsdp").items():
            ratios = [values[0] / ddp[name][0]]
            what = f"FSDP on {ranks} ranks: {name}"
            figures.append(Figure(what=what, values=values, unit="MiB", ratios=ratios, peer="DDP", at_most=at_most))
    return figures


def of_saves(options: argparse.Namespace, width: int, what: str) -> list[Figure]:
    """Saves and loads on 2 ranks, against DCP."""
    found = run(2, options, "--measure=saves", f"--width={width}")
    ours, digest = found["blocked by ours"], found["digest"]
    load = [whole - hashing for whole, hashing in zip(found["load by ours"], digest)]

    def against(name: str, values: list[float], to: str, peer: str, at_most: float | None = None) -> Figure:
        ratios = [one / other for one, other in zip(values, found[to])]
        return Figure(what=name, values=values, unit="s", ratios=ratios, peer=peer, at_most=at_most)

    return [
        against(f"{what}: a save blocks for", ours, "copy", "one copy of the pieces in memory", 1.3),
        against("…", ours, "blocked by DCP", "DCP's save", 0.2),
        against("…", ours, "blocked by DCP async", "DCP's async_save"),
        against(f"{what}: a load, without the digest", load, "load by DCP", "DCP's load", 1.5),
        Figure(what="… the digest", values=digest, unit="s"),
    ]


def of_many(options: argparse.Namespace, ranks: int, tensors: int) -> list[Figure]:
    """A resume with many tensors."""
    found = run(ranks, options, "--measure=many", f"--tensors={tensors}", "--rounds=1")
    what = f"{tensors:,} tensors on {ranks} ranks"
    return [
        Figure(
            what=f"{what}: a {kind}",
            values=found[f"{kind} by ours"],
            unit="s",
            ratios=[ours / other for ours, other in zip(found[f"{kind} by ours"], found[f"{kind} by DCP"])],
            peer="DCP",
        )
        for kind in ("save", "load")
    ]


if __name__ == "__main__":
    main()
