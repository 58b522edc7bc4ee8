"""What a run writes into its run directory, except checkpoints.

run_dir            the directory, and run.json
metrics            metrics.jsonl, one record per line
tracker_thread     the thread that mirrors metrics.jsonl in trackers (`submit --track`)
trackers           what a tracker does, and the three: TensorBoard, Weights & Biases, MLflow
start_log          starts.jsonl: when the training started, and why the start before ended
fenced_writes      one run at a time: a lock, and no write after a newer start of the job has taken the directory
background_writer  writes in a thread during the training; waits for the last writes at its end
"""
