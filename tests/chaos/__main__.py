"""`make chaos`: train under random faults on a sandbox of its own, and compare with a training that had none.

Trainings (training.py) under DDP, FSDP and HSDP take turns under seeded faults, until so many were made. One of each
kind runs undisturbed first. What a fault may not cost: a single bit of the final weights and of the metrics, a sample,
a checkpoint. A job that a fault has ended is submitted again with the same run directory, as a user would; one that
Slurm starts again is not.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

from chaos import disk, goodput, kinds
from chaos.run import DISK, Run, ViolationError
from chaos.training import KINDS
from cluster_ddp.errors import ClusterDDPError, SandboxError, exit_on_error
from cluster_ddp.sandbox import cluster, prerequisites
from cluster_ddp.sandbox.layout import Layout

NODES, GPUS_PER_NODE = 4, 2
RESTARTS = ((0, 0), (1000, 1), (1000, 0))
"""--restarts and --spare-nodes. The trainings take turns."""
EARLY = 0.25
"""Share of the faults that meet a training which is just starting."""
EARLY_WITHIN_S, WITHIN_S = 4.0, 4.0
SLOWEST_UNDISTURBED_S = 400.0
UNHEARD_AFTER_S = 15.0
RESTART_TIMEOUT_S = SLOWEST_UNDISTURBED_S  # with a full disk the job ends with its last step
DISK_MB = 256
TRAINING_TIMEOUT_S = 3600.0
IGNORED = ("time", "samples_per_s", "waiting_for_data")


class Chaos:
    """The whole of it: one sandbox, one reference of each kind, many trainings."""

    def __init__(
        self, layout: Layout, folder: Path, *, faults: int, seed: int, training: tuple[int, int], kinds: Sequence[str]
    ) -> None:
        self.layout, self.folder, self.wanted, self.training = layout, folder, faults, training
        self.random, self.training_kinds = random.Random(seed), kinds
        self.made: Counter[str] = Counter()
        self.by_training: Counter[str] = Counter()
        """How many faults the completed trainings of each kind have met."""
        self.restarts = self.in_job = self.trainings = 0
        self.not_requeued: list[Path] = []
        self.slowest_end_s: dict[str, float] = {}
        """By kind: the longest time from a fault to the end of all ranks."""
        self.completed: list[goodput.Training] = []
        self._begun_s = time.monotonic()
        self._bag = self._kinds()
        self._references: dict[str, tuple[list[dict[str, Any]], float]] = {}
        """By kind of training: the records of an undisturbed one, and how long its steps took."""

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._begun_s

    def run(self) -> None:
        """Everything.

        Raises:
            ViolationError: what must not happen has happened.
        """
        while self.made.total() < self.wanted:
            kind = self.training_kinds[self.trainings % len(self.training_kinds)]
            self._make_reference(kind)
            self.trainings += 1
            restarts, spares = RESTARTS[self.trainings % len(RESTARTS)]
            folder = self.folder / f"training-{self.trainings}"
            self._disturb(Run(self.layout, folder, *self.training, kind, restarts=restarts, spare_nodes=spares))

    def _make_reference(self, kind: str) -> None:
        """Let a training of this kind run undisturbed, unless one has."""
        if kind in self._references:
            return
        reference = Run(self.layout, self.folder / f"undisturbed-{kind}", *self.training, kind)
        reference.submit()
        reference.wait_until(lambda: reference.status().ended, SLOWEST_UNDISTURBED_S, "the undisturbed training's end")
        if reference.status().state != "COMPLETED":
            reference.fail(f"the undisturbed training ended as {reference.status().state}")
        self._check_books(reference)
        records, steps_s = self._references[kind] = _compared(reference), reference.steps_s()
        self._say(f"undisturbed, {kind}: weights {records[-1]['weights_sha256'][:12]}… after {steps_s:.0f} s")

    def complaint(self) -> str | None:
        """What was wrong without costing anything that was trained."""
        if not self.not_requeued:
            return None
        jobs = ", ".join(map(str, self.not_requeued))
        return f"{len(self.not_requeued)} jobs stopped in time and were not queued again: {jobs}"

    def _kinds(self) -> Iterator[kinds.Fault]:
        """Every kind once and the quick ones twice, shuffled; and again."""
        while True:
            possible = [fault for fault in kinds.FAULTS if (self.folder / DISK).is_mount() or not fault.needs_disk]
            bag = [*possible, *(fault for fault in possible if fault.often)]
            self.random.shuffle(bag)
            yield from bag

    def _disturb(self, run: Run) -> None:
        """One training from its beginning to its end under faults."""
        run.submit()
        deadline, made_before = time.monotonic() + TRAINING_TIMEOUT_S, self.made.total()
        with run.open():
            while self._reach_a_moment(run):
                if self.made.total() < self.wanted:
                    self._make(run, next(self._bag))
                if time.monotonic() > deadline:
                    run.fail(f"the training did not end within {TRAINING_TIMEOUT_S:g} s")
        self.restarts += run.restarts
        self.in_job += run.in_job
        self.not_requeued += run.not_requeued
        self._check_end(run)
        faults = self.made.total() - made_before
        self.by_training[run.kind] += faults
        self.completed.append(goodput.Training(run.way, run.held.seconds, faults, self._references[run.kind][1]))

    def _reach_a_moment(self, run: Run) -> bool:
        """Wait until the training is worth a fault; False where it has completed."""
        if self.random.random() < EARLY:
            run.wait_until(lambda: run.ended() or bool(run.ranks()), RESTART_TIMEOUT_S, "the ranks' start")
            delay_s = self.random.uniform(0, EARLY_WITHIN_S)
        else:
            run.wait_until(lambda: run.ended() or run.has_progress(), RESTART_TIMEOUT_S, "progress")
            delay_s = self.random.uniform(0, WITHIN_S)
        time.sleep(delay_s)
        if not run.ended():
            return True
        if run.state != "COMPLETED":
            run.fail(f"job {run.job_id} ended as {run.state}, and no fault had been made that explains it")
        return False

    def _make(self, run: Run, fault: kinds.Fault) -> None:
        before, pids, nearly_done = run.where(), {rank.pid for rank in run.ranks()}, run.is_nearly_done()
        had_progress = run.has_progress()  # some faults take a minute
        done = fault.make(run, self.random)
        if done is None:  # nothing was there to be disturbed: the ranks had just ended
            return
        self.made[fault.name] += 1
        self._say(f"fault {self.made.total()} of {self.wanted}: {fault.name}: {done}, {before}")
        if fault.is_fatal:
            made_s, warned_s = time.monotonic(), time.time()
            # A warning may come before a rank listens. One that was heard stops the training after its first steps.
            may_be_unheard = fault.is_warning and not (had_progress and run.has_progress())
            run.wait_until(
                lambda: (
                    run.was_brought_down(pids)
                    or (may_be_unheard and run.has_trained_for(UNHEARD_AFTER_S, since_s=warned_s))
                ),
                RESTART_TIMEOUT_S,
                f"an effect of {fault.name}",
            )
            if may_be_unheard and (not run.was_brought_down(pids) or run.state == "COMPLETED"):
                return
            took_s = round(time.monotonic() - made_s, 1)
            self.slowest_end_s[fault.name] = max(took_s, self.slowest_end_s.get(fault.name, 0.0))
            # Restarted in its allocation, it may have completed before a cut node is given up and back.
            if run.state == "COMPLETED" and not nearly_done and not run.was_restarted(run.status()):
                run.fail(f"{fault.name} has disturbed nothing: the job has completed")
            run.check_checkpoints()
            run.clean_up_after_fault(self.random)
            run.begin_again(should_requeue=fault.is_warning)

    def _check_end(self, run: Run) -> None:
        run.check_checkpoints()
        if left := run.leftovers():
            run.fail(f"half-written files were left: {', '.join(left)}")
        found, (reference, _) = _compared(run), self._references[run.kind]
        for number, (ours, theirs) in enumerate(zip(found, reference)):
            if ours != theirs:
                run.fail(f"record {number} of metrics.jsonl is {ours}, undisturbed {theirs}")
        if len(found) != len(reference):
            run.fail(f"metrics.jsonl has {len(found)} records, undisturbed {len(reference)}")
        self._check_books(run)
        self._say(
            f"training {self.trainings} ({run.kind}) ended like the undisturbed one, after {run.restarts} restarts"
        )
        if not run.not_requeued:
            shutil.rmtree(run.folder)
            shutil.rmtree(run.run_dir)

    def _check_books(self, run: Run) -> None:
        for record in run.records():
            if record.get("each_once") is False:
                run.fail(f"the books are wrong: {record}")
        if run.records()[-1]["kind"] != "done":
            run.fail("the job completed without its last record")

    def _say(self, text: str) -> None:
        print(f"[{self.seconds:7.1f} s] {text}", flush=True)


def _compared(run: Run) -> list[dict[str, Any]]:
    return [{key: value for key, value in record.items() if key not in IGNORED} for record in run.records()]


def main() -> int:
    """Parse, start a sandbox, make faults, report. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200, help="how many (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=1, help="of their kinds, moments and victims (default: %(default)s)"
    )
    parser.add_argument("--epochs", type=int, default=30, help="of each training (default: %(default)s)")
    parser.add_argument("--ranks-per-node", type=int, default=2, help="on two nodes (default: %(default)s)")
    parser.add_argument("--trainings", nargs="+", default=KINDS, choices=KINDS, help="default: all, in turn")
    parser.add_argument("--name", default="chaos", help="of the sandbox (default: %(default)s)")
    parser.add_argument("--keep", action="store_true", help="keep all files, and the sandbox, also after success")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _exit)  # so that the sandbox goes
    with exit_on_error("make chaos"):
        prerequisites.install()
        cluster.down(options.name)  # one that a killed run has left
        folder = Path(tempfile.mkdtemp(prefix="cluster-ddp-chaos-"))
        with ExitStack() as stack:
            try:
                stack.enter_context(disk.mounted(folder / DISK, size_mb=DISK_MB))
            except SandboxError as error:
                print(f"{error}\nWithout the faults of disks.", flush=True)
            status = _chaos(options, folder)
        if status == 0 and not options.keep:
            shutil.rmtree(folder)
        return status


