"""Run the benchmarks one after another: `make bench`, or `python benchmarks/bench.py [throughput …]` for some of them.

Their reports go into benchmarks/record.json, and as tables into benchmarks/README.md. Benchmarks that were not run keep
their entries. One that fails, or can't run on this machine, is marked there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import tables
from record import without_folder

FOLDER = Path(__file__).parent
RECORD, README = FOLDER / "record.json", FOLDER / "README.md"
GPU_FIGURES = FOLDER / "gpu-figures.json"
"""What `make test-gpu`, `test-gpu-pair` and `test-gpu-nodes` write: a report for each group. And throughput.py's, of a
machine with a GPU."""
_MEASURED_BY_TESTS = "What the tests for GPUs measured on the way."
GPU_GROUPS = {
    "throughput": (
        "Training samples a second on a GPU",
        "As above, with one process on one GPU. A step of 64 samples is far from what such a GPU can do.",
    ),
    "gpu": ("One GPU", _MEASURED_BY_TESTS),
    "gpu_pair": ("Two ranks on one GPU", _MEASURED_BY_TESTS),
    "gpu_nodes": ("GPUs of several nodes", _MEASURED_BY_TESTS),
}
TIMEOUT_S = 2400
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """A script that prints a report of `record`."""

    script: str
    title: str
    about: str
    """What is measured, in Markdown."""
    arguments: tuple[str, ...] = ()
    """{data_dir}, {peers}, {torchx}, {nvrx}: bench.py's options. An argument with an empty one is left out."""
    launcher: tuple[str, ...] = ()

    def command(self, options: dict[str, str]) -> list[str]:
        """The command line that runs it, from the repository's root."""
        empty = [f"{{{name}}}" for name, value in options.items() if not value]
        words = (word.format(**options) for word in self.arguments if not any(name in word for name in empty))
        return [sys.executable, *self.launcher, f"{FOLDER.name}/{self.script}", *words]


