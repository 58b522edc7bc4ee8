"""What runs inside every rank. Needs torch.

distributed         joins the world of ranks, and leaves it
world, collectives  a training's view of all ranks: DDP, data, what all do together; `Meter`
object_collectives  collectives of Python values
process_group       torch's process group
stop_signals        stopping in time
non_finite          NaN and Inf in losses, gradients and checkpoints
console             what a rank prints; an error of all ranks, once a node
rng                 the random number generators: seeds, one for each stream, and states
live_objects        the objects of some classes in this process
contents            what a value has, to be compared
process_exit        the end of a process without Python's finalization
with_world          gives a submitted function the world

rendezvous  how the ranks find each other        checkpoint  saving, resuming, stopping in time
device      the device of a rank                 run_dir     the files of a run except its checkpoints
data        the samples of a rank                failure     how the ranks end when one fails
model       a model under DDP                    fork        imports torch once for all ranks of a node
profiling   where the time of a step goes, and what the job does with its nodes
"""
