"""Tier 1: what each node and each rank checks alone. Nothing here waits for another rank or imports torch.

task_allocation   whether a task got what was asked for: its place, GPUs, CPUs, Python
folders           whether the folders of a job are there, writable and not full
resource_limits   open files, address space, locked memory, ports, memory
network_setup     names, addresses and interfaces of the nodes
gpu_health        whether the GPUs of a node are there and well
check_types       a check, and what it may look at
all_checks        their order, and how they are run in processes that can be killed; what rank 0 checks for all
"""
