"""All checks: group by group, each group in a forked process, which can be killed: a file system may hang.

The first check that finds something names the cause: causes come before effects.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cluster_ddp.doctor.checks import folders, network_setup, resource_limits, task_allocation
from cluster_ddp.doctor.checks.check_types import Check, Site
from cluster_ddp.doctor.checks.gpu_health import gpu_health
from cluster_ddp.doctor.findings import Finding

CheckTask = Callable[[], Iterable[Any]]
"""What is run: its items must fit JSON. A text says what it does from now on, such as the name of a check."""

GROUPS: dict[str, tuple[Check, ...]] = {
    "launch": (task_allocation.hidden_gpus, task_allocation.gpu_listed_twice, task_allocation.one_task_step),
    "files": (folders.submit_folder, folders.run_folder, folders.data_folder),
    "python env": (task_allocation.torch_build, task_allocation.other_environment),
    "limits": (
        resource_limits.open_files,
        resource_limits.address_space,
        resource_limits.locked_memory,
        resource_limits.free_ports,
    ),
    "interfaces": (
        network_setup.no_network,  # a network namespace of its own: its loopback interface is down, too
        network_setup.loopback,
        network_setup.gloo_interface,
        network_setup.gloo_transport,
        network_setup.nccl_interface,
    ),
    "names": (network_setup.master_address, network_setup.own_name),
    "gpus": (gpu_health,),
    "memory": (resource_limits.shared_memory, resource_limits.memory_limit, resource_limits.out_of_memory),
    "cpus": (task_allocation.fewer_cpus, task_allocation.too_many_threads),
}
"""Name of a group, which runs in a process of its own -> its checks."""
ALL = tuple(check for checks in GROUPS.values() for check in checks)
OF_RANK_0 = {
    "nodes": {
        "topology": "variables that contradict each other: no srun, RANK inherited from the batch shell, tasks that "
        "don't match GPUs, variables that a container lacks",
        "missing_ranks": "ranks that never start, or are stopped",
        "same_rank": "several tasks that have the same rank",
        "master_port": "a master port that is taken on rank 0's host",
        "way_to_rank_0": "ranks that can't connect to rank 0: refused, filtered, no route, no such host",
        "master_variables": "MASTER_ADDR or MASTER_PORT that is not the same in all tasks",
        "same_address": "an address that two nodes have",
        "other_master": "nodes on which the master's name leads to another machine",
        "not_shared": "a run directory that is not the same folder on all nodes",
        "did_not_return": "a check that does not come back within `--check-limit-s`, as where a file system hangs",
        "versions": "nodes with another Python, torch, NCCL or cluster_ddp, or another git commit of the working "
        "folder",
        "data": "nodes with other data: names, sizes, samples of the content",
        "variables": "nodes with other variables for NCCL, gloo or torch",
        "one_cpu": "ranks of a node that share fewer CPUs than there are ranks",
        "same_gpu": "two ranks with the same GPU",
        "clock": "a node whose clock is wrong",
    },
    "network": {
        "packet_loss": "a link that loses more than a tenth of the packets",
        "links": "nodes that refuse or drop each other's connections on ports of the system's choice, or have no route",
        "large_packets": "a link on which small messages pass and large ones hang (MTU)",
        "slow_link": "a link that is slower than half of gigabit Ethernet, or than a third of the others",
    },
    "training": {
        "torch_import": "torch that can't be imported, or takes more than a minute to import",
        "rendezvous": "ranks that don't meet, or whose process group can't be made",
        "all_reduce": "an all-reduce with a wrong result, or that fails",
        "gradients": "gradients that differ between ranks after a step of DDP",
        "straggler": "a rank that computes 1.5 times as long as the median",
    },
}
"""Tier -> name of a check that rank 0 does with the reports of all -> what it detects."""


def tasks(site: Site, *, for_node: bool, **others: CheckTask) -> dict[str, CheckTask]:
    """Return the checks of a rank as tasks, one for each group; under too low a limit of files, the check that says so.

    If it is `for_node`, this rank checks its node, too. `others` are further tasks.
    """
    if resource_limits.are_too_low_for_checks():
        return {"limits": partial(_run, site, [resource_limits.open_files])}
    groups = {name: [one for one in checks if for_node or one.on == "rank"] for name, checks in GROUPS.items()}
    return {**{name: partial(_run, site, checks) for name, checks in groups.items() if checks}, **others}


def _run(site: Site, checks: Sequence[Check]) -> Iterator[str | dict[str, Any]]:
    for one in checks:
        yield one.name
        ranks = (site.topology.rank,) if one.on == "rank" else ()
        yield from (asdict(found.seen_on(site.host, *ranks)) for found in one.run(site))


def in_order(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings in the order of `ALL`; first those of checks that did not come back."""
    order = [one.name for one in ALL]
    return sorted(findings, key=lambda one: order.index(one.check) if one.check in order else -1)


