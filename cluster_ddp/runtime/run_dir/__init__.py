"""What a run writes into its run directory, except checkpoints.

run_dir            the directory, and run.json
metrics            metrics.jsonl, one record per line
lock               one run at a time
background_writer  writes in a thread during the training
final_flush        waits for the last writes when a training ends
"""
