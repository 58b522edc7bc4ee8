"""What only GPUs need. None of it touches CUDA where a rank computes on the CPU.

visible    which GPUs a rank's process may see
affinity   the CPUs that are near its GPU
wait       waiting for a GPU without blocking in it
graphs     steps as CUDA graphs, and their end

docs/explanation/gpu-paths.md tells what torch and NCCL do in each of them, and where that is written.
"""
