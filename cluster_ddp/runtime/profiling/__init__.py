"""Where the time of a step goes, and what the job does with its nodes.

step_times      the parts of the steps, about every ten seconds, into metrics.jsonl
node_usage      samples CPUs, memory, GPUs and network of a node once a second, into usage-<node>.jsonl
cpu_and_memory  CPU time and memory of the job on this node
nvml            NVIDIA's GPUs
"""
