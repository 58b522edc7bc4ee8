"""A training is worth more than its output: the real stdout and stderr of a process, broken in each way."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
from slowness import LIMIT_S, scaled

SCRIPT = """
    import os, sys
    from cluster_ddp.runtime.console import complain, say
    for number in range(3):
        say(f"line {number}")
    complain("complaint")
    os.write(3, b"trained to the end")
"""


def run(redirection: str, script: str = SCRIPT, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a script under a shell with what is redirected; what it writes to descriptor 3 is the stdout here."""
    command = f'exec "$PYTHON" -c "$SCRIPT" 3>&1 {redirection}'
    if redirection.startswith("|"):
        command = f'set -o pipefail; exec 3>&1; {{ sleep 0.3; "$PYTHON" -c "$SCRIPT"; }} {redirection}'
    env = {**os.environ, "PYTHON": sys.executable, "SCRIPT": textwrap.dedent(script), **env}
    return subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, timeout=scaled(LIMIT_S))


COMPLAINT = "stdout takes no more output"


@pytest.mark.parametrize(
    ("redirection", "complaints"),
    [
        (">/dev/full", 1),
        ("| true", 1),
        (">&-", 0),  # Python has no stdout then, and print() is silent
        (">/dev/null 2>/dev/full", 0),
        (">/dev/full 2>/dev/full", 0),
        (">/dev/null 2>&-", 0),
        (">/dev/full 2>&-", 0),
        (">&- 2>&-", 0),
    ],
)
def test_a_broken_stdout_or_stderr_ends_nothing(redirection: str, complaints: int) -> None:
    done = run(redirection)
    assert done.stdout == "trained to the end", done.stderr
    assert done.returncode == 0
    assert done.stderr.count(COMPLAINT) == complaints
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    if "2>" not in redirection:
        assert done.stderr.endswith("complaint\n")


def test_it_ends_well_with_the_whole_world_imported() -> None:
    """Whatever else flushes stdout in the end."""
    script = (
        SCRIPT
        + '    import logging\n    logging.getLogger("cluster_ddp").warning("x")\n    print("more", flush=False)\n'
    )
    done = run(">/dev/full", script)
    assert (done.returncode, done.stdout) == (0, "trained to the end")


def test_a_letter_that_the_encoding_has_not_is_no_full_disk() -> None:
    """Such as LC_ALL=en_US.ISO-8859-1 has no "…"; what else is said must still be seen."""
    script = """
        from cluster_ddp.runtime.console import say
        say("Zeit für …")
        say("line 2")
    """
    done = run("", script, PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert "line 2" in done.stdout
    assert COMPLAINT not in done.stderr


def test_a_stdout_closed_in_python_is_said_once() -> None:
    done = run(">/dev/null", "    import sys\n    sys.stdout.close()" + SCRIPT)
    assert (done.returncode, done.stdout) == (0, "trained to the end")
    assert done.stderr.count(COMPLAINT) == 1
