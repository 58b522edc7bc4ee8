"""What a job does with its machines, sampled once a second on each node: CPUs, memory, GPUs, network.

sampler         the thread of local rank 0 that writes usage-<node>.jsonl
cpu_and_memory  CPU time and memory of the job on this node
nvml            NVIDIA's GPUs
"""
