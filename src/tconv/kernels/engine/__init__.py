"""The engine: forward and input gradient of 16-bit tensors on Hopper's tensor cores.

A kernel is three parts: *bring* fills stages of patches, *multiply* sums over channels and taps,
*store* writes the result. `layout.py` has the geometry, `launch.py` the launches.
"""

from tconv.kernels.engine.launch import launches

__all__ = ["launches"]
