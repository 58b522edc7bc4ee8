"""An array whose tasks share jobs (`submit --pack`).

rules  what its fields say of each other
jobs   what Slurm is asked for, what the agents of the jobs get, and what would fit
"""
