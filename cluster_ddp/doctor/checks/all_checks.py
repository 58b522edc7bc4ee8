"""The checks, group by group. The first one that finds something names the cause: causes come before effects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from cluster_ddp.doctor import isolated
from cluster_ddp.doctor.checks import (
    Check,
    Site,
    cpus,
    files,
    gpus,
    interfaces,
    launch,
    limits,
    memory,
    names,
    python_env,
)
from cluster_ddp.doctor.finding import Finding

ALL: tuple[Check, ...] = (
    launch.hidden_gpus,
    launch.gpu_listed_twice,
    launch.one_task_step,
    files.submit_folder,
    files.run_folder,
    files.data_folder,
    python_env.torch_build,
    python_env.other_environment,
    limits.open_files,
    limits.address_space,
    limits.locked_memory,
    limits.free_ports,
    interfaces.no_network,  # a network namespace of its own: its loopback interface is down, too
    interfaces.loopback,
    interfaces.gloo_interface,
    interfaces.gloo_transport,
    interfaces.nccl_interface,
    names.master_address,
    names.own_name,
    gpus.gpu_health,
    memory.shared_memory,
    memory.memory_limit,
    memory.out_of_memory,
    cpus.fewer_cpus,
    cpus.too_many_threads,
)


def tasks(site: Site, *, for_node: bool) -> dict[str, isolated.Task]:
    """Return the checks of a rank as tasks, one for each group; under too low a limit of files, the check that says so.

    Args:
        site: where this rank is.
        for_node: whether this rank checks its node, too.
    """
    if limits.are_too_low_for_checks():
        return {limits.open_files.group: partial(_run, site, [limits.open_files])}
    groups: dict[str, list[Check]] = {}
    for one in ALL:
        if for_node or one.on == "rank":
            groups.setdefault(one.group, []).append(one)
    return {name: partial(_run, site, checks) for name, checks in groups.items()}


def _run(site: Site, checks: Sequence[Check]) -> Iterator[str | dict[str, Any]]:
    for one in checks:
        if one.function is not None:
            yield one.name
            yield from (found.to_json() for found in one.function(site))


def findings(answers: Mapping[str, isolated.Answer], host: str, limit_s: float) -> list[Finding]:
    """Return the findings of tasks, in the order of `ALL`. A check that did not come back is a finding itself.

    Args:
        answers: of the tasks, by group.
        host: name of this node.
        limit_s: seconds that each group had.
    """
    found = [Finding.from_json(value) for answer in answers.values() for value in answer.items]
    for group, answer in answers.items():
        found += broken_off(group, answer, host, limit_s)
    order = [one.name for one in ALL]
    return sorted(found, key=lambda one: order.index(one.check) if one.check in order else -1)


def broken_off(group: str, answer: isolated.Answer, host: str, limit_s: float) -> list[Finding]:
    """Return the finding of a check that did not come back, or that failed itself."""
    name = f"{answer.doing} ({group.replace('_', ' ')})" if answer.doing else group
    if answer.is_late:
        return [
            Finding(
                check="did_not_return",
                what=f"The check {name} did not come back.",
                evidence=f"no answer within {limit_s:g} s",
                hint=f"try what hangs there: ls of your folders, getent hosts; leave the node out: --exclude={host}",
                sick_nodes=(host,),
            )
        ]
    if answer.failure is None:
        return []
    return [
        Finding(
            check="broken_check",
            what=f"The check {name} failed itself.",
            evidence=answer.failure,
            hint="please report it, with this line; the other checks are not affected",
            is_warning=True,
        )
    ]
