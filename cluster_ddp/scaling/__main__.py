"""`cluster-ddp scaling`: measure a training on several numbers of GPUs, and say which to ask for.

--gpus 1,2,4,8 -- python my_train.py --batch 64                  a batch of its own for each GPU: weak scaling
--gpus 1,2,4,8 --global-batch 256 -- python t.py --batch {batch} {batch} is 256 divided by the number of GPUs: strong
--gpus 1,2,4 --epochs 1                                          no command: the MNIST training and its options
--gpus 1,2,4 --metric 'images/s: ([0-9.]+)' -- python t.py       the throughput is what rank 0 prints

All other options are those of `cluster-ddp submit`. Each run is a job of its own, which holds no GPUs that it does not
use. Stopped, and called again with the same options, it measures what is missing. In the command, {gpus}, {nodes} and
{batch} are replaced.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from cluster_ddp.agent.array_values import fill_in
from cluster_ddp.argument_parser import Parser
from cluster_ddp.cli.submit import check_training
from cluster_ddp.errors import SpecError, exit_on_error
from cluster_ddp.jobs.report import training_stats
from cluster_ddp.scaling import speedups
from cluster_ddp.scaling.output import Results
from cluster_ddp.scaling.points import Point, parse_counts, points
from cluster_ddp.scaling.study import Study
from cluster_ddp.slurm import partitions
from cluster_ddp.submission import submit_plan
from cluster_ddp.submission.backends.slurm import Slurm
from cluster_ddp.submission.checks import feasibility
from cluster_ddp.submission.cli import submit_command
from cluster_ddp.submission.planning import Plan

PROGRAM = "cluster-ddp scaling"
# What the study chooses for each of its jobs, and what plans none.
_CHOSEN = (
    *("--nodes", "--spare-nodes", "--name", "--runs-dir", "--run-dir", "--resume", "--array", "--watch", "--on"),
    *("--test-only", "--show-config", "--show-template"),
)


def parser() -> Parser:
    """The command line, without submit's options."""
    top = Parser(PROGRAM, description=__doc__)
    top.add_argument("--gpus", required=True, metavar="N,N…", help="numbers of GPUs to measure, such as 1,2,4,8")
    per_node = "GPUs of a node, which is filled before the next one is used (default: what the partition's nodes have)"
    top.add_argument("--gpus-per-node", type=int, metavar="N", help=per_node)
    top.add_argument("--repeats", type=int, default=1, metavar="N", help="runs of each number (default: %(default)s)")
    top.add_argument("--global-batch", type=int, metavar="N", help="strong scaling: {batch} is N divided by the GPUs")
    regex = "regular expression whose first group is the samples per second in rank 0's output (default: metrics.jsonl)"
    top.add_argument("--metric", metavar="REGEX", help=regex)
    weak = "if only times are known: more GPUs do more work, so equal times are ideal"
    top.add_argument("--weak", action="store_true", help=weak)
    least = "recommend the largest number with this efficiency (default: %(default)s)"
    top.add_argument("--min-efficiency", type=float, default=0.8, metavar="E", help=least)
    one = "start a job only when the one before has ended: for jobs that would share nodes or a network"
    top.add_argument("--one-at-a-time", action="store_true", help=one)
    top.add_argument("--folder", type=Path, default=Path("scaling"), metavar="PATH", help="(default: %(default)s)")
    form = top.add_mutually_exclusive_group()
    form.add_argument("--dry-run", action="store_true", help="show the runs and a job's script, and submit nothing")
    form.add_argument("--json", action="store_true", help="print the results as one line of JSON, all else to stderr")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the options, measure what is missing, print and write the results. Returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--") if "--" in words else len(words)
    with exit_on_error(PROGRAM):
        arguments, rest = parser().parse_known_args(words[:at])
        scaling = _Scaling(arguments, rest, words[at:])
        if arguments.dry_run:
            return scaling.show()
        return scaling.run()


