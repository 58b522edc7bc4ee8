"""What runs inside every rank. Needs torch.

world        the ranks' process group: `distributed`, and what a training asks of it
rendezvous   how they meet
data         each rank's samples
checkpoint   saving, going on, stopping in time
metrics      the run folder
fork         the launcher that imports torch once for all ranks of a node

The other modules are one concern each, by their names.
"""
