"""What a `World` does with models: wraps them in DDP or FSDP2, clips their gradients, compares their weights."""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch
from torch.nn.parallel import DistributedDataParallel

from cluster_ddp.errors import first_of
from cluster_ddp.runtime.collectives import Collectives
from cluster_ddp.runtime.data.batch_iterator import BatchIterator
from cluster_ddp.runtime.model import ddp, empty_init, model_wrapping
from cluster_ddp.runtime.model.dtensor_pieces import content, full
from cluster_ddp.runtime.model.grad_scaler import GradScaler, note_clipped
from cluster_ddp.runtime.model.model_wrapping import Blocks, Sharded, Strategy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Model = TypeVar("Model", bound=torch.nn.Module)


@dataclass(frozen=True, kw_only=True, slots=True)
class Models(Collectives):
    """All ranks of the run, and the models that they train.

    The strategies of `wrap`:

    - "ddp": each rank has the whole model. Gradients are views into the communication buckets and need no memory of
      their own. (`zero_grad()`, which sets them to None, lets each step copy them there; that was 3 % faster than
      adding them to zeros.) The final layout of the buckets is made in `wrap`, not in the first step, so that a
      resumed training adds up gradients in the same order.
    - "fsdp" (FSDP2, torch's `fully_shard`): each rank keeps a part of each parameter, of its gradient and of the
      optimizer's state. A block's parameters are whole while it computes.
    - "hsdp": so within each node; nodes have copies of each other, and add up gradients.

    Tensor parallelism is not built.
    """

    @overload
    def wrap(
        self,
        model: torch.nn.Module,
        *,
        strategy: Literal["ddp"] = "ddp",
        blocks: Blocks | None = None,
        activation_checkpointing: bool = False,
        sync_batchnorm: bool = False,
        place: bool = True,
        **options: Any,
    ) -> DistributedDataParallel: ...

    @overload
    def wrap(
        self,
        model: Model,
        *,
        strategy: Sharded,
        blocks: Blocks,
        mixed: torch.dtype | None = None,
        activation_checkpointing: bool = False,
        mesh: DeviceMesh | None = None,
        sync_batchnorm: bool = False,
        **options: Any,
    ) -> Model: ...

    def wrap(self, model: torch.nn.Module, *, strategy: Strategy = "ddp", **options: Any) -> torch.nn.Module:
        """Move a model to this rank's device, and wrap it in DistributedDataParallel or shard it. A collective.

            model = world.wrap(GPT(config), strategy="fsdp", blocks=Block, mixed=torch.bfloat16)

        All ranks get rank 0's parameters and buffers. Make the optimizer afterwards.

        Args:
            model: the model. torch.compile may be applied to it, or `block.compile()` to its blocks, before or after.
            strategy: "ddp", "fsdp" or "hsdp"; see `Models`.
            blocks: class of the layers that the model repeats, or a tuple of them. "ddp" needs it only for
                activation_checkpointing.
            activation_checkpointing: compute each block's forward pass again in the backward pass, to need less memory.
            sync_batchnorm: on GPUs, let BatchNorm use the statistics of all ranks' batches.
            mixed: "fsdp", "hsdp": the dtype in which blocks compute, such as torch.bfloat16. The weights keep theirs,
                and gradients are added up in float32.
            mesh: "fsdp", "hsdp": a DeviceMesh of your own over all ranks, of one dimension, or (replicate, shard).
            place: "ddp": False leaves the parameters where they are, for a model on several devices.
            options: for DistributedDataParallel (find_unused_parameters, static_graph, bucket_cap_mb …) or for
                `fully_shard` (reshard_after_forward, offload_policy …).

        Returns:
            The model in DistributedDataParallel; or the model itself, to which `fully_shard` gives a class of its own.

        Raises:
            SpecError: an option that the strategy doesn't have; no such blocks; parameters that can't be sharded, such
                as tied ones in two blocks; nodes with different numbers of ranks ("hsdp"); different models on
                different ranks.
            DeviceTimeoutError, PeerFailedError: as `synchronize`.
        """
        return model_wrapping.wrapped(self, model, strategy, **options)

    def empty_init(self) -> AbstractContextManager[None]:
        """Return a context in which only rank 0 has memory for a model's weights. `wrap` shares them. A collective.

            with world.empty_init():
                model = GPT(config)
            model = world.wrap(model, strategy="fsdp", blocks=Block)

        Rank 0 builds the model, in its host's memory. On other ranks, weights have shapes and no values (torch's meta
        device), and building takes no time. `wrap` sends the values tensor by tensor: of each, a rank keeps its part.
        So the weights are, to the bit, those of rank 0's constructor, on any number of ranks. Tied weights stay tied.
        After the body, torch's generator is where the constructor leaves it, on all ranks that had seeded it alike.

        Build the model there. What changes it before `wrap`, such as `load_state_dict`, counts on rank 0 alone.

        Raises:
            SpecError: rank 0's host has no memory for the model. On other ranks: the body reads values of weights, or
                draws random numbers for something else. From `wrap`: another model on another rank.
        """
        return empty_init.built_on_main(self)

    def accumulate(
        self, model: torch.nn.Module, batch: BatchIterator | int, *, every: int | None = None
    ) -> AbstractContextManager[bool]:
        """Return a context for forward and backward of one batch of a group that makes one update.

        Gradients are added up over the ranks in the group's last batch only, for which the context's value is True:

            with world.accumulate(model, shard, every=4) as is_last:
                (loss(model(images), labels) / 4).backward()
            if is_last:
                optimizer.step(); optimizer.zero_grad(); checkpoint.step()

        With `shard(dataset, global_batch=512, batch_size=64)` an update has the same samples on any number of ranks.
        Each takes its share, in as many batches as that needs. The gradient is that of the mean over all 512:

            with world.accumulate(model, shard) as is_last:
                (loss(model(images), labels) * shard.loss_scale).backward()

        So the learning rate stays. The last two updates of an epoch halve what is left of it.

        Args:
            model: from `wrap`.
            batch: the shard that the batch is from: its epoch's last group may be smaller. Or, without one, the number
                of the batch, from 0.
            every: number of batches of one update; None: as the shard says.

        Raises:
            SpecError: `every` is below 1, not needed or missing; or the model is not wrapped.
        """
        return ddp.accumulate(model, batch, every=every)

    def clip_grad_norm(self, model: torch.nn.Module, max_norm: float, norm_type: float = 2.0) -> float:
        """Scale a model's gradients so that their total norm is at most `max_norm`. A collective; waits for a GPU.

            norm = world.clip_grad_norm(model, 1.0)

        Args:
            model: from `wrap`. With a GradScaler, call its `unscale_` before.
            max_norm: largest norm that is left as it is.
            norm_type: 2.0, another p, or math.inf for the largest absolute value.

        Returns:
            The norm before, over the gradients of all ranks' shards; the same float on every rank.

        Raises:
            DeviceTimeoutError, PeerFailedError: as `synchronize`.
        """
        if self.is_main:
            note_clipped(model)
        given = [one for one in model.parameters() if one.grad is not None]
        norm = full(torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type))
        self.synchronize()
        return float(norm)

    def share_buffers(self, model: torch.nn.Module) -> None:
        """Give all ranks rank 0's buffers, such as the statistics of batch normalisation. A collective.

        DDP does so before each forward pass in training mode, FSDP2 never does. Call it before a test or at the end:
        since then, each rank's statistics are its own.

        Args:
            model: from `wrap`.

        Raises:
            DeviceTimeoutError, PeerFailedError: as `synchronize`.
        """
        if buffers := list(model.buffers()):
            self.synchronize()
            for buffer, value in zip(buffers, self.broadcast([buffer.cpu() for buffer in buffers])):
                buffer.copy_(value)

    def weights_digest(self, model: torch.nn.Module) -> str:
        """Return the SHA-256 of a model's parameters and buffers, the same on all ranks. A collective.

        Args:
            model: from `wrap`.

        Raises:
            RuntimeError: parameters or buffers differ between ranks; it names them.
            DeviceTimeoutError, PeerFailedError: as `synchronize`.
        """
        self.synchronize()
        inner, digests = ddp.unwrapped(model), {}
        for name, tensor in inner.state_dict().items():
            whole = full(tensor)
            self.synchronize()  # reading it would block until it is gathered
            digests[name] = hashlib.sha256(content(whole)).hexdigest()
        of_ranks = self.gather(digests)
        if differing := [name for name in digests if any(other.get(name) != digests[name] for other in of_ranks)]:
            raise RuntimeError(_other_on_some_ranks(differing, {name for name, _ in inner.named_parameters()}))
        return hashlib.sha256("".join(digests.values()).encode()).hexdigest()

    def autocast(self, dtype: torch.dtype = torch.bfloat16, *, enabled: bool = True) -> torch.autocast:
        """Return torch's context for mixed precision on this rank's device.

        Args:
            dtype: torch.bfloat16; or, on GPUs, torch.float16, with `grad_scaler`.
            enabled: False computes in the tensors' own dtypes.
        """
        return torch.autocast(self.device.type, dtype, enabled=enabled)

    def grad_scaler(self, dtype: torch.dtype) -> torch.amp.GradScaler:
        """Return a GradScaler, enabled for torch.float16 only. Name it in `Checkpointer`, too: it has a state."""
        return GradScaler(self.device.type, enabled=dtype == torch.float16)


def _other_on_some_ranks(differing: list[str], parameters: set[str]) -> str:
    """What to say of entries of a model's state that are not the same on all ranks."""
    if weights := [name for name in differing if name in parameters]:
        return f"The ranks have different weights: {first_of(weights)}."
    call = "world.share_buffers(model) gives all ranks rank 0's; call it before"
    return f"The ranks have the same weights and different buffers: {first_of(differing)}. {call}."
