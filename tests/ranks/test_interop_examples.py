"""The examples of other libraries stop after a step with status 75, and resume there as if they had not been stopped.

They are no dependencies: `make test-all` installs them (the extra `interop`); elsewhere one that is missing is skipped.
Seen with lightning 2.6.6, accelerate 1.15.0, hydra-core 1.3.8 and transformers 5.23.0.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from slowness import LIMIT_S, scaled

from cluster_ddp.run.names import EXIT_STOPPED, Env

ROOT = Path(__file__).parents[2]
INTEROP = ROOT / "examples" / "interop"
STOP_AFTER = ROOT / "tests" / "helpers" / "stop_after.py"
LIBRARIES = {
    "accelerate_loop.py": "accelerate",
    "fabric_loop.py": "lightning",
    "hf_trainer.py": "transformers",
    "hydra_app.py": "hydra",
    "lightning_trainer.py": "lightning",
}


def start(name: str, run_dir: Path, stop_at: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a script; it gets USR1 after so many steps."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "RANK", "WORLD_"))}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", Env.RUN_DIR: str(run_dir)}
    command = [sys.executable, str(STOP_AFTER), str(stop_at), str(INTEROP / name)]
    return subprocess.run(command, env=env, cwd=run_dir.parent, capture_output=True, text=True, timeout=scaled(LIMIT_S))


@pytest.mark.full
@pytest.mark.parametrize(("name", "library"), LIBRARIES.items())
def test_it_stops_in_time_and_ends_as_if_it_had_not(tmp_path: Path, name: str, library: str) -> None:
    if importlib.util.find_spec(library) is None:
        assert not os.environ.get("CI"), f"in CI no test may skip: {library} is not installed"
        pytest.skip(f"{library} is not installed")
    whole, begun = start(name, tmp_path / "whole"), start(name, tmp_path / "stopped", stop_at=13)
    assert (whole.returncode, begun.returncode) == (0, EXIT_STOPPED), whole.stderr + begun.stderr
    assert "Stopped after step 13" in begun.stdout
    ended = start(name, tmp_path / "stopped")
    assert ended.returncode == 0, ended.stderr
    results = [re.findall("^Done: .*", done.stdout, re.MULTILINE) for done in (ended, whole)]
    assert results[0] == results[1] != []
    assert [path.name for path in tmp_path.iterdir() if path.is_dir() and path.name not in ("whole", "stopped")] == []


def test_each_library_has_a_script_that_is_short_and_begins_with_its_command() -> None:
    assert {path.name for path in INTEROP.glob("*.py")} == {*LIBRARIES, "stop_flag.py"}
    for name in LIBRARIES:
        text = (INTEROP / name).read_text()
        assert len(text.splitlines()) <= 80
        assert f"-- python examples/interop/{name}" in (ast.get_docstring(ast.parse(text)) or "")


def test_the_status_is_the_one_at_which_jobs_are_requeued() -> None:
    assert f"REQUEUE = {EXIT_STOPPED} " in (INTEROP / "stop_flag.py").read_text()
