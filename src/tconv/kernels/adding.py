"""The launch that adds the partial results of a weight's gradient, but of the general kernels'
float32 and float64.

PyTorch's `sum` and `to` would be two, and read and write the sums once more.
"""

from __future__ import annotations

import math

from tconv.kernels import family
from tconv.kernels.launch import Address, Argument, Launch, fields, strides
from tconv.kernels.source import KernelSource
from tconv.problem import ITEM_BYTES, Problem

STEM = "add_splits"
THREADS = 256
PARTS = 4
MOST_OUTS = 64
MOST_TAPS = 32


def addition(problem: Problem, kernel: Launch) -> Launch | None:
    """The launch behind a kernel that writes partial results; None where PyTorch adds them.

    Args:
        problem: the call's.
        kernel: the kernel's launch.
    """
    if not kernel.splits or not (ITEM_BYTES[problem.dtype] == 2 or kernel.taps_first):
        return None
    channels = problem.out_channels_per_group
    outs, taps = min(MOST_OUTS, channels), min(MOST_TAPS, problem.taps)
    index = family.index_type(problem, kernel.splits * math.prod(problem.w_shape))
    arguments: dict[str, Argument] = {
        "partial": Address("partial"),
        "gradient": Address("w"),
        "splits": kernel.splits,
        **strides("gradient", "in out h w", "w"),
    }
    source = KernelSource(
        stem=STEM,
        constants=(
            ("Index", index),
            ("Element", family.ELEMENT_TYPES[problem.dtype]),
            ("in_channels", problem.in_channels),
            ("out_channels", channels),
            ("kernel_y", problem.height.kernel),
            ("kernel_x", problem.width.kernel),
            ("taps_first", kernel.taps_first),
            ("tile_outs", outs),
            ("tile_taps", taps),
            ("parts", PARTS),
        ),
        arguments=fields(arguments, index, written="gradient"),
        shared_bytes=0,
        threads=THREADS,
    )
    blocks = problem.in_channels * -(-channels // outs) * -(-problem.taps // taps)
    return Launch("addition", source, blocks, arguments)
