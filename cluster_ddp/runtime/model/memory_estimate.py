"""How much of a GPU's memory a training's weights, gradients and optimizer state take, from a model's shapes alone.

    with torch.device("meta"):
        model = GPT()
    for need in estimate(model, gpus=8, gpus_per_node=4, optimizer="adamw", mixed=torch.bfloat16):
        print(need.strategy, need.total)

What it follows, in torch 2.14:

- DDP: with gradient_as_bucket_view, as `World.wrap` sets it, gradients are views into the buckets (torch/nn/parallel/
  distributed.py). A new gradient is a tensor of its own until it is copied there.
- FSDP2 shards each parameter along its first dimension, padded to equal parts (torch/distributed/fsdp/_fully_shard/
  _fsdp_param.py, `_init_sharded_param`); gradients are views into the output of the reduce-scatter, padded in the same
  way (_fsdp_collectives.py, `foreach_reduce`).
- While a group of parameters is used, it is whole, in the policy's `param_dtype`. Beside it there is the output of the
  all-gather of the next one (_fsdp_param_group.py, "Overlapping all-gather copy-in and all-gather" and
  `_backward_prefetch`), in a backward pass the group's whole gradients, and one input of a reduce-scatter in
  `reduce_dtype` (`post_backward`: at most reduce_scatter_max_input_buffers, 1). The group of what is in no block stays
  whole from the forward to the end of the backward pass (_fully_shard.py, reshard_after_forward=None).
- HSDP: the same within a node. The all-reduce between nodes works in the output of the reduce-scatter.
- AdamW and Adam keep two tensors like each parameter, SGD with momentum one (torch/optim). Their step counts are on the
  CPU, unless fused or capturable.
- torch.autocast keeps the casts of weights until it ends (aten/src/ATen/autocast_mode.cpp): at most all matrices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from cluster_ddp.errors import SpecError, nearest
from cluster_ddp.runtime.model.model_wrapping import repeated_class

STATES = {"adamw": 2, "adam": 2, "sgd": 0, "sgd-momentum": 1}
"""Optimizer -> tensors that it keeps for each parameter, of the parameter's shape and dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """The bytes that one rank needs under a strategy; the rank with the largest shards."""

    strategy: str
    """ "ddp", "fsdp" or "hsdp"."""
    shards: int
    """In how many parts parameters, gradients and optimizer state are."""
    weights: int
    """Parameters and buffers."""
    gradients: int
    """Gradients, after the communication."""
    optimizer: int
    """The optimizer's state."""
    in_flight: int
    """What is there at the same time for a moment of a step: gathered parameters, whole gradients, communication."""

    @property
    def total(self) -> int:
        """The sum."""
        return self.weights + self.gradients + self.optimizer + self.in_flight


def estimate(
    model: torch.nn.Module,
    *,
    gpus: int,
    gpus_per_node: int,
    blocks: Sequence[str] | None = None,
    optimizer: str = "adamw",
    mixed: torch.dtype | None = None,
) -> list[Need]:
    """Return what a model needs under each strategy. Activations are not in it: they depend on the data.

    Args:
        model: the model; its tensors may be on the meta device.
        gpus: number of GPUs, one for each rank.
        gpus_per_node: those of a node, over which "hsdp" shards.
        blocks: names of the classes that "fsdp" and "hsdp" gather one at a time; default: `repeated_class`.
        optimizer: a name of `STATES`.
        mixed: the dtype of `World.wrap`'s `mixed`; of `World.autocast` for "ddp".

    Raises:
        SpecError: no such blocks or optimizer; numbers of GPUs that do not go together.
    """
    if optimizer not in STATES:
        found = f"there are {', '.join(STATES)}.{nearest(optimizer, STATES)}"
        raise SpecError(f"Estimating the state of {optimizer}:", found, "take the one with as many tensors")
    if min(gpus, gpus_per_node) < 1 or gpus % gpus_per_node:
        asked = f"Estimating the memory on {gpus} GPUs, {gpus_per_node} in each node:"
        raise SpecError(asked, "that is not a whole number of nodes.", "--gpus 8 --gpus-per-node 4")
    groups = grouped(model, blocks)
    parts = {"ddp": 1, "fsdp": gpus} | ({"hsdp": gpus_per_node} if gpus_per_node < gpus else {})
    return [_need(model, groups, name, shards, STATES[optimizer], mixed) for name, shards in parts.items()]


