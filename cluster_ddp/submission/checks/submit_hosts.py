"""Whether nodes may submit jobs, as each job of a chain does: what the site's settings and the partitions say of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster_ddp.errors import HostlistError, SlurmError, SpecError
from cluster_ddp.slurm import hostlist
from cluster_ddp.slurm.partitions import access
from cluster_ddp.submission.spec import JobSpec

_ASKED = "A chain of jobs, each of which submits the next one:"
_HINT = "leave --chain out, and resume each job by hand: --resume"


def check_settings(spec: JobSpec, values: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    """Refuse a chain where the settings say nodes_submit = false."""
    if spec.chain and values.get("nodes_submit") is False:
        found = f"no node may submit a job here: nodes_submit = false in {origins['nodes_submit']}."
        raise SpecError(_ASKED, found, _HINT).about("chain")


def check(spec: JobSpec, partitions: Sequence[str], *, cluster: str | None) -> None:
    """Refuse a chain in a partition that takes no jobs from one of its nodes. A chain's jobs may begin on any."""
    for name in partitions if spec.chain else ():
        try:
            rule = access(name, cluster=cluster)
            hosts = {host.partition(".")[0] for host in hostlist.expand(rule.submit_hosts)} if rule.submit_hosts else ()
            others = [node for node in hostlist.expand(rule.nodes) if node not in hosts] if hosts else []
        except (SlurmError, HostlistError):
            continue
        if others:
            found = f"partition {name} takes jobs from {rule.submit_hosts} only (AllocNodes), not from {others[0]}."
            raise SpecError(_ASKED, found, f"{_HINT}; or choose another --partition").about("chain", "partition")
