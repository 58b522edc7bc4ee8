"""TensorBoard, Weights & Biases and MLflow beside metrics.jsonl: `submit --track tensorboard wandb mlflow`.

A tracker is a mirror of metrics.jsonl, which is cut back when a training resumes. So each start of a job makes the
mirror anew from the records that stay, under the same run id: no step is in it twice, however the start before ended.

backends  what a tracker does, and the three
feeder    the thread that feeds them
"""
