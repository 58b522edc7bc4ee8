"""A model under DDP or FSDP, its weights, and what makes its steps faster.

ddp              DistributedDataParallel, with defaults for training that resumes exactly; one update of several batches
world_models     what a World does with models
fsdp             FSDP2, sharded over a mesh of ranks
model_wrapping   how a model is wrapped: DDP, FSDP or HSDP; the layers that it repeats
dtensor_pieces   tensors that are sharded over the ranks, and their pieces
empty_init       a model that rank 0 alone has the values of, until it is wrapped
grad_scaler      torch's GradScaler, which also says when scaled gradients are clipped
memory_estimate  what weights, gradients and optimizer state take in a GPU, from a model's shapes
"""
