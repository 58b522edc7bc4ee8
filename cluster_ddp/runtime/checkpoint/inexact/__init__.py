"""What keeps a resume from being exact, and is said at a save: no checkpoint can have it.

rank_differences  parts that differ between ranks: a checkpoint has rank 0's
unsaved           the state of a communication hook; gradients that no optimizer has used
"""
