"""The device of a rank, and what GPUs need. Nothing here touches CUDA for a rank on the CPU.

device              chooses a rank's device and number of threads
binding             the GPUs that a rank may see, and the CPUs it runs on
interruptible_wait  waiting for a GPU while signals and failed ranks are heard; which streams are waited for

docs/explanation/gpu-paths.md says what was seen on GPUs; docstrings in tests/gpu, what torch and NCCL do, with sources.
"""
