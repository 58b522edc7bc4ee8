"""The reference workload: the CNN of PyTorch's MNIST example, trained under DDP.

config  its options        files  the dataset's files and their digests
model   the CNN            data   images and labels as tensors
loop    train and test
"""
