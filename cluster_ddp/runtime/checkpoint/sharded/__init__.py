"""Checkpoints of models that are sharded over the ranks (FSDP2): `step-N.pt`, and a pieces file of each rank beside it.

pieces_file   one rank's pieces file: writing and checking it, before a resume on all ranks at the same time
resharding    a part's state as it is loaded, on whatever number of ranks; the saved pieces
sharded_save  a save of all ranks: each writes its pieces file, and rank 0 the checkpoint last

`step-N.pt` is an ordinary checkpoint. In place of a sharded tensor it has one without values (torch's meta device), and
it names each pieces file, in step-N.pieces/, with its SHA-256. So a checkpoint is whole once it has its name.
"""