def _need(
    model: torch.nn.Module,
    groups: Sequence[Sequence[torch.nn.Parameter]],
    strategy: str,
    shards: int,
    states: int,
    mixed: torch.dtype | None,
) -> Need:
    parameters = list(model.parameters())
    gradients = sum(_shard_bytes(one, shards) for one in parameters if one.requires_grad)
    return Need(
        strategy=strategy,
        shards=shards,
        weights=sum(_shard_bytes(one, shards) for one in parameters) + sum(one.nbytes for one in model.buffers()),
        gradients=gradients,
        optimizer=states * gradients,
        in_flight=_of_ddp(parameters, mixed) if strategy == "ddp" else _in_flight(groups, shards, mixed),
    )


def grouped(model: torch.nn.Module, blocks: Sequence[str] | None) -> list[list[torch.nn.Parameter]]:
    """Return the parameters that are gathered together: first those in no block, then those of each block.

    Raises:
        SpecError: the model has no such block.
    """
    names = set(blocks or filter(None, [repeated_class(model)]))
    modules = list(model.modules())
    if blocks and (missing := sorted(names - {type(one).__name__ for one in modules})):
        found = f"the model has no {missing[0]}.{nearest(missing[0], {type(one).__name__ for one in modules})}"
        raise SpecError(f"Gathering {', '.join(blocks)} at a time:", found, f"--blocks {repeated_class(model) or ''}")
    taken: set[torch.nn.Parameter] = set()
    groups = []
    for block in reversed([one for one in modules if one is not model and type(one).__name__ in names]):
        groups.append([one for one in block.parameters() if one not in taken])  # inner blocks first
        taken.update(groups[-1])
    return [[one for one in model.parameters() if one not in taken], *reversed(groups)]


def _of_ddp(parameters: Sequence[torch.nn.Parameter], mixed: torch.dtype | None) -> int:
    """Return the casts of matrices, and the largest gradient before it is copied to its bucket."""
    matrices = [one for one in parameters if one.dim() > 1 and one.dtype == torch.float32]
    casts = 0 if mixed is None else sum(one.numel() * mixed.itemsize for one in matrices)
    return casts + max((one.nbytes for one in parameters if one.requires_grad), default=0)


def _in_flight(groups: Sequence[Sequence[torch.nn.Parameter]], shards: int, mixed: torch.dtype | None) -> int:
    """Return the most that is there at a time besides shards: in the forward or backward pass, or at its end."""
    rest, *blocks = [_Group.of(group, shards, mixed) for group in groups]
    gathered = max((one.whole for one in blocks), default=0)
    next_one = gathered if shards > 1 and len(blocks) > 1 else 0  # one rank copies: it needs no output of an all-gather
    of_rest = rest.whole if shards > 1 else 0
    forward = rest.whole + max(of_rest + next_one, gathered + (gathered if shards > 1 else 0))
    backward = rest.whole + rest.gradients + next_one
    backward += max((one.whole + one.gradients + one.reduced for one in blocks), default=0)
    return max(forward, backward, rest.gradients + rest.reduced)


@dataclass(frozen=True, slots=True)
class _Group:
    """Bytes for parameters that are gathered together: whole, their whole gradients, a reduce-scatter's input."""

    whole: int
    gradients: int
    reduced: int

    @staticmethod
    def of(parameters: Iterable[torch.nn.Parameter], shards: int, mixed: torch.dtype | None) -> _Group:
        whole = gradients = reduced = 0
        for one in parameters:
            numel, dtype = shards * _shard_numel(one, shards), mixed or one.dtype
            whole += numel * dtype.itemsize
            if one.requires_grad:
                gradients += one.numel() * dtype.itemsize
                reduced += numel * (torch.float32 if mixed else dtype).itemsize
        return _Group(whole, gradients, reduced)


def _shard_numel(tensor: torch.Tensor, shards: int) -> int:
    first, *rest = tensor.shape or (1,)
    return math.ceil(first / shards) * math.prod(rest)


def _shard_bytes(tensor: torch.Tensor, shards: int) -> int:
    return _shard_numel(tensor, shards) * tensor.dtype.itemsize
