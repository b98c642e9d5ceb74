"""vmap rules, from operator to operator.

A mapped weight makes its own group of channels; any other mapped dimension joins the batch.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tconv.ops import schema
from tconv.problem import Pair


def _leading(tensor: Tensor, dimension: int | None, size: int) -> Tensor:
    """The tensor with its mapped dimension first; one that is not mapped is repeated."""
    if dimension is None:
        return tensor.expand(size, *tensor.shape)
    return tensor.movedim(dimension, 0)


def _into_batch(tensor: Tensor) -> Tensor:
    """[B, N, C, H, W] -> [B*N, C, H, W]."""
    return tensor.flatten(0, 1)


def _into_channels(tensor: Tensor) -> Tensor:
    """[B, N, C, H, W] -> [N, B*C, H, W]."""
    return tensor.transpose(0, 1).flatten(1, 2)


def _from_batch(tensor: Tensor, size: int) -> Tensor:
    """[B*N, C, H, W] -> [B, N, C, H, W]."""
    return tensor.unflatten(0, (size, tensor.shape[0] // size))


def _from_channels(tensor: Tensor, size: int) -> Tensor:
    """[N, B*C, H, W] -> [B, N, C, H, W]."""
    return tensor.unflatten(1, (size, tensor.shape[1] // size)).transpose(0, 1)


def forward(
    info: Any,
    in_dims: tuple[int | None, ...],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *geometry: Any,
) -> tuple[Tensor, int]:
    """`schema.forward` of mapped arguments, whose mapped dimensions `in_dims` names."""
    size = info.batch_size
    input_dim, weight_dim, bias_dim, *_ = in_dims
    if weight_dim is not None:
        *axes, groups = geometry
        output = schema.forward(
            _into_channels(_leading(input, input_dim, size)),
            _into_batch(_leading(weight, weight_dim, size)),
            None if bias is None else _leading(bias, bias_dim, size).flatten(0, 1),
            *axes,
            groups * size,
        )
        return _from_channels(output, size), 0
    if bias is not None and bias_dim is not None:
        added = bias.movedim(bias_dim, 0)[:, None, :, None, None]
        if input_dim is None:
            return schema.forward(input, weight, None, *geometry) + added, 0
        output = schema.forward(_into_batch(input.movedim(input_dim, 0)), weight, None, *geometry)
        return _from_batch(output, size) + added, 0
    output = schema.forward(_into_batch(_leading(input, input_dim, size)), weight, bias, *geometry)
    return _from_batch(output, size), 0


def input_gradient(
    info: Any,
    in_dims: tuple[int | None, ...],
    grad_output: Tensor,
    weight: Tensor,
    input_size: Pair,
    *geometry: Any,
) -> tuple[Tensor, int]:
    """`schema.input_gradient` of mapped arguments, whose mapped dimensions `in_dims` names."""
    size = info.batch_size
    output_dim, weight_dim, *_ = in_dims
    *axes, groups = geometry
    leading = _leading(grad_output, output_dim, size)
    if weight_dim is None:
        gradient = schema.input_gradient(_into_batch(leading), weight, input_size, *geometry)
        return _from_batch(gradient, size), 0
    gradient = schema.input_gradient(
        _into_channels(leading),
        _into_batch(_leading(weight, weight_dim, size)),
        input_size,
        *axes,
        groups * size,
    )
    return _from_channels(gradient, size), 0


def weight_gradient(
    info: Any,
    in_dims: tuple[int | None, ...],
    input: Tensor,
    grad_output: Tensor,
    kernel_size: Pair,
    *rest: Any,
) -> tuple[Tensor, int]:
    """`schema.weight_gradient` of mapped arguments, whose mapped dimensions `in_dims` names."""
    size = info.batch_size
    input_dim, output_dim, *_ = in_dims
    *axes, groups, channels_last = rest
    gradient = schema.weight_gradient(
        _into_channels(_leading(input, input_dim, size)),
        _into_channels(_leading(grad_output, output_dim, size)),
        kernel_size,
        *axes,
        groups * size,
        channels_last,
    )
    return _from_batch(gradient, size), 0
