"""Join the world of ranks, and leave it, also after a failure."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from cluster_ddp import processes
from cluster_ddp.agent import rank_notes
from cluster_ddp.errors import SpecError
from cluster_ddp.run.names import Env
from cluster_ddp.runtime import process_exit, process_group, stop_signals
from cluster_ddp.runtime.collectives import DEFAULT_COLLECTIVE_TIMEOUT_S
from cluster_ddp.runtime.data.data_loader import keep_through_stops
from cluster_ddp.runtime.device import device as devices
from cluster_ddp.runtime.device import interruptible_wait
from cluster_ddp.runtime.failure.error_report import FailureReporter
from cluster_ddp.runtime.failure.hang_watch import DEFAULT_WARNING_S, STORE_PATIENCE_S, HangWatch
from cluster_ddp.runtime.failure.peer_watch import PeerWatch
from cluster_ddp.runtime.rendezvous import arrived_ranks, host_setup, run_label, store
from cluster_ddp.runtime.rendezvous.port_discovery import run_key
from cluster_ddp.runtime.run_dir import background_writer
from cluster_ddp.runtime.stop_signals import Stopped
from cluster_ddp.runtime.world import World
from cluster_ddp.slurm.topology import Topology
from cluster_ddp.slurm.variables import node_name

log = logging.getLogger("cluster_ddp")

may_join = True
"""False while a script is only imported, to look at its model."""


@contextmanager
def distributed(
    *,
    cuda: bool = True,
    deterministic: bool = False,
    rendezvous_timeout_s: float = store.DEFAULT_TIMEOUT_S,
    collective_timeout_s: float = DEFAULT_COLLECTIVE_TIMEOUT_S,
    hang_warning_s: float = DEFAULT_WARNING_S,
) -> Iterator[World]:
    """Join the world of ranks that the environment describes, and leave it at the end of the body.

    An exception in the body is printed once, with rank and host. Warnings (USR1, USR2) are kept for `Checkpointer`.

    Args:
        cuda: use GPUs if this process sees any.
        deterministic: the same bits in every run on the same machines (NCCL chooses its algorithms by them, too).
        rendezvous_timeout_s: seconds to wait for all ranks.
        collective_timeout_s: seconds to wait for others in a collective; then ranks name the missing ones and end.
        hang_warning_s: seconds without a step until ranks say where they are; 0: never. `--hang-restart-s` ends them.

    Raises:
        SpecError: `cluster-ddp memory` imports the script, which trains at its top level.
        TopologyError: the environment contradicts itself, or its node list can't be read.
        RendezvousError: ranks are missing, or rank 0 can't be found or can't serve them.
        DeviceError: GPUs don't match the ranks, torch sees none of those that Slurm gave, or only some ranks have one.
        RunDirError, CheckpointError: at the end, on rank 0: the last files can't be written.
    """
    reporter, topology = _begin(collective_timeout_s)
    device, *more_devices = devices.set_up(topology, cuda=cuda, deterministic=deterministic)
    world, peers = _meet(topology, [device, *more_devices], reporter, rendezvous_timeout_s)
    _watch_for_hangs(reporter, hang_warning_s)
    try:
        yield world
        _finish(world)
    except Stopped as stopped:  # on all ranks, after all was saved that could be
        _leave(reporter, peers, after=stopped)
        raise
    except BaseException as error:
        _leave_alone(device, reporter, peers, error)
        raise
    _leave(reporter, peers)


def _begin(collective_timeout_s: float) -> tuple[FailureReporter, Topology]:
    """Start to report failures and to record signals. Also returns this rank's place."""
    if not may_join:
        found = "it is only imported now, and at its top level it trains."
        raise SpecError("Looking at the model of a script:", found, 'train under: if __name__ == "__main__":')
    if agent := os.environ.get(Env.AGENT):
        processes.end_with(agent)
    stop_signals.note_early(stop_signals.WARNINGS)
    reporter = FailureReporter()
    reporter.install()
    topology = Topology.from_environ(os.environ)
    reporter.note_place(topology, collective_timeout_s=collective_timeout_s)
    _set_up_logging(topology)
    background_writer.forget()
    keep_through_stops()
    host_setup.raise_open_files_limit()
    return reporter, topology


