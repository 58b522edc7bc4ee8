"""Why a job waits or has ended, in words: by squeue(1), JOB REASON CODES, and slurm's job_state_reason_string()."""

from __future__ import annotations

import re

_WORDS = {
    "Resources": "it is next, and waits for nodes or GPUs that are in use",
    "Priority": "jobs with a higher priority are before it",
    "Dependency": "it waits for another job (--after)",
    "DependencyNeverSatisfied": "the job that it waits for has failed. To end it: scancel",
    "BeginTime": "it waits for its earliest start time, as after a requeue",
    "JobHeldUser": "it is held. To release it: scontrol release",
    "JobHeldAdmin": "an administrator holds it; ask the support",
    "JobArrayTaskLimit": "as many tasks of its array run as it allows (%)",
    "ReqNodeNotAvail": "a node that it needs is down, drained or reserved",
    "UnavailableNodes": "a node that it needs is down, drained or reserved",
    "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_partitions": (
        "nodes that it needs are down, drained or reserved for other partitions"
    ),
    "PartitionDown": "its partition takes no jobs now",
    "PartitionInactive": "its partition starts no jobs now",
    "PartitionNodeLimit": "it asks for more nodes than its partition allows",
    "PartitionTimeLimit": "its time limit is longer than its partition allows. Resubmit with a shorter --time",
    "PartitionConfig": "it asks for more than its partition has",
    "BadConstraints": "no node can ever run it. Resubmit with less, or with another --constraint",
    "Reservation": "it waits for its reservation",
    "ReservationDeleted": "its reservation was removed",
    "Licenses": "it waits for a licence",
    "InvalidAccount": "its account may not be used here. Resubmit with another --account",
    "InvalidQOS": "its QOS may not be used here. Resubmit with another --qos",
    "AccountNotAllowed": "its account may not use this partition",
    "QOSNotAllowed": "its QOS may not be used in this partition",
    "NodeDown": "a node that it needs is down",
    "Prolog": "its nodes are being prepared",
    "Cleaning": "it was requeued, and its last start is being cleaned up",
    "launch_failed_requeued_held": "its last start failed. To release it: scontrol release",
    "job_requeued_in_held_state": "it was requeued and is held. To release it: scontrol release",
}
# A job that is cancelled while it waits keeps such a reason, which says nothing of its end.
_OF_WAITING = ("Resources", "Priority", "Dependency", "BeginTime", "JobArrayTaskLimit")
# By signal, reason or state. Signal 53 (0:53) is no signal of the system's: seen with 22.05.
_ENDS = {
    "signal 53": (
        "its node could not open its output file, or its folder, so its script never ran. "
        "Submit from a folder that all nodes share and can write, or name one: --runs-dir PATH (sbatch: --output)"
    ),
    "JobLaunchFailure": (
        "Slurm could not start it on its nodes. Submit it again; if it repeats, tell the support its id and nodes"
    ),
    "SystemFailure": "Slurm itself failed on one of its nodes. Submit it again; if it repeats, tell the support its id",
    "InactiveLimit": "Slurm heard nothing of its srun or salloc for longer than the site allows",
    "NODE_FAIL": "a node of the job is lost (node failure)",
    "BOOT_FAIL": "a node did not start up. Submit it again, without that node: --exclude NODE",
    "DEADLINE": "it could not end before its --deadline",
    "OUT_OF_MEMORY": "the kernel has killed a process for memory",
}
# A sentence instead of a code: "Job's account not permitted to use this partition (main allows lab not guest)" (22.05).
_NOT_PERMITTED = re.compile(r"Job's (account|QOS) not permitted to use this partition", re.IGNORECASE)
# Limits that the accounting sets. Examples: AssocGrpGRES, QOSMaxCpuPerUserLimit.
_LIMIT = re.compile(
    r"(?P<whose>Assoc|QOS)(?P<scope>Grp|Max|Min)"
    r"(?P<what>CPU|Cpu|GRES|Mem|Node|Job|Submit|Wall|BB|Bill|Energy|Lic)(?P<rest>\w*)"
)
_WHAT = {
    "cpu": "CPUs",
    "gres": "GPUs",
    "mem": "memory",
    "node": "nodes",
    "job": "running jobs",
    "submit": "submitted jobs",
    "wall": "run time",
    "bill": "billing units",
}


def of_waiting(reason: str) -> str:
    """Return a reason as squeue shows it with its meaning: "Priority: jobs with …"; one that is not known as it is.

    Text in parentheses or behind a comma may follow the code.
    """
    if reason.startswith("Job's_"):  # scontrol writes a sentence so
        reason = reason.replace("_", " ")
    code = re.split(r"[,(\s]", reason, maxsplit=1)[0]
    if match := _NOT_PERMITTED.match(reason):
        detail = reason[match.end() :]
        return f"{match[0]}: it will not start. Resubmit with another --{match[1].lower()}{detail}"
    words = _WORDS.get(reason) or _WORDS.get(code) or _limit(code)
    return f"{reason}: {words}" if words else reason


def of_end(state: str, reason: str, signal: int) -> str:
    """Return what Slurm's words for the end of a job mean, and what helps; empty if they speak for themselves.

    State and reason are as squeue shows them. `signal` is the one that ended the batch script, by Slurm, else 0.
    """
    code = re.split(r"[:,(\s]", reason, maxsplit=1)[0]
    if signal:  # 22.05: also of a script that was killed, the reason is JobLaunchFailure
        return _ENDS.get(f"signal {signal}") or _ENDS.get(state, "")
    return _ENDS.get(code) or _ENDS.get(state) or ("" if code in _OF_WAITING else _WORDS.get(code, ""))


def _limit(code: str) -> str:
    match = _LIMIT.match(code)
    if match is None:
        return ""
    whose = "your account" if match["whose"] == "Assoc" else "the QOS"
    what = _WHAT.get(match["what"].lower(), match["what"])
    if match["scope"] == "Min":
        return f"it asks for fewer {what} than {whose} requires"
    if match["rest"].startswith("Minutes"):
        what += " x time"
    if match["scope"] == "Grp":
        return f"all jobs of {whose} together use as many {what} as they may"
    each = re.search(r"Per(User|Account|Job|Node)", match["rest"])
    per = {"User": " for each user", "Account": " for each account", "Job": " for each job", "Node": " on each node"}
    return f"{whose} allows no more {what}{per[each[1]] if each else ''}"
