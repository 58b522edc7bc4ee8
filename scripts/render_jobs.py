"""Render jobs/*.sbatch from the templates: `make jobs`.

python scripts/render_jobs.py            write them
python scripts/render_jobs.py --check    name those that differ from the templates; exit 1 if any does
"""

from __future__ import annotations

import sys
from pathlib import Path

import generated_file

from cluster_ddp.submission.grids import ARRAY_TASK_PLACEHOLDER
from cluster_ddp.submission.render import agent_options, render
from cluster_ddp.submission.spec import JobSpec

ROOT = Path(__file__).resolve().parents[1]
JOBS_FOLDER = ROOT / "jobs"
SETUP = (
    "# The checkout's own environment where `make` has built one.",
    "if [[ -f .venv/bin/activate ]]; then source .venv/bin/activate; fi",
    "command -v cluster-ddp >/dev/null || {",
    '  echo "error: cluster_ddp is not installed here. Submit from the checkout, after: make venv" >&2',
    "  exit 1",
    "}",
)
TRAIN = ("python", "-m", "cluster_ddp.train")


def mnist(name: str, description: str, *options: str, **settings: object) -> JobSpec:
    """A training job of the reference workload."""
    return JobSpec(
        name=name,
        description=description,
        command=(*TRAIN, *options),
        cpus_per_task=2,
        time="30",
        signal="USR1@120",
        requeue=True,
        setup=SETUP,
        **settings,  # type: ignore[arg-type]
    )


JOBS = (
    JobSpec(
        name="hello_ddp",
        description="who is where, and one all-reduce.",
        command=("python", "examples/hello_ddp.py"),
        nodes=2,
        gpus_per_node=2,
        time="5",
        setup=SETUP,
    ),
    mnist("mnist_1gpu", "the MNIST CNN on one GPU."),
    mnist("mnist_1node", "the MNIST CNN on two GPUs of one node.", gpus_per_node=2),
    mnist("mnist_2node", "the MNIST CNN on two nodes.", nodes=2, gpus_per_node=2),
    mnist(
        "mnist_array",
        "the MNIST CNN with four seeds, two GPUs each.",
        "--seed",
        ARRAY_TASK_PLACEHOLDER,
        gpus_per_node=2,
        array="0-3",
    ),
)


def main() -> int:
    """Write or compare. Returns the exit status."""
    check = generated_file.only_compares(__doc__)
    stale = []
    for spec in JOBS:
        path = JOBS_FOLDER / f"{spec.name}.sbatch"
        options = "options for the command, such as --epochs 2"
        if spec.name == "hello_ddp":
            options = "options for the command"
        text = render(
            spec,
            agent_options(spec),
            source="Rendered from templates/ by scripts/render_jobs.py: change those, then run `make jobs`.\n"
            f"Submit from the checkout:  sbatch jobs/{path.name} [{options}]",
        )
        if not generated_file.was_fresh(path, text, check=check):
            stale.append(path.name)
    if check and stale:
        print(f"These jobs differ from the templates: {', '.join(stale)}. Hint: make jobs")
        return 1
    print(f"{len(JOBS)} jobs, {len(stale)} {'stale' if check else 'rendered again'}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
