"""A model under DDP, and its weights.

ddp            DistributedDataParallel, with defaults for training that resumes exactly; one update of several batches
learning_rate  scaling with the number of ranks, and warm-up
load_weights   loads them from a checkpoint, without a training
"""