BENCHMARKS = (
    Benchmark(
        script="throughput.py",
        title="Training samples a second",
        about="The reference training (MNIST CNN, Adadelta, batch 64; one process, a thread on each core) against "
        "PyTorch's MNIST example under DDP, as its documents teach it, and against its peers. The limit is how fast "
        "these cores multiply matrices; a sample takes 71.57 million multiplications and additions, backward included.",
        arguments=("--data-dir={data_dir}", "--python={peers}"),
    ),
    Benchmark(
        script="weak_scaling.py",
        title="Weak scaling",
        about="Two ranks with a core and 64 samples a step each, against one rank on one core; and against two "
        "processes that run at the same time and know nothing of each other: what is lost against those is "
        "communication, the rest is memory and caches that cores share. Ranks that only wait for each other meet in "
        "each step without exchanging gradients.",
        arguments=("--data-dir={data_dir}",),
    ),
    Benchmark(
        script="speedrun.py",
        title="Time to an accuracy",
        about="The fast recipe, from reading the data to the last test, for 30 seeds.",
        arguments=("--seeds=30", "--data-dir={data_dir}"),
    ),
    Benchmark(
        script="checkpoint_blocking.py",
        title="Saving a checkpoint",
        about="How long `Checkpointer.step` keeps the training waiting when it saves: it returns when a copy is made. "
        "For the reference training's state; and for a model of 500 MB, against saving it in the foreground (copy, "
        "write, SHA-256, fsync), alternately.",
    ),
    Benchmark(
        script="checkpoint_loading.py",
        title="Loading a checkpoint",
        about="How much memory a process takes at its peak, in times the state that it loads: on top of what it had "
        "with the model and its gradients' buckets; and in all, without what importing torch takes.",
    ),
    Benchmark(
        script="sharded.py",
        title="Sharded models",
        about="Memory of a rank (its model, gradients and AdamW, and the peak of a step) under DDP and FSDP2. How "
        "long a save blocks the training, and a load takes, against torch.distributed.checkpoint (DCP) on the same "
        "model in one run, alternately. A load of ours checks SHA-256 digests, and DCP does not: that is apart. And a "
        "resume with many tensors. All on CPUs over gloo; with 16 ranks, 8 share a core.",
    ),
    Benchmark(
        script="stop_agreement.py",
        title="Agreeing on when to stop",
        about="The share of training steps (MNIST CNN, two ranks, CPU, gloo) that `Checkpointer.step` takes where "
        "nothing is saved, waiting for the other rank included; and how long after a signal on one rank all is saved.",
        launcher=TORCHRUN,
    ),
    Benchmark(
        script="observing.py",
        title="Observing a training",
        about="The share of training steps (MNIST CNN, two ranks, CPU, gloo) that taking their times takes; and the "
        "CPU time of sampling the node once a second from /proc, with the processes of this benchmark's session.",
        launcher=TORCHRUN,
    ),
    Benchmark(
        script="submit_startup.py",
        title="The command line of a submission",
        about="Wall time of whole processes, run alternately.",
        arguments=("--rounds=20", "--torchx={torchx}"),
    ),
    Benchmark(
        script="submit_array.py",
        title="Submitting an array of 1,000",
        about="Wall time of the whole process, where Slurm's commands answer at once, and what it writes.",
    ),
    Benchmark(
        script="packing.py",
        title="Many small trainings in one job",
        about="From the call of `submit` to the end of the last of 32 trainings of 20 s, on a sandbox of one node with "
        "four GPUs (as root): in one job, four at a time, and as an array of 32 jobs, which need not wait for others' "
        "jobs there. The trainings sleep, since they would share the machine's two cores.",
    ),
    Benchmark(
        script="recovery.py",
        title="Seconds from a fault to the next completed step",
        about="Four ranks on four nodes of the sandbox, and a spare, at ten steps a second. After 15 s a rank is "
        "killed or stopped, or a node's link is cut. The hang limit is 10 s. torchrun and ft_launcher have four nodes "
        "and no spare, and start plain torch with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: without it, its ranks never "
        "met again over gloo (torch 2.14). The sandbox's Slurm gives lost nodes up after 20 s and starts requeued jobs "
        "after 15 s. By default that takes five minutes and two, and then the job waits in the queue.",
        arguments=("--nvrx={nvrx}",),
    ),
    Benchmark(
        script="status_scale.py",
        title="The state of many jobs",
        about="`status` with many run directories whose jobs Slurm has forgotten, on a sandbox without accounting (as "
        "root). With one question for each job, as it was, 2,000 took 194 s.",
    ),
    Benchmark(
        script="startup.py",
        title="From srun to the first step",
        about="The MNIST training on 16 ranks, 8 on each of two nodes of a sandbox that share this machine's cores, "
        "from srun until rank 0 has recorded the mean loss of the first step (as root).",
        arguments=("--rounds=2",),
    ),
    Benchmark(
        script="staged_imports.py",
        title="Importing from a slow file system",
        about="`import torch` on two ranks at once where each look-up and opening of a file takes longer, as on a busy "
        "shared file system, against `--stage-env`: unpacking the environment, then importing from the copy. The "
        "environment is the one of the tests, with the CUDA builds.",
    ),
    Benchmark(
        script="uneven_shares.py",
        title="Uneven shares",
        about="Updates of 512 samples on three ranks (`world.shard(…, global_batch=512)`: 171, 171 and 170) against "
        "updates of 510, which they share evenly; at once, and in batches of at most 64. And the worst case, 8 samples "
        "against 9. A small CNN on CPUs, over gloo.",
        launcher=(*TORCHRUN[:-1], "--nproc-per-node=3"),
    ),
    Benchmark(
        script="forked_ranks.py",
        title="Many forked ranks on one node",
        about="64 ranks that one process becomes, on these cores: from its start until all have met, and until "
        "all have ended. An earlier version took 143 s.",
    ),
    Benchmark(
        script="rendezvous_scale.py",
        title="The rendezvous of many ranks",
        about='From "all are started and ready" to "all know that all are there", where name servers are dead (as '
        "root); [docs/scale.md](../docs/scale.md) has more of it, and a peer.",
        arguments=("--alone", "--name-servers=dead", "--ranks", "16", "250", "1000"),
    ),
    Benchmark(
        script="topology_scale.py",
        title="The place among many ranks",
        about="How long a rank of a large job takes to read its place from Slurm's variables.",
        arguments=("--ranks", "8", "1024", "100000"),
    ),
)


