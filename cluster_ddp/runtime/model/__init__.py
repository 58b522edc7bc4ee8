"""A model under DDP or FSDP, its weights, and what makes its steps faster.

ddp            DistributedDataParallel, with defaults for training that resumes exactly; one update of several batches
wrapping       what a World does with models
fsdp           FSDP2, sharded over a mesh of ranks
blocks         the layers that a model repeats, and activation checkpointing
strategies     how a model is wrapped: DDP, FSDP or HSDP
sharded_tensor  tensors that are sharded over the ranks, and this rank's part
empty_init/    a model's constructor without memory for its tensors
fast_cpu       layers and memory for faster training on CPUs
cuda_graphs    parts of a step as CUDA graphs
learning_rate  scaling with the number of ranks, and warm-up
load_weights   loads them from a checkpoint, without a training
memory_estimate  what weights, gradients and optimizer state take in a GPU, from a model's shapes
"""
