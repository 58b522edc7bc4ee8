"""How many samples a second the reference training processes: `python benchmarks/throughput.py [--python PATH]`.

Each contender is one process with a thread on each core: ours, PyTorch's own MNIST example under DDP as the documents
teach it, Lightning Fabric, and Hugging Face Accelerate. They take short turns, in rounds, and a ratio is of two turns
of the same round. Each round also measures how fast these cores multiply matrices: that is the limit. --python names
the Python of an environment that has the peers. Peers that are missing are left out.

On a machine with a GPU all train there, and ours with CUDA graphs, too. A step of 64 samples is far from what a GPU can
do, so no limit is measured.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from contenders import DOCUMENTS, Block, Contender, Team
from record import Figure, report

# Ours, with options of cluster_ddp.train. `at_least` is a multiple of the documents' script's samples per second.
OURS = (
    Contender(name="cluster_ddp, fp32", script="ours.py", at_least=1.25),
    Contender(name="cluster_ddp, bf16", script="ours.py", options=("--", "--amp", "bf16"), at_least=2.5, dtype="bf16"),
)
WITH_GRAPHS = tuple(
    replace(one, name=f"{one.name}, --cuda-graph", options=(*(one.options or ("--",)), "--cuda-graph")) for one in OURS
)
PEERS = (
    Contender(name="Lightning Fabric", script="fabric.py", needs="lightning_fabric"),
    Contender(name="Hugging Face Accelerate", script="hugging_face.py", needs="accelerate"),
)
# Forward and backward: 3 times the multiplications and additions of both convolutions and both linear layers, without
# the gradient of the first convolution's input.
FLOP_PER_SAMPLE = 71.57e6
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Percent of the rate of torch.mm.
SHARE_AT_LEAST = {"bf16": 50.0}
GEMM_SIZES = (512, 1024, 2048)
GEMM_S = 0.1


def main() -> None:
    """Measure and print."""
    options = _parse()
    cores = sorted(os.sched_getaffinity(0))
    workers = ("--workers", str(len(cores)))
    in_workers = replace(DOCUMENTS, name=f"{DOCUMENTS.name}, {len(cores)} loader processes", options=workers)
    peers = [replace(peer, python=options.python or peer.python) for peer in PEERS]
    on_gpu = torch.cuda.is_available()
    ours = OURS + WITH_GRAPHS if on_gpu else OURS
    contenders = [DOCUMENTS, *ours, in_workers, *(peer for peer in peers if peer.is_installed())]
    blocks: dict[str, list[Block]] = {one.name: [] for one in contenders}
    rates: dict[str, list[float]] = {} if on_gpu else {name: [] for name in DTYPES}
    with ExitStack() as stack:
        teams = {one.name: stack.enter_context(Team(one, options.data_dir, [cores])) for one in contenders}
        for _ in range(options.rounds):
            for name, team in teams.items():
                blocks[name] += team.turn()
            for name, measured in rates.items():
                measured.append(gemm_gflops(DTYPES[name]))
    left_out = [f"{peer.name}: not installed" for peer in peers if not peer.is_installed()]
    report(*figures(contenders, blocks, rates), left_out=left_out, is_on_gpu=on_gpu)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="the root of torchvision's MNIST class")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each (default: %(default)s)")
    parser.add_argument("--python", help="Python of an environment with lightning-fabric and accelerate")
    return parser.parse_args()


def gemm_gflops(dtype: torch.dtype) -> float:
    """The rate of torch.mm on these cores in GFLOP/s: the best of all sizes and calls."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    best = 0.0
    for size in GEMM_SIZES:
        a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
        best = max(best, 2 * size**3 / _best_s(lambda a=a, b=b: torch.mm(a, b)) / 1e9)  # type: ignore[misc]
    return best


def _best_s(action: Callable[[], object]) -> float:
    times, end_s = [], time.perf_counter() + GEMM_S
    while time.perf_counter() < end_s:
        start_s = time.perf_counter()
        action()
        times.append(time.perf_counter() - start_s)
    return min(times)


def figures(
    contenders: Sequence[Contender], blocks: Mapping[str, Sequence[Block]], rates: Mapping[str, Sequence[float]]
) -> list[Figure]:
    """All figures.

    Args:
        contenders: the documents' script first.
        blocks: contender -> its block of each round.
        rates: dtype -> torch.mm's GFLOP/s in each round; empty on a GPU.
    """
    best = {dtype: max(values) for dtype, values in rates.items()}
    limits = {dtype: f"torch.mm {dtype}: {value:,.0f} GFLOP/s" for dtype, value in best.items()}
    ours = [one for one in contenders if one.script == "ours.py"]
    limited = [DOCUMENTS, *ours] if rates else []
    return [
        *(_speed(one, blocks[one.name], blocks[DOCUMENTS.name]) for one in contenders),
        *(_share(one, blocks[one.name], best[one.dtype], limits[one.dtype]) for one in limited),
        *(_waiting(one, blocks[one.name], at_most=1.0 if one in ours else None) for one in [DOCUMENTS, *ours]),
    ]


def _speed(one: Contender, blocks: Sequence[Block], documents: Sequence[Block]) -> Figure:
    values = [block.samples_per_s for block in blocks]
    ratios = [value / base.samples_per_s for value, base in zip(values, documents)]
    if one is DOCUMENTS:
        return Figure(what=one.name, values=values, unit="samples/s")
    return Figure(
        what=one.name, values=values, unit="samples/s", ratios=ratios, peer=DOCUMENTS.name, at_least=one.at_least
    )


def _share(one: Contender, blocks: Sequence[Block], gflops: float, limit: str) -> Figure:
    values = [100 * block.samples_per_s * FLOP_PER_SAMPLE / (gflops * 1e9) for block in blocks]
    target = SHARE_AT_LEAST.get(one.dtype)
    return Figure(what=f"{one.name}: of the cores' rate", values=values, unit="%", limit=limit, at_least=target)


def _waiting(one: Contender, blocks: Sequence[Block], *, at_most: float | None) -> Figure:
    values = [100 * block.waited_s / block.seconds for block in blocks]
    return Figure(what=f"{one.name}: waiting for data", values=values, unit="% of the time", at_most=at_most)


if __name__ == "__main__":
    main()
