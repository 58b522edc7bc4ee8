"""A rendezvous port for every job step: a pure function of job id and step id.

    port = 10000 + (job_id + 8377 * step_id) mod 22751

All ports lie in 10000–32750: above the well-known ports and below Linux's ephemeral range (32768 and up), from which
any outgoing connection may take a port. 22751 is prime. So for one step id, any 22,751 consecutive job ids give
distinct ports. The running tasks of an array do not collide, since each has its own SLURM_JOB_ID. For one job, any
22,751 consecutive steps also give distinct ports.

Another program may still hold a port. Then rank 0 tries the others of `candidates`.
"""

from __future__ import annotations

FIRST_PORT = 10000
PORT_COUNT = 22751
STEP_STRIDE = 8377
CANDIDATE_STRIDE = 3571
CANDIDATE_COUNT = 8


def master_port(job_id: int, step_id: int = 0) -> int:
    """Return the first port to try for a job step, in 10000–32750. Each array task has a job id of its own.

    Raises:
        ValueError: an id is below 0.
    """
    if job_id < 0 or step_id < 0:
        raise ValueError(f"job_id and step_id must be 0 or more, got {job_id} and {step_id}")
    return FIRST_PORT + (job_id + STEP_STRIDE * step_id) % PORT_COUNT


def candidates(job_id: int, step_id: int = 0) -> tuple[int, ...]:
    """Return `master_port` and the seven ports to try after it, in order and all distinct.

    They lie far apart, so that the second port of one job is not the first port of the next job. Arguments and errors
    are those of `master_port`.
    """
    first = master_port(job_id, step_id) - FIRST_PORT
    return tuple(FIRST_PORT + (first + CANDIDATE_STRIDE * i) % PORT_COUNT for i in range(CANDIDATE_COUNT))
