"""What `make chaos` concludes from a training's records."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NoReturn

import pytest
from chaos import goodput
from chaos.run import Run, ViolationError


@pytest.mark.parametrize(
    ("times", "has_trained"),
    [([], False), ([3, 9], False), ([3, 40], False), ([40], False), ([40, 54], False), ([9, 40, 44, 55], True)],
)
def test_a_slow_start_is_no_training(times: list[float], has_trained: bool) -> None:
    """On a busy machine the first record came 22 s after a warning, which then stopped the training."""
    run = SimpleNamespace(records=lambda: [{"time": time} for time in times])
    assert Run.has_trained_for(run, 15, since_s=20) == has_trained  # type: ignore[arg-type]


def test_a_restart_before_a_fault_is_not_of_that_fault() -> None:
    """A former start's srun had ended a step; what the next fault did came later, and seemed to have no reason."""
    begun: list[bool] = []
    run = SimpleNamespace(
        status=lambda: SimpleNamespace(restarts=1, ended=False),
        was_restarted=lambda status: True,
        begin_again=lambda should_requeue: begun.append(should_requeue),
        job_id=3,
        _restarts_of_job=1,
        _orphan_until_s=0.0,
    )
    assert not Run.ended(run) and begun == [False]  # type: ignore[arg-type]


def test_a_requeue_that_no_fault_explains_is_a_violation() -> None:
    run = Run.__new__(Run)
    run.job_id, run._restarts_of_job, run._orphan_until_s = 3, 0, 0.0
    run.status = lambda: SimpleNamespace(restarts=1, ended=False)  # type: ignore[method-assign,assignment,return-value]
    run.fail = _raise  # type: ignore[method-assign,assignment]
    run.begin_again = lambda should_requeue: None  # type: ignore[method-assign,misc]
    with pytest.raises(ViolationError, match="no fault had been made"):
        run.ended()
    run.note_orphan()
    assert not run.ended()


def _raise(what: str) -> NoReturn:
    raise ViolationError(what)


def test_goodput_is_the_share_of_kept_steps_in_the_time_with_nodes() -> None:
    """The time in the queue is apart, between a requeue and a new job also."""
    held = goodput.HeldTime()
    for now_s, state in enumerate(["PENDING", "RUNNING", "RUNNING", "COMPLETING", "PENDING", "RUNNING", "FAILED", "x"]):
        held.saw(state, 10.0 * now_s)
    assert held.seconds == 40
    trainings = [goodput.Training("restarts", 100, 4, 40), goodput.Training("requeued", 60, 0, 40)]
    assert goodput.summary(trainings) == {
        "all": {"goodput": 0.5, "s_between_faults": 40.0, "trainings": 2},
        "requeued": {"goodput": 0.667, "s_between_faults": None, "trainings": 1},
        "restarts": {"goodput": 0.4, "s_between_faults": 25.0, "trainings": 1},
    }
