"""The training data of a rank.

world_data          what a script calls
batch_iterator      what a shard and a stream have in common
shard               its samples of every batch
device_dataset      datasets that fit into the device's memory: batches are gathered there
dataset_attributes  what a script sets in a dataset as it trains
first_steps         values that each step changes and a resume begins again
data_loader         other datasets: a DataLoader, its workers, and its batches' way to a GPU
stream              its batches of data without a length and an index
stream_reader       reads a stream, in a loader's worker or in the rank
stream_places       how far the readers are
uneven_inputs       how the ranks agree whether each has another batch, and compare what they read first
"""