def _chaos(options: argparse.Namespace, folder: Path) -> int:
    violation: str | None = "interrupted"
    layout = cluster.up(options.name, nodes=NODES, gpus_per_node=GPUS_PER_NODE, stays=options.keep)
    training = {"training": (options.epochs, options.ranks_per_node), "kinds": options.trainings}
    chaos = Chaos(layout, folder, faults=options.faults, seed=options.seed, **training)
    try:
        chaos.run()
        violation = chaos.complaint()
    except (ViolationError, ClusterDDPError) as error:
        violation = str(error)
    finally:
        if violation is not None:
            print(f"\nVIOLATION: {violation}\nAll files are kept: {folder}", file=sys.stderr)
            shutil.copytree(layout.folder / "log", folder / "slurm-log")
            shutil.copytree(folder / DISK, folder / "run-directories")
        if not options.keep:
            cluster.down(options.name)
        shares = goodput.summary(chaos.completed)
        for way, share in shares.items():
            often = f"a fault every {share['s_between_faults']} s" if share["s_between_faults"] else "no fault"
            print(f"goodput, {way}: {share['goodput']:.3f} with {often}, trainings: {share['trainings']}")
        summary = {
            "seed": options.seed,
            "faults": chaos.made.total(),
            "by_training": dict(chaos.by_training),
            "by_kind": dict(sorted(chaos.made.items())),
            "slowest_end_s": dict(sorted(chaos.slowest_end_s.items())),
            "trainings": chaos.trainings,
            "restarts": chaos.restarts,
            "in_their_allocation": chaos.in_job,
            "goodput": shares,
            "seconds": round(chaos.seconds, 1),
            "violation": violation,
        }
        print(json.dumps(summary))
    return 0 if violation is None else 1


def _exit(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("make chaos: interrupted.")
