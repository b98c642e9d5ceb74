"""The kernel families, in the order in which the plan prints them."""

from __future__ import annotations

from typing import cast, get_args

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
from tconv.problem import Direction

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
        sm80_forward,
        sm80_input_gradient,
        sm80_weight_gradient,
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

LEFT_TO = {f"sm80_{direction}": f"sm90_{direction}" for direction in get_args(Direction)}
"""Kernels that plans, tuning and benchmarks leave out where another serves, which is ahead of them.

Hopper's engine is ahead of the kernels for sm_80; where they are named, they run there too.
"""
