"""Examine a step: this rank leads or follows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path

from cluster_ddp.doctor.step import exchange
from cluster_ddp.doctor.step.follower import Follower
from cluster_ddp.doctor.step.leader import Leader
from cluster_ddp.doctor.step.place import Place, exchange_dir
from cluster_ddp.doctor.step.rank import Options
from cluster_ddp.runtime.rendezvous import host_network

_STALE_S = 900.0


def examine(options: Options, env: Mapping[str, str]) -> int:
    """Examine this rank, together with all others. Rank 0 prints the verdict. Returns the exit status of all."""
    host_network.raise_open_files_limit()
    place = Place.of(env)
    is_alone = place.world_size == 1 and place.error is None
    folder = None if is_alone else _made(exchange_dir(place, env))
    kind = Leader if place.rank == 0 and _leads(folder) else Follower
    rank = kind(options, env, place, folder)
    try:
        return rank.run()
    finally:
        rank.close()


def _leads(folder: Path | None) -> bool:
    """Whether this process leads: several may take themselves for rank 0. The first that makes a file does."""
    if folder is None:
        return True
    try:
        with contextlib.suppress(FileNotFoundError):
            marker = folder / exchange.LEADS
            if time.time() - marker.stat().st_mtime > _STALE_S:  # of a doctor that was killed
                marker.unlink()
        return exchange.is_first(folder, exchange.LEADS)
    except OSError:
        return True


def _made(folder: Path) -> Path | None:
    try:
        folder.mkdir(exist_ok=True)
    except OSError:
        return None
    return folder
