"""Where the time of a step goes.

step_times  the parts of the steps, about every ten seconds, into metrics.jsonl
step_trace  a trace of some steps, by torch.profiler
"""
