"""What a job does with its machines, sampled once a second on each node: CPUs, memory, GPUs, network.

sampler    the thread of local rank 0 that writes usage-<node>.jsonl
cgroups    CPU time and memory of the job on this node, from its control group
processes  the same from /proc, where the job has no control group of its own
gpus       NVIDIA's GPUs, by NVML

step_times     where the time of a rank's steps goes
communication  how long a step waits for DDP's all-reduces
step_trace     a profile of some steps
"""
