"""Folding: a layer with a stride as one without, whose large side has a channel for each phase.

With q = (o + padding) // stride of y's pixel o, and r the rest, a folded image has at q the
channels (r, c) of the pixels of y; zeros where there is no pixel. If every phase has the same
distances, that is a layer of stride 1 with a kernel shorter by the stride.
"""

from __future__ import annotations

import dataclasses
import functools

from tconv.kernels import family
from tconv.kernels.source import Constant
from tconv.problem import Axis, Problem


def why_not(problem: Problem) -> str | None:
    """One sentence if the layer cannot be folded, else None.

    NOTE: a phase that lacks a tap of another would read pixels, times zero, that it must not read.
    """
    axes = (problem.height, problem.width)
    if all(axis.stride == 1 for axis in axes):
        return "there is one phase, nothing to fold"
    for axis in axes:
        if axis.stride > 1 and (axis.dilation > 1 or axis.kernel % axis.stride):
            return (
                "folds phases of the same distances: kernels of a multiple of the stride, not "
                f"{axis.kernel} with stride {axis.stride} and dilation {axis.dilation}"
            )
    return None


@functools.lru_cache(maxsize=family.TILES_REMEMBERED)
def folded(problem: Problem) -> Problem:
    """The layer of stride 1.

    NOTE: of its widths no kernel has constants, so that it needs no `like`.
    """
    axes = problem.height, problem.width
    return dataclasses.replace(
        problem,
        out_channels=problem.out_channels * axes[0].stride * axes[1].stride,
        height=_axis(axes[0]),
        width=_axis(axes[1]),
        source_aligned=problem.pattern.source_aligned,
        like=None,
    )


def _axis(axis: Axis) -> Axis:
    if axis.stride == 1:
        return axis
    padding = axis.padding // axis.stride
    bare = Axis(axis.size, axis.kernel // axis.stride, padding=0)
    more = len(axis.q_range) - (bare.output_size - 2 * padding)
    return dataclasses.replace(bare, padding=padding, output_padding=more)


def run(problem: Problem) -> int:
    """Channels of a folded pixel that follow each other in memory along a row of y.

    They are a line. A pixel has the lines of each phase in y, and of each channel if y is
    contiguous.
    """
    last = problem.y_layout == "channels_last"
    return problem.width.stride * (problem.out_channels_per_group if last else 1)


def constants(problem: Problem, folds: bool) -> tuple[tuple[str, Constant], ...]:
    """What <engine/fold.cuh> needs of the layer as it is called."""
    y, x = problem.height, problem.width
    return (
        ("fold_y", y.stride if folds else 1),
        ("fold_x", x.stride if folds else 1),
        ("cut_y", y.padding % y.stride if folds else 0),
        ("cut_x", x.padding % x.stride if folds else 0),
        ("fold_channels", problem.out_channels_per_group),
        ("fold_channels_last", problem.y_layout == "channels_last"),
    )
