"""How fast a training is on more GPUs, measured: which number of GPUs to ask for.

points        the configurations of a study
study_folder  its folder: submits and follows what is not measured yet
measure       what one run tells
table         medians, speedup and efficiency of the configurations; CSV; the recommendation
fit           Amdahl's law and a model of communication, with predictions
results       all of it in words, and as files
plot          speedup over GPUs, as PNG and SVG
"""
