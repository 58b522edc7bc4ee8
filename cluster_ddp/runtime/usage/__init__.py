"""What a job does with its machines, sampled once a second on each node: CPUs, memory, GPUs, network.

sampler         the thread of local rank 0 that writes usage-<node>.jsonl
cpu_and_memory  CPU time and memory of the job on this node
nvml            NVIDIA's GPUs

step_times  where the time of a rank's steps goes
step_trace  a profile of some steps
"""
