"""What runs inside every rank. Needs torch.

world        what a training asks of the ranks' process group; `distributed` joins and leaves it
rendezvous   how they meet
device       which device a rank drives
data         each rank's samples
checkpoint   saving, resuming, stopping in time
run_dir      what a run writes beside checkpoints
failure      how the ranks end when one of them fails
fork         the launcher that imports torch once for all ranks of a node

The other modules are one concern each, by their names.
"""
