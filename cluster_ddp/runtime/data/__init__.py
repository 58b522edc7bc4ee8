"""The training data of a rank.

training_data   what all kinds of it have in common
shard           its samples of every batch
device_dataset  datasets that fit into the device's memory: batches are gathered there
data_loader     other datasets: a DataLoader, and its batches' way to a GPU
loader_workers  a DataLoader's worker processes: stop signals, their end, a fork
"""
