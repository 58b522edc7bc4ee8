"""The thread that samples a node, and writes a line every ten seconds: usage-<node>.jsonl in the run directory.

It costs no step: the training's thread is not involved, and the device is not synchronised.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster_ddp.errors import RunDirError
from cluster_ddp.run.names import File
from cluster_ddp.runtime.profiling.cpu_and_memory import JobProcesses, StepCgroup
from cluster_ddp.runtime.profiling.nvml import Gpus
from cluster_ddp.runtime.run_dir.fenced_writes import append
from cluster_ddp.slurm.topology import Topology
from cluster_ddp.slurm.variables import node_name

log = logging.getLogger("cluster_ddp")

SAMPLE_S, WRITE_S = 1.0, 10.0
# How long a training's end waits for the last record: its file system may hang.
PATIENCE_S = 1.0


_running: list[Sampler] = []


def start(run_dir: Path, topology: Topology, env: Mapping[str, str]) -> None:
    """Sample this node from now on, for one run directory: the sampler of an earlier one in this process ends.

    Local rank 0 of the node calls it.
    """
    stop()
    _running.append(Sampler(run_dir, topology, env))


def stop() -> None:
    """End the sampling in this process, if there is any."""
    while _running:
        _running.pop().stop()


class Sampler:
    """Samples this node in the background until `stop`; `start` makes it. If it can't write, it warns and ends."""

    def __init__(self, run_dir: Path, topology: Topology, env: Mapping[str, str]) -> None:
        self._path = run_dir / File.USAGE.format(topology.node_rank or 0)
        self._node = node_name(env)
        self._cpus = _cpus(env)
        self._start = {"restart": topology.restart_count, "job": topology.job_label, "start_id": topology.start_id}
        self._env = env
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="usage", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Write what was sampled since the last line, and end."""
        self._end.set()
        self._thread.join(timeout=PATIENCE_S)

    def _run(self) -> None:
        self._source, self._gpus = _source(self._env), _gpus(self._env)  # NVML may take a second to begin
        try:
            self._write_next()
            while not self._end.is_set():
                self._write_next()
        except FileNotFoundError:  # this node does not share the run directory
            return
        except RunDirError as error:
            log.error("%s", error)
        except OSError as error:
            words = "Writing to %s failed: %s. How this node is used is no longer recorded."
            log.warning(words, self._path, error.strerror)

    def _write_next(self) -> None:
        try:
            append(self._path, json.dumps(self._collected()).encode() + b"\n")
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self._end.wait(SAMPLE_S)  # no descriptor is free now: this record is left out

    def _collected(self) -> dict[str, Any]:
        """Sample for `WRITE_S` seconds. Returns the record."""
        cpu_s, network, start_s = self._source.cpu_s(), _network_bytes(), time.monotonic()
        of_gpus: list[list[dict[str, float]]] = []
        memory: list[int] = []  # none in a record of less than a second: it may take 10 ms a process
        while time.monotonic() - start_s < WRITE_S and not self._end.wait(SAMPLE_S):
            of_gpus.append(self._gpus.sample() if self._gpus else [])
            memory.append(self._source.memory_bytes())
        used_s = max(0.0, self._source.cpu_s() - cpu_s)
        seconds = max(time.monotonic() - start_s, 1e-3)
        shared = self._gpus.shared() if self._gpus else []
        received, sent = (max(0, now - before) / seconds for now, before in zip(_network_bytes(), network))
        return {
            "time": round(time.time(), 1),
            "seconds": round(seconds, 3),
            "node": self._node,
            **self._start,
            "cpus": self._cpus,
            "cpu": round(min(1.0, used_s / seconds / self._cpus), 4),
            **({"memory": max(memory)} if any(memory) else {}),
            "received_per_s": round(received),
            "sent_per_s": round(sent),
            "gpus": [one | ({"shared": 1.0} if is_shared else {}) for one, is_shared in zip(_means(of_gpus), shared)],
        }


def _means(samples: Sequence[Sequence[Mapping[str, float]]]) -> list[dict[str, float]]:
    """For each GPU the mean of each figure, of memory the most, of energy the sum, if each sample has it."""
    found = []
    for of_gpu in zip(*samples):
        names = dict.fromkeys(name for sample in of_gpu for name in sample)
        values = {name: [sample[name] for sample in of_gpu if name in sample] for name in names}
        most = {name: max(values[name]) for name in names if name == "memory"}
        energy_j = values.pop("energy_j", [])
        most |= {"energy_j": round(sum(energy_j), 3)} if len(energy_j) == len(of_gpu) else {}
        found.append({name: round(statistics.fmean(one), 4) for name, one in values.items()} | most)
    return found


def _source(env: Mapping[str, str]) -> StepCgroup | JobProcesses:
    with contextlib.suppress(OSError, ValueError, KeyError):
        return StepCgroup(Path("/proc/self/cgroup").read_text())
    return JobProcesses(env)


def _gpus(env: Mapping[str, str]) -> Gpus | None:
    with contextlib.suppress(Exception):  # no module, no driver, no GPU
        import pynvml  # type: ignore[import-untyped]

        return Gpus(env, pynvml)
    return None


def _cpus(env: Mapping[str, str]) -> int:
    """How many CPUs the job has on this node."""
    on_node = env.get("SLURM_CPUS_ON_NODE", "")
    return int(on_node) if on_node.isdigit() and int(on_node) else len(os.sched_getaffinity(0))


def _network_bytes() -> tuple[int, int]:
    """Bytes that the interfaces have received and sent, but for the loopback (proc(5), /proc/net/dev)."""
    received = sent = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
            name, _, counts = line.partition(":")
            if name.strip() != "lo":
                fields = counts.split()
                received, sent = received + int(fields[0]), sent + int(fields[8])
    return received, sent
