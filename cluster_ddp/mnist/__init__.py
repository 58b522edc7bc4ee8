"""The reference workload: the CNN of PyTorch's MNIST example, trained under DDP.

config   its options                    files  the dataset's files and their digests
model    the CNNs                       data   images and labels as tensors
recipes  optimizer, learning rate       step   what is done with a batch
loop     train and test
"""
