"""The schemas of the operators, and how the dispatcher's flat arguments become ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

library = torch.library.Library("tconv", "DEF")
_GEOMETRY = (
    "SymInt[2] stride, SymInt[2] padding, SymInt[2] output_padding, SymInt[2] dilation, "
    "SymInt groups"
)
for _schema in (
    f"forward(Tensor input, Tensor weight, Tensor? bias, {_GEOMETRY}) -> Tensor",
    f"input_gradient(Tensor grad_output, Tensor weight, SymInt[2] input_size, {_GEOMETRY})"
    " -> Tensor",
    f"weight_gradient(Tensor input, Tensor grad_output, SymInt[2] kernel_size, {_GEOMETRY},"
    " bool channels_last) -> Tensor",
):
    library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))

forward = torch.ops.tconv.forward.default
input_gradient = torch.ops.tconv.input_gradient.default
weight_gradient = torch.ops.tconv.weight_gradient.default

Map = Callable[..., Tensor]
"""One of the three maps: of three arguments, a `Geometry`, and for weight_gradient a format."""


def pack(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """A map's arguments from an operator's: five of them become a `Geometry`, lists tuples."""
    first, second, third, stride, padding, output_padding, dilation, groups, *rest = arguments
    if isinstance(third, list):
        third = tuple(third)
    pairs = tuple(stride), tuple(padding), tuple(output_padding), tuple(dilation)
    return first, second, third, (*pairs, groups), *rest


def flat(function: Map) -> Map:
    """A map, called as the dispatcher calls an operator."""

    def kernel(*arguments: Any) -> Tensor:
        return function(*pack(arguments))

    return kernel
