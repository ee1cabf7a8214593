"""What all tests share."""

import os

# Before anybody imports torch: on a busy machine its threads fight for the cores and stop an event loop for longer
# than the deadlines that are tested here.
os.environ.setdefault("OMP_NUM_THREADS", "1")
