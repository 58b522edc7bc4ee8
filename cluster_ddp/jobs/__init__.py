"""What became of submitted jobs. Reads run directories and asks Slurm; no torch.

job      one job, to wait for, to cancel, to ask for its result
status   how far jobs are
watch    following a job to its end
"""
