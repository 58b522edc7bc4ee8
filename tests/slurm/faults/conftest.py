"""Where the trainings are submitted from, and one that nothing happens to."""

from __future__ import annotations

import pytest
from cluster import Cluster, Place
from paced_run import start


@pytest.fixture(scope="session")
def place(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(slurm, tmp_path_factory.mktemp("it's faulty"))


@pytest.fixture(scope="session")
def uninterrupted(place: Place) -> list[dict]:
    run = start(place, pace_s=0)
    run.completed(restarts=0)
    assert run.metrics()[-1]["kind"] == "done"
    return run.metrics()
