"""The checks, group by group. The first one that finds something names the cause: causes come before effects."""

from __future__ import annotations

from collections.abc import Callable

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
    interfaces.no_network,
    interfaces.gloo_interface,
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


def run(site: Site, *, for_node: bool, limit_s: float) -> list[Finding]:
    """Run the checks of a rank, group by group at the same time.

    Args:
        site: where this rank is.
        for_node: whether this rank checks its node, too.
        limit_s: seconds that a group of checks may take.

    Returns:
        The findings, in the order of `ALL`. A group that did not come back is a finding itself.
    """
    wanted = [one for one in ALL if for_node or one.on == "rank"]
    groups: dict[str, list[Check]] = {}
    for one in wanted:
        groups.setdefault(one.group, []).append(one)

    def run_group(checks: list[Check]) -> Callable[[], isolated.Answer]:
        return lambda: [found.to_json() for one in checks if one.function is not None for found in one.function(site)]

    answers = isolated.run({name: run_group(checks) for name, checks in groups.items()}, limit_s)
    found: list[Finding] = []
    for name, answer in answers.items():
        if answer is None:
            found.append(_did_not_return(name, site, limit_s))
        elif isinstance(answer, isolated.BrokenError):
            found.append(broken(name, answer))
        else:
            found += [Finding.from_json(value) for value in answer]
    order = [one.name for one in ALL]
    return sorted(found, key=lambda one: order.index(one.check) if one.check in order else -1)


def broken(group: str, error: isolated.BrokenError) -> Finding:
    """Return the finding of a check that failed itself."""
    hint = "please report it, with this line; the other checks are not affected"
    return Finding(
        check="broken_check",
        what=f"The checks of {group.replace('_', ' ')} failed themselves.",
        evidence=str(error),
        hint=hint,
        is_warning=True,
    )


def _did_not_return(group: str, site: Site, limit_s: float) -> Finding:
    return Finding(
        check="did_not_return",
        what=f"The checks of {group.replace('_', ' ')} did not come back.",
        evidence=f"no answer within {limit_s:g} s",
        hint=f"try what hangs there: ls of your folders, getent hosts; leave the node out: --exclude={site.host}",
        sick_nodes=(site.host,),
    )
