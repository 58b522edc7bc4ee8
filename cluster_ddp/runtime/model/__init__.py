"""A model under DDP or FSDP, its weights, and what makes its steps faster.

ddp            DistributedDataParallel, with defaults for training that resumes exactly; one update of several batches
wrapping       what a World does with models
fsdp           FSDP2, sharded over a mesh of ranks
blocks         the layers that a model repeats, and activation checkpointing
empty_init     records a model's constructor, without memory for its tensors
recording      what is recorded of it
replay         makes the tensors, each rank its shards
fast_cpu       layers and memory for faster training on CPUs
cuda_graphs    parts of a step as CUDA graphs
learning_rate  scaling with the number of ranks, and warm-up
load_weights   loads them from a checkpoint, without a training
memory_estimate  what weights, gradients and optimizer state take in a GPU, from a model's shapes
"""
