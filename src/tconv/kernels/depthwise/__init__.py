"""Layers whose groups have one input channel each, in all three directions: memory-bound.

The three families differ in their `.cu` alone. `strips.cuh` is what those share; `layout.py` says
which channels and pixels a thread has, and what cannot be served.
"""

from tconv.kernels.depthwise.launch import launches
