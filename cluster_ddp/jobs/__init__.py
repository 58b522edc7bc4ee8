"""What became of jobs. Reads run directories and asks Slurm; no torch.

run_records   the runs of a folder, submitted or not
figures       the last figures of a training
status        state and progress of runs
job           one submitted job: wait for it, cancel it, get its result
logs          what a job has printed
watch         follow a job to its end
terminal      what their verbs share: an option, colours, the end of a pipe
"""
