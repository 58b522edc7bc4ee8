"""The checks, group by group. The first one that finds something names the cause: causes come before effects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from cluster_ddp.doctor.checks import Check, Site, folders, network_setup, resource_limits, task_environment
from cluster_ddp.doctor.checks.gpu_health import gpu_health
from cluster_ddp.doctor.findings import Finding
from cluster_ddp.doctor.killable_checks import Result, Task

GROUPS: dict[str, tuple[Check, ...]] = {
    "launch": (task_environment.hidden_gpus, task_environment.gpu_listed_twice, task_environment.one_task_step),
    "files": (folders.submit_folder, folders.run_folder, folders.data_folder),
    "python env": (task_environment.torch_build, task_environment.other_environment),
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
    "cpus": (task_environment.fewer_cpus, task_environment.too_many_threads),
}
"""Name of a group, which runs in a process of its own -> its checks."""
ALL = tuple(check for checks in GROUPS.values() for check in checks)


def tasks(site: Site, *, for_node: bool) -> dict[str, Task]:
    """Return the checks of a rank as tasks, one for each group; under too low a limit of files, the check that says so.

    If it is `for_node`, this rank checks its node, too.
    """
    if resource_limits.are_too_low_for_checks():
        return {"limits": partial(_run, site, [resource_limits.open_files])}
    groups = {name: [one for one in checks if for_node or one.on == "rank"] for name, checks in GROUPS.items()}
    return {name: partial(_run, site, checks) for name, checks in groups.items() if checks}


def _run(site: Site, checks: Sequence[Check]) -> Iterator[str | dict[str, Any]]:
    for one in checks:
        yield one.name
        yield from map(asdict, one.run(site))


def findings(results: Mapping[str, Result], host: str, limit_s: float) -> list[Finding]:
    """Return the findings of tasks, in the order of `ALL`. A check that did not come back is a finding itself."""
    found = [Finding.from_json(value) for result in results.values() for value in result.items]
    for group, result in results.items():
        found += broken_off(group, result, host, limit_s)
    order = [one.name for one in ALL]
    return sorted(found, key=lambda one: order.index(one.check) if one.check in order else -1)


def broken_off(group: str, result: Result, host: str, limit_s: float) -> Iterator[Finding]:
    """Yield the finding of a check that did not come back, or that failed itself."""
    name = f"{result.doing} ({group})" if result.doing else group
    if result.is_late:
        yield Finding(
            check="did_not_return",
            what=f"The check {name} did not come back.",
            evidence=f"no answer within {limit_s:g} s",
            hint=f"try what hangs there: ls of your folders, getent hosts; leave the node out: --exclude={host}",
            sick_nodes=(host,),
        )
    elif result.failure is not None:
        yield Finding(
            check="broken_check",
            what=f"The check {name} failed itself.",
            evidence=result.failure,
            hint="please report it, with this line; the other checks are not affected",
            is_warning=True,
        )
