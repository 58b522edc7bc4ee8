"""A model under DDP, and its weights.

wrap           DistributedDataParallel, with defaults for training that resumes exactly
ddp_buckets    the layout in which gradients are added up
accumulation   one update of several batches
learning_rate  scaling with the number of ranks, and warm-up
weights        loads them from a checkpoint, without a training
plain          the model itself, without what wraps it
"""
