"""What a rank is fed with.

shard      its samples of every batch
resident   sets that fit into the device's memory: batches are gathered there
loader     sets that don't: a DataLoader
"""
