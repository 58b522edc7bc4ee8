"""What became of a run: `cluster-ddp report`.

summary         the report as a value
training_stats  where the time of the steps went, the starts of the training, figures that a command prints
lost_gpu_hours  GPU hours over all starts, and what was lost of them
cost            these and the energy, of a run and of the runs of a folder, as a value and in words
usage           how the nodes were used
report_text     the report on a terminal, and notes: what could be better, each with the option to change
page            the report as an HTML page with charts: html/ has its template, script and style, and uPlot
time_series     the figures of a run over time, read and thinned out for the page
array_tasks     the tasks of an array, the best first: a table, a picture, the best one in a line
"""
