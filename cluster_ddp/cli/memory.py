"""`cluster-ddp memory FILE.py:FUNCTION`: do a model's weights, gradients and optimizer state fit in a GPU?

cluster-ddp memory train.py:build --gpus 8 --gpus-per-node 4 --gpu-gb 80 --mixed bf16

FUNCTION, or a class, takes no arguments and returns the model; a module's name may stand for FILE.py. It is called
under torch.device("meta"): nothing is computed, and no memory is taken. So this needs no GPU. 1 GB is 10^9 bytes.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster_ddp.argument_parser import Parser
from cluster_ddp.errors import ClusterDDPError, SpecError, aligned, exit_on_error, nearest

if TYPE_CHECKING:
    import torch

    from cluster_ddp.runtime.model.memory_estimate import Need

PROGRAM = "cluster-ddp memory"
_OPTIMIZERS = ("adamw", "adam", "sgd", "sgd-momentum")
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
_UNITS = {"GB": 1e9, "MB": 1e6, "kB": 1e3}


def parser() -> Parser:
    """The command line."""
    top = Parser(PROGRAM, description=__doc__)
    top.add_argument("model", metavar="FILE.py:FUNCTION", help="what returns the model")
    top.add_argument("--gpus", type=int, metavar="N", help="number of GPUs")
    per_node = "GPUs in each node, over which hsdp shards (default: all in one)"
    top.add_argument("--gpus-per-node", type=int, metavar="N", help=per_node)
    memory = "memory of a GPU, such as 80: Slurm does not say it; on a node, nvidia-smi does"
    top.add_argument("--gpu-gb", type=float, metavar="X", help=memory)
    top.add_argument("--optimizer", choices=_OPTIMIZERS, default="adamw", help="the optimizer (default: adamw)")
    top.add_argument("--mixed", choices=tuple(_DTYPES), help="mixed precision (default: none)")
    blocks = "classes of the layers that fsdp and hsdp gather one at a time (default: the class that repeats most)"
    top.add_argument("--blocks", nargs="+", metavar="CLASS", help=blocks)
    return top


def main(argv: Sequence[str]) -> int:
    """Parse the options, make the model of shapes only, print what it needs. Returns the exit status."""
    with exit_on_error(PROGRAM):
        asked = parser().parse_args(argv)
        if asked.gpus is None:
            raise SpecError("Sharding a model:", "over how many GPUs is not said.", "--gpus 8 --gpus-per-node 4")
        if asked.gpu_gb is None:
            found = "--gpu-gb is missing; Slurm does not say how much memory a GPU has."
            hint = "--gpu-gb 80; on a node: nvidia-smi --query-gpu=name,memory.total --format=csv"
            raise SpecError("Comparing with a GPU's memory:", found, hint)
        model = _model(asked.model)
        import torch

        from cluster_ddp.runtime.model import memory_estimate, model_wrapping

        needs = memory_estimate.estimate(
            model,
            gpus=asked.gpus,
            gpus_per_node=asked.gpus_per_node or asked.gpus,
            blocks=asked.blocks,
            optimizer=asked.optimizer,
            mixed=None if asked.mixed is None else getattr(torch, _DTYPES[asked.mixed]),
        )
        groups = memory_estimate.grouped(model, asked.blocks)
        names = asked.blocks or list(filter(None, [model_wrapping.repeated_class(model)]))
        unit = next((one for one in _UNITS if max(need.total for need in needs) >= _UNITS[one] / 10), "kB")
        print(f"{_heading(asked.model, groups, names)} {unit} on each GPU:")
        print("\n".join(_table(needs, asked.gpu_gb, _UNITS[unit])))
        print("Activations, the CUDA context and NCCL's own buffers come on top of the sum.")
    return 0


def _model(words: str) -> torch.nn.Module:
    """Call what returns the model, on the meta device."""
    made = _function(words)
    import torch

    try:
        with torch.device("meta"):
            model = made()
    except Exception as error:
        hint = "a function without arguments, which reads no values of tensors: def build(): return GPT(Config())"
        raise SpecError(f"Calling {words} under torch.device('meta'):", _shown(error), hint) from error
    if not isinstance(model, torch.nn.Module):
        found = f"it returned {type(model).__name__}, not a torch.nn.Module."
        raise SpecError(f"Calling {words}:", found, "def build(): return GPT(Config())")
    return model


def _function(words: str) -> Callable[[], Any]:
    asked, (place, _, name) = f"Reading {words}:", words.rpartition(":")
    if not place or not name:
        hint = f"{PROGRAM} train.py:build, where build() returns the model"
        raise SpecError(asked, "it is not FILE.py:FUNCTION.", hint)
    path = Path(place)
    if path.suffix == ".py" and not path.is_file():
        raise SpecError(asked, f"there is no file {place} in {Path.cwd()}.", "name the file that defines the model")
    sys.path.insert(0, str(path.resolve().parent) if path.suffix == ".py" else str(Path.cwd()))
    from cluster_ddp.runtime import distributed  # torch

    try:
        distributed.may_join = False
        module = importlib.import_module(path.stem if path.suffix == ".py" else place)
    except ClusterDDPError:
        raise
    except Exception as error:
        hint = 'only define things at the top level; train under: if __name__ == "__main__":'
        raise SpecError(f"Importing {place}:", _shown(error), hint) from error
    finally:
        distributed.may_join = True
    found: Callable[[], Any] | None = getattr(module, name, None)
    if not callable(found):
        legal = [one for one in vars(module) if callable(getattr(module, one)) and not one.startswith("_")]
        hint = "name a function that takes no arguments and returns the model"
        raise SpecError(asked, f"{place} has no function or class {name}.{nearest(name, legal)}", hint)
    return found


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _heading(words: str, groups: Sequence[Sequence[torch.nn.Parameter]], names: Sequence[str]) -> str:
    numel = sum(one.numel() for group in groups for one in group)
    blocks = f"{len(groups) - 1} {' and '.join(names)}" if len(groups) > 1 else "no repeated layers"
    kinds = " and ".join(sorted({str(one.dtype).removeprefix("torch.") for group in groups for one in group}))
    return f"{words}: {numel:,} parameters in {kinds}, {blocks}."


def _table(needs: Sequence[Need], gpu_gb: float, unit: float) -> list[str]:
    rows = [["strategy", "parts", "weights", "gradients", "optimizer", "in flight", "sum", f"of {gpu_gb:g} GB"]]
    for need in needs:
        parts = (need.weights, need.gradients, need.optimizer, need.in_flight, need.total)
        fits = "fits" if need.total <= gpu_gb * _UNITS["GB"] else "does not fit"
        rows.append([need.strategy, str(need.shards), *(f"{part / unit:.2f}" for part in parts), fits])
    words, figures = aligned(rows), aligned(rows, str.rjust)
    return ["  ".join([left[0], *right[1:-1], left[-1]]).rstrip() for left, right in zip(words, figures)]
