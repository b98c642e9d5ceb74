"""The kernel families, in the order in which the plan prints them."""

from __future__ import annotations

from typing import cast

from tconv.kernels import (
    depthwise_forward,
    depthwise_input_gradient,
    depthwise_weight_gradient,
    direct_forward,
    general_forward,
    general_input_gradient,
    general_weight_gradient,
    mma_forward,
    mma_frames_forward,
    pointwise_forward,
    pointwise_mma_forward,
    sm80_forward,
    sm80_input_gradient,
    sm80_weight_gradient,
    sm90_forward,
    sm90_input_gradient,
    sm90_split_forward,
    sm90_tf32_flat_forward,
    sm90_tf32_forward,
    sm90_tf32_overlap_forward,
    sm90_tf32_wide_forward,
    sm90_weight_gradient,
)
from tconv.kernels.family import Family

FAMILIES: tuple[Family, ...] = tuple(
    cast(Family, module)
    for module in (
        sm90_tf32_forward,
        sm90_tf32_flat_forward,
        sm90_tf32_wide_forward,
        sm90_tf32_overlap_forward,
        sm90_split_forward,
        sm90_forward,
        sm90_input_gradient,
        sm90_weight_gradient,
        depthwise_forward,
        depthwise_input_gradient,
        depthwise_weight_gradient,
        mma_forward,
        mma_frames_forward,
        pointwise_mma_forward,
        pointwise_forward,
        direct_forward,
        general_forward,
        general_input_gradient,
        general_weight_gradient,
    )
)
"""Those that plans, tuning and benchmarks choose from."""

UNTRIED: tuple[Family, ...] = tuple(
    cast(Family, module) for module in (sm80_forward, sm80_input_gradient, sm80_weight_gradient)
)
"""Those that ran in the emulator alone until now: TCONV_KERNEL alone chooses one.

When a GPU has run them, they go to the others.
"""
