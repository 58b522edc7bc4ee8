"""What became of a run: `cluster-ddp report`.

summary    the report as a value
training   where the time of the steps went, and the starts of the training
usage      how the nodes were used
printed    figures that a command prints
notes      what could be better, each with the option to change
text       the report on a terminal
page       the report as an HTML page: html/ has its template, script and style, and uPlot
series     the figures of a run over time, for the page
charts     which curves lie over each other
parallel   the tasks of an array, sorted by their result
"""
