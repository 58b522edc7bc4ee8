import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_ddp.slurm.port import candidates, master_port

job_ids = st.integers(0, 2**32 - 1)
step_ids = st.integers(0, 2**31)


@given(job_ids, step_ids)
def test_ports_lie_below_the_ephemeral_range(job_id: int, step_id: int) -> None:
    assert all(10000 <= port <= 32767 for port in candidates(job_id, step_id))


@given(job_ids, step_ids)
def test_16000_consecutive_jobs_have_distinct_ports(first_job: int, step_id: int) -> None:
    ports = {master_port(job_id, step_id) for job_id in range(first_job, first_job + 16_000)}
    assert len(ports) == 16_000


@given(job_ids, step_ids)
def test_64_consecutive_steps_of_a_job_have_distinct_ports(job_id: int, first_step: int) -> None:
    ports = {master_port(job_id, step_id) for step_id in range(first_step, first_step + 64)}
    assert len(ports) == 64


@given(job_ids, step_ids)
def test_candidates_are_distinct_and_begin_with_the_port(job_id: int, step_id: int) -> None:
    ports = candidates(job_id, step_id)
    assert ports[0] == master_port(job_id, step_id)
    assert len(set(ports)) == len(ports) == 8
    # A job that walks on must not take the first choice of a job submitted soon after it.
    later = {master_port(job_id + i, step_id) for i in range(1, 100)}
    assert not later & set(ports)


@pytest.mark.parametrize("ids", [(-1, 0), (0, -1)])
def test_negative_ids_are_refused(ids: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="0 or more"):
        master_port(*ids)
