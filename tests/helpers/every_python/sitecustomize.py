"""What each Python that a test starts does first: collect garbage seldom.

Importing torch makes a million objects that stay; looking through them again and again is a quarter of the CPU time of
a process that imports torch, takes a few steps and ends, and the tests start hundreds of those.
"""

import atexit
import gc

gc.set_threshold(1_000_000)
atexit.register(gc.disable)  # no last collection
