"""A cluster that is reached by ssh (--on HOST): the project's files are copied there, and the verbs run there.

host     a machine behind ssh: commands, and what it has
project  the copy of the project on it
verbs    a verb that runs there instead of here
"""