def main() -> int:
    """Run the chosen benchmarks, and write record and tables after each. Returns the exit status."""
    options = _parse()
    chosen = [one for one in BENCHMARKS if not options.names or Path(one.script).stem in options.names]
    _fetch_mnist(options.data_dir, options.mnist_from)
    record: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    fillings = {name: getattr(options, name) for name in ("data_dir", "peers", "torchx", "nvrx")}
    for one in chosen:
        start_s, others = time.monotonic(), Others()
        result = {**run(one.command(fillings)), "others_percent": others.percent()}
        if result.get("is_on_gpu"):
            GPU_FIGURES.write_text(json.dumps({**_gpu_reports(), Path(one.script).stem: result}, indent=2) + "\n")
        else:
            record[one.script] = result
        _write(record)
        print(f"{one.title}: {verdict(result)} ({time.monotonic() - start_s:.0f} s)", flush=True)
    return 1 if any("failed" in record.get(one.script, {}) for one in chosen) else 0


class Others:
    """How much CPU other processes use from now on: a loaded machine's figures mean little."""

    def __init__(self) -> None:
        self._start_s, self._used_s = time.monotonic(), self._by_others_s()

    def percent(self) -> float:
        """Percent of the time of all CPUs, stolen time of a virtual machine included."""
        cpus = os.cpu_count() or 1
        return 100 * (self._by_others_s() - self._used_s) / ((time.monotonic() - self._start_s) * cpus)

    @staticmethod
    def _by_others_s() -> float:
        user, nice, system, _, _, irq, softirq, steal, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
        ours = os.times()
        ours_s = ours.user + ours.system + ours.children_user + ours.children_system
        return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK") - ours_s


def run(command: list[str]) -> dict[str, Any]:
    """Run a benchmark. Returns its report, or how it failed."""
    try:
        done = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return _failed(command, f"not done after {TIMEOUT_S} s")
    if done.returncode != 0:
        print(done.stderr[-2000:], file=sys.stderr)
        return _failed(command, f"status {done.returncode}: {(done.stderr.splitlines() or [''])[-1][:200]}")
    try:
        return dict(json.loads(done.stdout[done.stdout.index("{\n") :]))  # a training may have printed before it
    except ValueError:
        return _failed(command, "it printed no JSON")


def _failed(command: list[str], why: str) -> dict[str, Any]:
    words = ["python", *map(without_folder, command[1:])]
    return {"failed": why, "command": " ".join(words), "date": date.today().isoformat()}


def verdict(result: Mapping[str, Any]) -> str:
    """A result in a few words."""
    if "figures" not in result:
        return str(result.get("unable") or f"failed: {result.get('failed')}")
    judged = [one for one in result["figures"] if one["met"] is not None]
    missed = [one["what"] for one in judged if not one["met"]]
    return f"{len(judged) - len(missed)} of {len(judged)} targets met{': not ' if missed else ''}{'; '.join(missed)}"


def _write(record: Mapping[str, Any]) -> None:
    ordered = {one.script: record[one.script] for one in BENCHMARKS if one.script in record}
    RECORD.write_text(json.dumps(ordered, indent=1) + "\n")
    sections = [tables.section(one.title, one.about, record[one.script]) for one in BENCHMARKS if one.script in record]
    sections += _gpu_sections()
    README.write_text(tables.replaced(README.read_text(), "\n\n".join(sections)))


def _gpu_sections() -> list[str]:
    """Of what has left figures of GPUs."""
    reports = _gpu_reports()
    return [tables.section(*words, reports[group]) for group, words in GPU_GROUPS.items() if group in reports]


def _gpu_reports() -> dict[str, Any]:
    return dict(json.loads(GPU_FIGURES.read_text())) if GPU_FIGURES.exists() else {}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [Path(one.script).stem for one in BENCHMARKS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(names)} (default: all)")
    parser.add_argument("--data-dir", default="data", help="the root of torchvision's MNIST class")
    parser.add_argument("--mnist-from", default="", help="a folder that may hold MNIST's files")
    parser.add_argument("--peers", default="", help="the Python of an environment with lightning-fabric and accelerate")
    parser.add_argument("--torchx", default="", help="the torchx to compare with")
    parser.add_argument("--nvrx", default="", help="the Python of an environment with nvidia-resiliency-ext")
    options = parser.parse_args()
    if unknown := set(options.names) - set(names):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are: {', '.join(names)}")
    return options


def _fetch_mnist(data_dir: str, source: str) -> None:
    """Fetch MNIST if it is missing. Without it, the benchmarks that need it fail and say so."""
    found = ["--from", source] if source else []
    command = [sys.executable, "scripts/download_data.py", "--data-dir", data_dir, *found]
    subprocess.run(command, cwd=FOLDER.parent, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
