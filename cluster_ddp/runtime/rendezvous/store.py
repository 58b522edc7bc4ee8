"""The store of one run: rank 0 serves it, all ranks join it, and each waits until all have arrived.

Rank 0 serves a TCPStore on any free port; the beacon (`port_discovery`) tells its port to the other ranks only. The key
of the run is made of the job's secret, job, array task, step and restart count, so that a requeued job never joins its
former run. A TCPStore has no passwords: who finds its port can read all keys (see docs/security.md).

Every rank writes its host name and its kind of device into the store. Rank 0 waits for all of them and writes the
verdict. A mix of ranks on CPUs and on GPUs is refused: they would wait for each other in different collectives.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from cluster_ddp.agent.channel import Key
from cluster_ddp.errors import DeviceError, RendezvousError
from cluster_ddp.run.names import Env
from cluster_ddp.runtime.rendezvous import arrived_ranks, host_setup, port_discovery
from cluster_ddp.runtime.rendezvous.host_setup import ReverseLookup, resolve, without_name_servers
from cluster_ddp.slurm.topology import Topology
from cluster_ddp.slurm.variables import node_name

log = logging.getLogger("cluster_ddp")

DEFAULT_TIMEOUT_S = 300.0
# How much longer than the timeout the others wait for rank 0's verdict, which names the missing ranks.
_VERDICT_GRACE_S = 5.0
# How long the look-ups of all peers may take in one process; if they take longer, name servers are not used.
_LOOKUP_PATIENCE_S = 0.3
# Open files besides the connections to the other ranks: libraries, data, logs.
_OTHER_FILES = 256
_PROCEED = "proceed"
_ODD_DEVICES = "devices: "  # begins a verdict


def meet(
    topology: Topology, device_type: str, key: Key | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
) -> dist.Store:
    """Wait until all ranks of the run have arrived. Returns a store that only they share.

    `device_type` is "cpu" or "cuda"; the key of the run is by default made from this process's environment.

    Raises:
        DeviceError: not all ranks have the same kind of device.
        RendezvousError: ranks are missing (it names them), another process has the same rank, rank 0 can't be found, no
            candidate port is free, or the limit on open files is too low for the ranks.
    """
    if topology.world_size == 1:
        return dist.HashStore()
    return _Rendezvous(topology, device_type, key or port_discovery.run_key(topology, os.environ), timeout_s).meet()


class _Rendezvous:
    """One rank's part. See `meet`."""

    def __init__(self, topology: Topology, device_type: str, key: Key, timeout_s: float) -> None:
        self._topology, self._device_type, self._key, self._timeout_s = topology, device_type, key, timeout_s
        self._deadline = time.monotonic() + timeout_s

    def meet(self) -> dist.Store:
        """Serve or join the store, and wait until all ranks have arrived."""
        topology = self._topology
        if topology.rank == 0 and topology.num_nodes != 1 and not self._key.is_secret:
            log.warning(
                "These ranks share no secret: anybody who reaches %s over the network can join them. Hint: in the "
                "batch script, before srun: export %s=$(openssl rand -hex 32)",
                *(node_name(os.environ), Env.SECRET),
            )
        is_local = topology.num_nodes == 1
        address = host_setup.LOOPBACK if is_local else resolve(topology.master_addr, self._deadline)
        if topology.rank == 0:
            return self._serve()
        lookup = ReverseLookup(address)
        port, heard = port_discovery.find_store(topology, self._key, address, self._deadline)
        if port is None:
            raise self._timeout_error(f"rank {topology.rank} did not find rank 0 on {topology.master_addr} ({heard}).")
        with _names_in_time(lookup, _LOOKUP_PATIENCE_S):
            store = _tcp_store(address, port, self._timeout_s)
        return self._gather(store)

    def _serve(self) -> dist.Store:
        """Rank 0's part: serve the store, and the beacon until all have arrived."""
        topology = self._topology
        _check_open_files(topology)
        lookup = ReverseLookup(host_setup.LOOPBACK)
        with contextlib.closing(host_setup.bind_first_free(topology)) as listener:
            # The store looks up all clients, one after the other.
            with _names_in_time(lookup, _LOOKUP_PATIENCE_S / topology.world_size):
                own = host_setup.listen(topology, 0)
                port = own.getsockname()[1]
                store = _tcp_store(host_setup.LOOPBACK, port, self._timeout_s, listener=own)
            with port_discovery.answering(listener, self._key, store.port, topology.world_size):
                return self._gather(store)

    def _gather(self, tcp_store: dist.TCPStore) -> dist.Store:
        """Write this rank's arrival, and wait for rank 0's verdict."""
        topology = self._topology
        store = dist.PrefixStore(self._key.mac("store").decode(), tcp_store)
        if store.add(f"claim/{topology.rank}", 1) > 1:
            raise RendezvousError(
                f"Joining the run at {topology.master_addr} as rank {topology.rank}:",
                f"another process has already joined it as rank {topology.rank}.",
                "check whether another run uses the same MASTER_ADDR and MASTER_PORT, or every task has the same RANK",
            )
        store.set(arrived_ranks.arrival(topology.rank), f"{node_name(os.environ)} {self._device_type}")
        if topology.rank == 0:
            verdict = _verdict(topology, store, self._deadline)
            store.set("verdict", verdict)
            if verdict != _PROCEED:
                time.sleep(1.0)  # the others read the verdict from this process
        else:
            try:
                # Not until our own deadline: rank 0 may have started long after us. If it dies, the wait ends at once.
                store.wait(["verdict"], timedelta(seconds=self._timeout_s + _VERDICT_GRACE_S))
                verdict = store.get("verdict").decode()
            except dist.DistError as error:
                found = f"rank 0 on {topology.master_addr} was reached, and then sent no result."
                raise self._timeout_error(found) from error
        if verdict.startswith(_ODD_DEVICES):
            raise DeviceError(
                f"Training on {topology.world_size} ranks together:",
                verdict.removeprefix(_ODD_DEVICES),
                "check that node's GPUs: nvidia-smi, sinfo -N -o '%N %G %E'; leave the node out: --exclude=NODE; "
                "or use CPUs everywhere: distributed(cuda=False) (of cluster-ddp train: --no-cuda)",
            )
        if verdict != _PROCEED:
            raise self._timeout_error(verdict)
        return store

    def _timeout_error(self, found: str) -> RendezvousError:
        ranks, host = self._topology.world_size, self._topology.master_addr
        return RendezvousError(
            f"Waiting {self._timeout_s:g} s for {ranks} ranks to meet on {host}:",
            found,
            "read in those tasks' output why they did not start; for a slow start, wait longer: "
            "distributed(rendezvous_timeout_s=…) (of cluster-ddp train: --rendezvous-timeout-s)",
        )


