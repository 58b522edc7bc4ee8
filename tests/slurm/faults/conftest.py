"""Where the trainings are submitted from, and one that nothing happens to."""

from __future__ import annotations

import fcntl
import json
import tempfile
from pathlib import Path

import pytest
from cluster import Cluster, Place
from paced_run import start


@pytest.fixture(scope="session")
def place(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(slurm, tmp_path_factory.mktemp("it's faulty"))


@pytest.fixture(scope="session")
def uninterrupted(place: Place) -> list[dict]:
    """Made once for all test processes and both Slurms, which change no bit of it."""
    with open(Path(tempfile.gettempdir()) / "uninterrupted.json", "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if not (text := file.read()):
            run = start(place, pace_s=0)
            run.completed(restarts=0)
            assert run.metrics()[-1]["kind"] == "done"
            file.write(text := json.dumps(run.metrics()))
    return json.loads(text)