def _meet(
    topology: Topology, all_devices: list[torch.device], reporter: FailureReporter, timeout_s: float
) -> tuple[World, PeerWatch]:
    """Find the other ranks and make the process group."""
    device = all_devices[0]
    key = run_key(topology, os.environ)
    common = store.meet(topology, device.type, key, timeout_s=timeout_s)
    reporter.note_store(common)
    topology = arrived_ranks.with_common_restarts(topology, common)
    host_setup.choose_interface(topology, os.environ)
    host_setup.warn_of_other_groups(topology, os.environ)
    peers = _join(topology, all_devices, reporter)
    world = World(
        topology=topology,
        device=device,
        more_devices=tuple(all_devices[1:]),
        collective_timeout_s=reporter.collective_timeout_s,
        peer_failed=peers.has_failed,
        key=key,
        run_label=run_label.common(topology, common, os.environ),
    )
    return world, peers


def _join(topology: Topology, all_devices: list[torch.device], reporter: FailureReporter) -> PeerWatch:
    """Make the process group, with a `PeerWatch` running: NCCL waits for all ranks without a time limit."""
    assert reporter.store is not None
    has_joined = threading.Event()
    device = all_devices[0]

    def is_busy() -> bool:
        return not has_joined.is_set() or any(map(interruptible_wait.is_busy, all_devices))

    def own_error() -> Exception | None:
        return process_group.communicator_error(device) if has_joined.is_set() else None

    peers = PeerWatch(reporter, is_busy, topology.world_size, own_error)
    if device.type == "cuda" and topology.world_size > 1:
        peers.start()
    try:
        process_group.join(topology, device, reporter.store, timeout_s=reporter.collective_timeout_s)
    except BaseException:
        peers.stop()
        raise
    has_joined.set()
    rank_notes.joined(os.environ, topology.rank)
    reporter.install()  # again: init_process_group has installed a hook before it
    return peers


def _watch_for_hangs(reporter: FailureReporter, warning_s: float) -> None:
    """Start a thread that says where this rank is when no step completes, unless it is the only rank."""
    assert reporter.topology is not None
    if reporter.topology.world_size == 1 or not warning_s:
        return
    restart_s = float(os.environ.get(Env.HANG_RESTART_S) or "inf")
    hangs = HangWatch(
        reporter.topology,
        functools.partial(reporter.ask_store, patience_s=STORE_PATIENCE_S),
        warning_s=warning_s,
        timeout_s=reporter.collective_timeout_s,
        restart_s=restart_s,
        end=functools.partial(reporter.end_hang, restart_s),
    )
    reporter.note_hangs(hangs)
    hangs.start()


def _finish(world: World) -> None:
    """Wait until rank 0's files are on disk. Then all ranks may leave."""
    if dist.is_initialized():
        background_writer.settle(world)
        world.barrier()  # rank 0 serves the store: it must not leave while others use it
        return
    if world.is_main:
        log.warning(
            "The script has ended the process group itself. cluster_ddp.distributed() does that when its body ends. "
            "Hint: leave torch.distributed.destroy_process_group() out"
        )
    background_writer.settle(world, together=False)


def _leave(reporter: FailureReporter, peers: PeerWatch, after: Stopped | None = None) -> None:
    """Leave together with all other ranks."""
    peers.stop()
    if reporter.hangs is not None:
        reporter.hangs.stop()
    reporter.note_store(None)
    process_group.leave()
    if after is not None and background_writer.are_stuck():
        process_exit.now(after.code)


def _leave_alone(device: torch.device, reporter: FailureReporter, peers: PeerWatch, error: BaseException) -> None:
    """Leave after an exception, or end the process if leaving would take forever."""
    peers.stop()
    is_failure = not isinstance(error, SystemExit) or bool(error.code)
    if is_failure:
        reporter.report(error)
    if reporter.hangs is not None:
        reporter.hangs.stop()
    if interruptible_wait.is_broken(device) or background_writer.are_stuck() or not process_group.abort(device):
        reporter.linger()
        process_exit.now(error.code if isinstance(error, SystemExit) and type(error.code) is int else int(is_failure))


def _set_up_logging(topology: Topology) -> None:
    if log.handlers:
        return
    handler = logging.StreamHandler()
    prefix = f"[rank {topology.rank} {node_name(os.environ)}]"
    handler.setFormatter(logging.Formatter(f"{prefix} %(levelname)s: %(message)s"))
    log.addHandler(handler)
    log.propagate = False
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)
