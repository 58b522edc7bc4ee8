"""What a run writes into its run directory, beside checkpoints.

run_dir            the directory, and run.json
metrics            metrics.jsonl, a record a line
lock               one run at a time
background_writer  writing beside the training
final_flush        what is not on disk yet when a training ends
"""
