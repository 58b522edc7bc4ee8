"""What became of jobs. Reads run directories and asks Slurm; no torch.

run_record  what is known of a run directory, of a submission or not
find_runs   the runs of a folder, and which of them a job id or a path means
run_state   how far a training is, how it ended and what failed, by the files of its run directory
status      state and progress of runs
logs        what a job has printed
watch       follow a job to its end
report/     what became of a run: `cluster-ddp report`
"""
