"""`cluster-ddp VERB …`: the same as `python -m cluster_ddp VERB …`.

submit and train are also modules to call: `python -m cluster_ddp.submit …`, `python -m cluster_ddp.train …`.
"""

from __future__ import annotations

import signal
import sys
from importlib import import_module

from cluster_ddp._version import __version__
from cluster_ddp.errors import SpecError, exit_on_error, nearest

VERBS = {
    "init": "write a cluster.toml and a job script for your project",
    "env": "show the place of this process in its job",
    "submit": "submit a training script to Slurm, or run it on this machine",
    "launch": "start the ranks of a job, in a batch script or on this machine, and say how they ended",
    "status": "show the state and progress of jobs and trainings",
    "logs": "show what a job has printed, or follow it",
    "cancel": "end jobs",
    "doctor": "say why a job would hang, or where one hung",
    "report": "show how a run used its CPUs, memory and GPUs, and what to change",
    "memory": "say whether a model fits in a GPU, alone or sharded",
    "export": "write a checkpoint's weights as a plain file for other tools",
    "fetch": "copy run directories from a cluster that is reached by ssh",
    "scaling": "measure a training on several numbers of GPUs, and say which to ask for",
    "train": "train the MNIST CNN under DDP",
    "sandbox": "start a real multi-node Slurm on this machine",
    "completion": "print what lets bash or zsh complete command lines",
}


def module_of(verb: str) -> str:
    """Name of the module that has a verb's `parser` and `main`."""
    if verb in ("doctor", "sandbox", "scaling"):
        return f"cluster_ddp.{verb}.__main__"
    return f"cluster_ddp.{verb}" if verb == "train" else f"cluster_ddp.cli.{verb}"


def main() -> int:
    """Call the module of the verb. Returns the exit status."""
    verb = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if verb in VERBS:
        try:
            return int(import_module(module_of(verb)).main(sys.argv[2:]))
        except KeyboardInterrupt:  # of a verb that has nothing to say about it
            return 128 + signal.SIGINT
    listing = "\n".join(f"  {name:12}{text}" for name, text in VERBS.items())
    if verb in ("-h", "--help"):
        print(f"usage: cluster-ddp VERB [OPTIONS]\n\n{listing}\n\ncluster-ddp VERB --help shows the options of a verb.")
        return 0
    if verb == "--version":
        print(f"cluster-ddp {__version__}")
        return 0
    with exit_on_error("cluster-ddp"):
        found = f"there is no verb {verb!r}.{nearest(verb, VERBS)}"
        raise SpecError("Reading the command line:", found, f"the verbs are {', '.join(VERBS)}")


if __name__ == "__main__":
    sys.exit(main())
