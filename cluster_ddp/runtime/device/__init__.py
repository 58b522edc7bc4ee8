"""Which device a rank drives, and what GPUs need. None of it touches CUDA where a rank computes on the CPU.

device            this rank's device, and its threads
visible_gpus      which GPUs a rank's process may see
cpu_affinity      the CPUs that are near its GPU
nonblocking_wait  waiting for a GPU without blocking in it
streams           the CUDA streams that a rank works on

docs/explanation/gpu-paths.md tells what torch and NCCL do in each of them, and where that is written.
"""
