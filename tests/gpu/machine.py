"""Whether this machine has what a group of tests needs, and what to say loudly where it has not.

Asks torch in a process of its own: the one that runs the tests never starts CUDA.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from processes import output_of, python

# Since this version two ranks may share a GPU, where NCCL_MULTI_RANK_GPU_ENABLE is set.
_SHARING_NCCL = (2, 30)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What torch says of this machine."""

    torch: str = "none"
    cuda: str | None = None
    """That torch was built for."""
    available: bool = False
    gpus: int = 0
    names: tuple[str, ...] = ()
    nccl: tuple[int, ...] = ()
    error: str = ""

    def lack(self, group: str, gpus: int) -> str | None:
        """Why a group of tests, `gpu_nodes` with so many GPUs on a node, can't run here; None where it can."""
        if group == "gpu_nodes" and not shutil.which("srun"):
            return "there is no srun here: it needs a cluster with Slurm"
        if group == "gpu_nodes" and self.gpus < gpus:
            return f"through srun, torch sees {self.gpus} GPUs on a node, not {gpus}{self._told}"
        if not (self.available and self.gpus):
            return f"torch sees no GPU{self._told}"
        if group == "gpu_pair" and self.gpus < 2 and self.nccl < _SHARING_NCCL:
            version = ".".join(map(str, self.nccl))
            return f"there is one GPU, and NCCL {version} lets no two ranks share it (2.30 does)"
        return None

    @property
    def _told(self) -> str:
        return f" ({self.error})" if self.error else ""

    @property
    def shares_gpu(self) -> bool:
        """Whether two ranks are to share one GPU; where NCCL can't, and there are two, each has one of its own."""
        return self.nccl >= _SHARING_NCCL or self.gpus < 2


def look(srun: Sequence[str] = ()) -> Machine:
    """Ask torch, or, through srun, torch on each node; of several the one that sees the fewest GPUs."""
    output = output_of([*srun, *python("about.py")], timeout_s=180, in_job=bool(srun))
    told = [json.loads(line.partition(" ")[2]) for line in output.splitlines() if line.startswith("about ")]
    if not told:
        return Machine(error=output.splitlines()[-1] if output else "it said nothing")
    about = min(told, key=lambda one: int(one["gpus"]))
    about["names"], about["nccl"] = tuple(about.get("names", ())), tuple(about.get("nccl") or ())
    return Machine(**about)


def refusal(group: str, tests: int, machine: Machine, why: str) -> str:
    """What to print where nothing can be tested."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
    smi = output_of(["nvidia-smi", "--list-gpus"], timeout_s=30) or "it printed nothing"
    lines = [
        f"NOTHING WAS TESTED. None of the {tests} tests of the group {group} ran on {socket.gethostname()}.",
        "",
        f"Why:         {why}.",
        f"torch:       {machine.torch}, built for CUDA {machine.cuda}",
        f"             torch.cuda.is_available() is {machine.available}, CUDA_VISIBLE_DEVICES is {visible}",
        f"nvidia-smi:  {smi.splitlines()[0]}",
        "",
        f"What to do:  {_todo(group)}",
        f"On this machine, on the CPU: {os.path.relpath(sys.executable)} tests/gpu/run.py {group} --rehearse",
    ]
    rule = "!" * 110
    return "\n".join([rule, *(f"!! {line}".rstrip() for line in lines), rule])


def _todo(group: str) -> str:
    if group == "gpu_nodes":
        return "run it inside an allocation of two nodes with 8 GPUs each, or on a login node (see --help)"
    return "run it on a machine with an NVIDIA GPU, with a torch that was built for its driver"
