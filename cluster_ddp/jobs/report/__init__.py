"""What became of a run: `cluster-ddp report`.

summary           the report as a value
step_breakdown    where the time of the steps went, and the starts of the training
usage             how the nodes were used
metrics_from_log  figures that a command prints
notes             what could be better, each with the option to change
terminal_report   the report on a terminal
page              the report as an HTML page: html/ has its template, script and style, and uPlot
series            the figures of a run over time, for the page
charts            which curves lie over each other
array_ranking     the tasks of an array, sorted by their result
"""
