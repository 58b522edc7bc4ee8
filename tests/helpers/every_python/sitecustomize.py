"""What each Python that a test starts does first, for less CPU time: collect little garbage, link lazily, no tracer.

Importing torch makes a million objects that stay; looking through them again and again is a quarter of the CPU time of
a process that imports torch, takes a few steps and ends, and the tests start hundreds of those. Looking up all
functions of torch's libraries before any is called (RTLD_NOW, which Python asks for) is an eighth of it.
"""

import gc
import os
import sys

import without_dynamo

gc.set_threshold(1_000_000)
sys.setdlopenflags(os.RTLD_LAZY)
without_dynamo.use(gc.freeze)  # also the last collection, at the end of Python, leaves torch's objects out
