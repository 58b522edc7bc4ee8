"""Render docs/faults.md from the `fault` markers of the tests: `make jobs`.

python scripts/render_faults.py            write it
python scripts/render_faults.py --check    exit 1 if it differs from the markers
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import generated_file

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "faults.md"
HEAD = """\
# Faults, and what happens to a job

Each row is a fault, what it does to a job, how soon, and its test (`grep -rn NAME tests`). "Resumes" means that
training continues from the newest checkpoint in its run directory, and that metrics and final weights match an
undisturbed training bit for bit (CPU, gloo, same number of ranks; on GPUs: [limits](explanation/exact-resume.md)).
The work since that checkpoint is lost, or nothing if a signal warns the job in time.

Tests cause faults for real wherever they can: those in `tests/slurm` on the sandbox's Slurm (real slurmctld and
slurmd), those in `tests/ranks` and `tests/pure` with processes on one machine. `make test` runs all but those with
"(all)", which are in `make test-all`. `pytest tests/slurm/faults --launcher fork` runs these with forked ranks.
`make chaos` (as root; `FAULTS=200 SEED=1`) trains under seeded random faults, and compares weights, metrics, samples
and checkpoints with those of undisturbed trainings.

All tests ran on CPUs with gloo; some rows say what differs on GPUs, and [GPU paths](explanation/gpu-paths.md) what was
seen there. [Requeue and resume](how-to/requeue.md) says who requeues a job.
"""
GROUPS = {
    "Ranks, data, clocks and time limits": "slurm/faults/test_faults_in_the_job",
    "Warnings, preemption, cancellation, suspension": "slurm/faults/test_requeues slurm/faults/test_suspended "
    "ranks/agent/job/restart/test_whole_jobs ranks/agent/job/test_requeue ranks/runtime/test_stop_signals",
    "Nodes, slurmctld and the network": "slurm/faults/test_faults_around slurm/faults/test_bad_nodes slurm/test_jobs "
    "slurm/test_strangers ranks/runtime/failure/test_hang_verdict ranks/runtime/rendezvous pure/agent/test_channel",
    "Restarts in the allocation": "slurm/faults/test_restarts ranks/runtime/failure/test_hang_watch ranks/agent "
    "pure/agent/job/restart",
    "Chains, packs, ranges of nodes": "slurm/faults/test_chains slurm/faults/test_packs slurm/faults/test_ranges "
    "pure/submission/checks/test_feasibility",
    "Sharded models and streams": "slurm/faults/test_sharded ranks/runtime/checkpoint/test_sharded "
    "ranks/runtime/checkpoint/test_streams ranks/runtime/data/test_stream",
    "Checkpoints and the run directory": "ranks/runtime/checkpoint ranks/runtime/run_dir ranks/jobs/test_full_disk "
    "pure/runtime/run_dir",
    "Errors of ranks": "ranks/runtime",
    "Submission, start, commands, sandbox": "slurm ranks pure",
}
"""Headings, and how the paths of their tests begin; the first that fits counts."""


class Row(NamedTuple):
    """What a marker has."""

    fault: str
    happens: str
    bound: str = ""
    also: tuple[str, ...] = ()
    """Names of further tests, or paths of files of them."""


class Test(NamedTuple):
    """A test function."""

    name: str
    file: str
    is_full: bool
    """Only `make test-all` has it."""
    rows: tuple[Row, ...]


def tests_in(path: Path, folder: Path = ROOT) -> list[Test]:
    """Return the tests of a file, in their order. Raises ValueError at a marker that makes no row."""
    tree, file, tests = ast.parse(path.read_text()), str(path.relative_to(folder)), list[Test]()
    full = "pytest.mark.full"
    is_full = any(full in ast.unparse(node) for node in tree.body if ast.unparse(node).startswith("pytestmark = "))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            marks = [one for one in node.decorator_list if isinstance(one, ast.Call)]
            faults = [one for one in marks if ast.unparse(one.func) == "pytest.mark.fault"]
            rows = tuple(_row(one, f"{file}:{one.lineno}") for one in faults)
            tests.append(Test(node.name, file, is_full or full in map(ast.unparse, node.decorator_list), rows))
    return tests


def _row(mark: ast.Call, where: str) -> Row:
    texts = [ast.literal_eval(one) for one in mark.args]
    if len(texts) != 2 or not all(texts):
        raise ValueError(f"{where}: fault(…) needs two texts: the fault, and what happens")
    return Row(*texts, **{str(one.arg): ast.literal_eval(one.value) for one in mark.keywords})


def page(tests: Sequence[Test]) -> str:
    """Return the page as Markdown."""
    full, groups = dict[str, bool](), {heading: list[str]() for heading in GROUPS}
    for test in tests:
        for name in (test.name, test.file):  # of a file, or of tests with one name: all
            full[name] = full.get(name, True) and test.is_full
    for test in tests:
        path = test.file.removeprefix("tests/")
        heading = next(heading for heading, starts in GROUPS.items() if path.startswith(tuple(starts.split())))
        groups[heading] += [_line(row, test, full) for row in test.rows]
    head = "| fault | what happens | bound | test |\n| --- | --- | --- | --- |\n"
    return HEAD + "".join(f"\n## {heading}\n\n{head}{''.join(lines)}" for heading, lines in groups.items() if lines)


def _line(row: Row, test: Test, full: Mapping[str, bool]) -> str:
    are_full = {test.name: test.is_full, **{name: full[name] for name in row.also}}
    shown = ", ".join(f"`{name}`{' (all)' * is_full}" for name, is_full in are_full.items())
    cells = (row.fault, row.happens, row.bound, shown)
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |\n"


def main() -> int:
    """Write or compare. Returns the exit status."""
    check = generated_file.only_compares(__doc__)
    folders = [ROOT / "tests" / name for name in ("slurm", "ranks", "pure")]
    paths = [path for folder in folders for path in sorted(folder.rglob("test_*.py"))]
    text = page([test for path in paths for test in tests_in(path)])
    if generated_file.was_fresh(PAGE, text, check=check) or not check:
        return 0
    print(f"{PAGE.relative_to(ROOT)} differs from the tests' markers. Hint: make jobs")
    return 1


if __name__ == "__main__":
    sys.exit(main())
