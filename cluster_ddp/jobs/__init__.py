"""What became of submitted jobs. Reads run directories and asks Slurm; no torch.

job      one job: wait for it, cancel it, get its result
status   state and progress of jobs
watch    follow a job to its end
"""
