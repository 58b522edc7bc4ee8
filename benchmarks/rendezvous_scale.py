"""How long many ranks take to meet, on this machine: `python benchmarks/rendezvous_scale.py` (as root, on Linux).

It measures from "all are started and ready" to "all know that all are there", for `store.meet` and, alternating
with it, for a plain TCPStore: made as `init_process_group` makes it for env://, then torch's barrier over it
(TORCH_DIST_INIT_BARRIER). The name servers are dead, or answer at once. `many_ranks` describes how the ranks are made.
Prints JSON, and a table to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from typing import Any, get_args

import many_ranks
from growth import exponent
from many_ranks import NameServers
from record import Figure, report
from tables import table

TARGET_RANKS, TARGET_S = 1000, 1.5
_TIMEOUT_S = 110.0
_PEER = "a TCPStore as env:// makes it, and torch's barrier over it"

# name servers -> ranks -> who -> seconds until the last rank finished, one for each round
Seconds = dict[str, dict[int, dict[str, list[float]]]]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 250, 1000], help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each (default: %(default)s)")
    parser.add_argument("--name-servers", nargs="+", choices=get_args(NameServers), default=get_args(NameServers))
    parser.add_argument("--alone", action="store_true", help="without the peer")
    parser.add_argument("--inside", choices=get_args(NameServers), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        print(json.dumps(_measure(arguments)))
    else:
        _report({name_servers: _measure_in_own_network(name_servers) for name_servers in arguments.name_servers})


def _measure_in_own_network(name_servers: NameServers) -> dict[int, dict[str, list[float]]]:
    command = many_ranks.in_own_network([sys.executable, *sys.argv, "--inside", name_servers])
    done = subprocess.run(command, capture_output=True, text=True)  # each rank of torch warns of dead name servers
    if done.returncode != 0:
        sys.exit(done.stderr[-5000:])
    return {int(ranks): seconds for ranks, seconds in json.loads(done.stdout).items()}


def _measure(arguments: argparse.Namespace) -> dict[int, dict[str, list[float]]]:
    many_ranks.enter_own_network(arguments.inside)
    os.environ["CLUSTER_DDP_SECRET"] = os.urandom(32).hex()
    who = {"ours": _meet} if arguments.alone else {"ours": _meet, "peer": _meet_plainly}
    jobs = count(1)
    seconds: dict[int, dict[str, list[float]]] = {ranks: {name: [] for name in who} for ranks in arguments.ranks}
    for ranks, by_name in seconds.items():
        for _ in range(arguments.rounds):
            for name, meet in who.items():
                run, rehearsal = meet(ranks, next(jobs)), meet(ranks, next(jobs))
                by_name[name].append(max(many_ranks.start_all(ranks, run, rehearse=rehearsal)))
    return seconds


def _meet(ranks: int, job_id: int) -> Callable[[int], object]:
    """What a rank of our job does."""
    from cluster_ddp.runtime.rendezvous import store

    return lambda rank: store.meet(_topology(rank, ranks, job_id), "cpu", timeout_s=_TIMEOUT_S)


def _meet_plainly(ranks: int, job_id: int) -> Callable[[int], object]:
    import torch.distributed as dist

    timeout = timedelta(seconds=_TIMEOUT_S)

    def meet(rank: int) -> object:
        place = _topology(rank, ranks, job_id)
        address = (place.master_addr, place.master_port)
        store = dist.TCPStore(*address, ranks, rank == 0, timeout=timeout, multi_tenant=True)
        name = dist.distributed_c10d.GroupName("default")
        dist.distributed_c10d._store_based_barrier(rank, store, name, ranks, timeout)
        return store

    return meet


def _topology(rank: int, ranks: int, job_id: int) -> Any:
    from cluster_ddp.slurm.topology import Topology

    step = {"SLURM_JOB_ID": job_id, "SLURM_STEP_ID": 0, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}
    # Two nodes in name: the ranks of one would meet on its loopback, and ask no name server.
    nodes = {"SLURM_STEP_NODELIST": f"{many_ranks.HOST},elsewhere", "SLURM_STEP_TASKS_PER_NODE": f"{ranks - 1},1"}
    size = {"SLURM_STEP_NUM_TASKS": ranks, **nodes}
    return Topology.from_environ({name: str(value) for name, value in {**step, **size}.items()})


def _report(seconds: Seconds) -> None:
    figures, rows = [], []
    for name_servers, by_ranks in seconds.items():
        for ranks, by_name in by_ranks.items():
            ours, peer = by_name["ours"], by_name.get("peer", [])
            what = f"{ranks} ranks meet, name servers {name_servers}"
            ratios = [one / other for one, other in zip(ours, peer)]
            figures.append(Figure(what=what, values=ours, unit="s", ratios=ratios, peer=_PEER if peer else ""))
            if ranks == TARGET_RANKS:
                figures.append(Figure(what=f"{what}: against the clock", values=ours, unit="s", at_most=TARGET_S))
            medians = [f"{statistics.median(values):.2f}" for values in (ours, peer, ratios) if values]
            rows.append([str(ranks), name_servers, *medians])
    growth = {
        f"{name}, name servers {name_servers}": round(exponent(_medians(by_ranks, name)), 2)
        for name_servers, by_ranks in seconds.items()
        for name in next(iter(by_ranks.values()))
        if len(by_ranks) > 1
    }
    report(*figures, growth_with_the_ranks=growth)
    print(
        table(["ranks", "name servers", "ours, s", "peer, s", "ratio"][: len(rows[0])], rows), growth, file=sys.stderr
    )


def _medians(by_ranks: dict[int, dict[str, list[float]]], name: str) -> dict[int, float]:
    return {ranks: statistics.median(by_name[name]) for ranks, by_name in by_ranks.items()}


if __name__ == "__main__":
    main()
