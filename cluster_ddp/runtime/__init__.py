"""What runs inside every rank. Needs torch.

world        a training's view of all ranks: collectives, DDP, data; `distributed` joins and leaves it
rendezvous   how the ranks find each other
device       the device of a rank
data         the samples of a rank
model        a model under DDP
checkpoint   saving, resuming, stopping in time
run_dir      the files of a run except its checkpoints
failure      how the ranks end when one of them fails
fork         the launcher that imports torch once for all ranks of a node

The other modules have one purpose each, told by the name.
"""
