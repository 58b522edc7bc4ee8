"""The training data of a rank.

shard        its samples of every batch
resident     datasets that fit into the device's memory: batches are gathered there
loader       other datasets: a DataLoader
on_gpu       its batches' way to a GPU
fingerprint  tells datasets of the same size apart
workers      a DataLoader's worker processes and stop signals
"""
