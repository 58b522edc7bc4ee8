"""The benchmarks: which script each runs, with which arguments, and what it measures."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
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
        "root); [scale.md](scale.md) has more of it, and a peer.",
        arguments=("--alone", "--name-servers=dead", "--ranks", "16", "250", "1000"),
    ),
    Benchmark(
        script="topology_scale.py",
        title="The place among many ranks",
        about="How long a rank of a large job takes to read its place from Slurm's variables.",
        arguments=("--ranks", "8", "1024", "100000"),
    ),
)