class _Scaling:
    """A study as the command line asks for it."""

    def __init__(self, arguments: argparse.Namespace, rest: list[str], command: list[str]) -> None:
        self.arguments, self.rest, self.command = arguments, rest, command
        self.counts = parse_counts(arguments.gpus)
        self.options = parser().option_names()
        self._said: set[str] = set()
        self._say = partial(print, file=sys.stderr if arguments.json else sys.stdout, flush=True)
        self._check()
        plan = self._planned(Point(gpus=self.counts[0], nodes=1, repeat=1), "--no-check")  # only to see where it goes
        self.on_slurm = isinstance(plan.scheduler, Slurm)
        self.per_node = arguments.gpus_per_node or (_gpus_of_a_node(plan) if self.on_slurm else max(self.counts))
        self.study = Study(
            folder=arguments.folder,
            points=points(self.counts, per_node=self.per_node, repeats=arguments.repeats),
            metric=training_stats.compiled(arguments.metric) if arguments.metric is not None else None,
            say=self._say,
        )
        for point in self.study.points[: len(self.counts)]:  # nothing is submitted if one of them can't run
            self._planned(point)

    def show(self) -> int:
        """Print the runs, and the script of the largest."""
        for point in self.study.points:
            print(f"{point.name}: {point.nodes} x {point.gpus_per_node} GPUs")
        print()
        print(self._planned(self.study.points[len(self.counts) - 1]), end="")
        return 0

    def run(self) -> int:
        """Measure what is missing. Prints and writes the results."""
        what = {"words": [*self.rest, *self.command], "global_batch": self.arguments.global_batch}
        self.study.open({**what, "gpus_per_node": self.per_node, "metric": self.arguments.metric})
        try:
            self.study.run(
                lambda point: submit_plan.submit(self._planned(point))[0],
                one_at_a_time=self.arguments.one_at_a_time or not self.on_slurm,
            )
        except KeyboardInterrupt:
            print("\nNo longer following; the jobs continue. To continue the study: the same command.", file=sys.stderr)
            return 130
        self._report()
        return 1 if self.study.failures else 0

    def _check(self) -> None:
        arguments, words = self.arguments, [word.partition("=")[0] for word in self.rest]
        for option in _CHOSEN:
            if option in words:
                found = "the study chooses it for each of its jobs."
                raise SpecError(f"A scaling study with {option}:", found, "--gpus chooses nodes; --folder has the runs")
        if arguments.repeats < 1 or not 0 < arguments.min_efficiency <= 1:
            asked = f"A scaling study with --repeats {arguments.repeats} --min-efficiency {arguments.min_efficiency}:"
            raise SpecError(asked, "repeats are 1 or more; an efficiency is above 0, at most 1.", "--repeats 3")
        if arguments.global_batch is None and any("{batch}" in word for word in self.command):
            found = "only --global-batch gives it a value: the samples of a step on all GPUs."
            raise SpecError("A command with {batch}:", found, "--global-batch 256")
        if batch := arguments.global_batch:
            for count in self.counts:
                if batch % count:
                    asked = f"A global batch of {batch} on {count} GPUs:"
                    raise SpecError(asked, "it can't be divided equally.", "--global-batch: a multiple of all --gpus")
            if self.command and not any("{batch}" in word for word in self.command):
                hint = "put {batch} into the command: -- python t.py --batch {batch}"
                raise SpecError(f"A global batch of {batch}:", "the command does not use it.", hint)

    def _planned(self, point: Point, *options: str) -> Plan:
        """Plan and check the job of a run as `cluster-ddp submit` does. Warnings are shown once for all jobs."""
        size = ("--nodes", str(point.nodes), "--gpus-per-node", str(point.gpus_per_node), "--spare-nodes", "0")
        where = ("--name", point.name, "--runs-dir", str(self.arguments.folder / "runs"))
        command = (self._filled(word, point) for word in self.command)
        plans: list[Plan] = []

        def keep(plan: Plan, watch: bool) -> int:
            plans.append(plan)
            return 0

        with contextlib.redirect_stderr(io.StringIO()) as said:
            submit_command.run(
                [*size, *where, *options, *self.rest, *self._training_options(), *command],
                program=PROGRAM,
                description=str(__doc__),
                check_training=partial(check_training, others=self.options),
                submit=keep,
                others=self.options,
            )
        for line in said.getvalue().splitlines():
            if line not in self._said:
                print(line, file=sys.stderr)
                self._said.add(line)
        return plans[0]

    def _training_options(self) -> list[str]:
        batch = self.arguments.global_batch
        return ["--global-batch-size", str(batch)] if batch and not self.command else []

    def _filled(self, word: str, point: Point) -> str:
        values = {"gpus": str(point.gpus), "nodes": str(point.nodes)}
        if self.arguments.global_batch:
            values["batch"] = str(self.arguments.global_batch // point.gpus)
        return fill_in(word, values)

    def _report(self) -> None:
        """Print and write what was found."""
        arguments, study = self.arguments, self.study
        rows = speedups.rows(study.measured(), study.points, weak=arguments.weak)
        results = Results(
            rows=rows,
            weak=arguments.weak,
            recommendation=speedups.recommended(rows, min_efficiency=arguments.min_efficiency),
        )
        self._say(f"\n{results.as_text()}")
        for point, words in study.failures.items():
            self._say(f"Not measured: {point.gpus} GPUs, run {point.repeat}: {words}")
        failures = {point.name: words for point, words in study.failures.items()}
        command = shlex.join([*self.rest, *self.command])
        written = results.write(arguments.folder / "results", command=command, failures=failures, say=self._say)
        self._say(f"Written: {', '.join(map(str, written))}")
        if arguments.json:
            print(json.dumps(json.loads((arguments.folder / "results.json").read_text())))


def _gpus_of_a_node(plan: Plan) -> int:
    """How many GPUs the nodes of the job's partition have."""
    asked = feasibility.asked_partitions(plan.spec, partitions.read())
    counts = [group.gpus_of(plan.spec.gpu_type) for groups in asked.values() for group in groups if group.usable]
    if not any(counts):
        raise SpecError("A scaling study:", "sinfo does not show how many GPUs a node has.", "--gpus-per-node 4")
    return max(counts)


if __name__ == "__main__":
    sys.exit(main())
