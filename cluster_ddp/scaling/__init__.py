"""How fast a training is on more GPUs, measured: which number of GPUs to ask for.

measure       the runs of a study, and what each tells
study_folder  its folder: submits and follows what is not measured yet
speedups      medians, speedup and efficiency of the configurations; CSV; the recommendation
fit           Amdahl's law and a model of communication, with predictions
output        all of it in words, as files, and as a picture
"""
