"""How fast a training is on more GPUs, measured: which number of GPUs to ask for.

points        what a study is to measure, and what a finished run has measured
study         submits what is not measured yet, and follows it
speedups      medians, speedup and efficiency of the configurations; CSV; the recommendation
output        all of it in words, as files, and as a picture
"""