def _check_open_files(topology: Topology) -> None:
    """Check the limit: the store has a connection to every rank. `distributed` has raised it as far as possible."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit != resource.RLIM_INFINITY and limit < topology.world_size + _OTHER_FILES:
        raise RendezvousError(
            f"Serving the rendezvous of {topology.world_size} ranks:",
            f"each takes one open file, and this process on {node_name(os.environ)} may have {limit} (ulimit -Hn).",
            "raise the limit before sbatch, which hands it on (ulimit -n), or in the service of slurmd (LimitNOFILE)",
        )


def _names_in_time(lookup: ReverseLookup, patience_s: float) -> contextlib.AbstractContextManager[None]:
    """If look-ups are slow, avoid name servers: for its log, a TCPStore looks up every peer that it connects."""
    return contextlib.nullcontext() if lookup.ends_within(patience_s) else without_name_servers()


def _tcp_store(address: str, port: int, timeout_s: float, *, listener: socket.socket | None = None) -> dist.TCPStore:
    """A client of the store at an address; with a listener, also its server, which then owns the listener."""
    descriptor = None if listener is None else listener.detach()
    return dist.TCPStore(
        address,
        port,
        is_master=descriptor is not None,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=descriptor,
    )


def _verdict(topology: Topology, store: dist.Store, deadline: float) -> str:
    """Wait for all ranks; then say that they may proceed, or which are missing or have other devices."""
    everyone = [arrived_ranks.arrival(rank) for rank in range(topology.world_size)]
    absent: set[str] = set()
    try:
        for batch in arrived_ranks.batches(everyone):
            store.wait(list(batch), timedelta(seconds=max(0.01, deadline - time.monotonic())))
    except dist.DistError:
        absent = set(arrived_ranks.unset(store, everyone))  # none, if the last one arrived just now
    present = [rank for rank, key in enumerate(everyone) if key not in absent]
    arrived = arrived_ranks.arrivals(store, present)
    if absent:
        hosts = {rank: host for rank, (host, _) in zip(present, arrived)}
        names = ", ".join(arrived_ranks.missing_by_node(topology, hosts))
        return f"{len(arrived)} of {topology.world_size} ranks arrived; missing: rank {names}."
    odd = arrived_ranks.odd_devices(arrived)
    return _PROCEED if odd is None else f"{_ODD_DEVICES}{odd}"