def broken_off(group: str, result: CheckResult, node: str | None, limit_s: float) -> Iterator[Finding]:
    """Yield the finding of a check that did not come back, or that failed itself; `node` is that of a job, if any."""
    name = f"{result.doing} ({group})" if result.doing else group
    if result.is_late:
        yield Finding(
            check="did_not_return",
            what=f"The check {name} did not come back.",
            evidence=f"no answer within {limit_s:g} s",
            hint="try what hangs there: ls of your folders, getent hosts, sinfo"
            + (f"; leave the node out: --exclude={node}" if node else ""),
            sick_nodes=(node,) if node else (),
        )
    elif result.failure is not None:
        yield Finding(
            check="broken_check",
            what=f"The check {name} failed itself.",
            evidence=result.failure,
            hint="please report it, with this line; the other checks are not affected",
            is_warning=True,
        )


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What a task has given until its end."""

    items: list[Any]
    """What it gave, without texts."""
    doing: str = ""
    """Its last text: what it did when it broke off."""
    failure: str | None = None
    """Why it broke off: what it raised, or which signal ended its process; None if it did not."""
    is_late: bool = False
    """Whether it did not come back in time."""


class Running:
    """Tasks, by name, that run at the same time, each in a process of its own."""

    def __init__(self, tasks: Mapping[str, CheckTask]) -> None:
        self._children = {name: _start(task) for name, task in tasks.items()}

    def results(self, limit_s: float) -> dict[str, CheckResult]:
        """Return what each task gives in this time, by name, then kill them."""
        deadline = time.monotonic() + limit_s
        return {name: _result(*child, deadline) for name, child in self._children.items()}


def _start(task: CheckTask) -> tuple[int, int]:
    """Return the process's id, and the descriptor that its items come from."""
    sys.stdout.flush()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(BaseException):
            _close_all_but(writing)
            with open(writing, "w", encoding="utf-8") as file:
                error = None
                try:
                    for item in task():
                        print(json.dumps({"item": item}), file=file, flush=True)
                except Exception as raised:
                    error = f"{type(raised).__name__}: {raised}"
                print(json.dumps({"error": error}), file=file, flush=True)
            status = 0
        os._exit(status)
    os.close(writing)
    return pid, reading


def _close_all_but(descriptor: int) -> None:
    """Close what was inherited: connections of this rank must end with it, also while this process hangs."""
    for path in list(Path("/proc/self/fd").iterdir()):
        if int(path.name) > 2 and int(path.name) != descriptor:
            with contextlib.suppress(OSError):  # that of the listing itself
                os.close(int(path.name))


def _result(pid: int, descriptor: int, deadline: float) -> CheckResult:
    text, is_late = b"", True
    with open(descriptor, "rb") as pipe, selectors.PollSelector() as selector:  # it needs no open file of its own
        selector.register(pipe, selectors.EVENT_READ)
        while is_late and selector.select(max(0.0, deadline - time.monotonic())):
            more = os.read(descriptor, 65536)
            text += more
            is_late = bool(more)
    ending = _wait(pid, kill=is_late)
    whole = text[: text.rfind(b"\n") + 1]  # killed in the middle of a line
    lines = [json.loads(line) for line in whole.splitlines()]
    items = [line["item"] for line in lines if "item" in line]
    failure = None
    if not is_late:
        failure = lines[-1]["error"] if lines and "error" in lines[-1] else f"its process ended: {ending}"
    doing = next((item for item in reversed(items) if isinstance(item, str)), "")
    return CheckResult([item for item in items if not isinstance(item, str)], doing, failure, is_late)


def _wait(pid: int, *, kill: bool) -> str:
    """Wait for a process's end. Returns it in words. A process that waits in the kernel is left alone."""
    if kill:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        for _ in range(10 if kill else 100):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                code = os.waitstatus_to_exitcode(status)
                return f"exit status {code}" if code >= 0 else signal.Signals(-code).name
            time.sleep(0.01)
    return "unknown"
