"""Sizes and memory formats of 4-d tensors, and 3-d ones as such."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from tconv.problem import Pair


def is_channels_last(tensor: Tensor) -> bool:
    """Whether PyTorch takes a 4-d tensor for channels_last (`Tensor::suggest_memory_format`).

    The rule goes by strides alone, so that it also holds for a slice of a channels_last tensor,
    and settles the shapes whose strides fit both formats the way PyTorch does.
    """
    return lies_channels_last(tensor.shape, tensor.stride())


def lies_channels_last(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """As `is_channels_last`, of a tensor's sizes and strides, which may be symbolic."""
    try:
        return fits_channels_last(sizes, strides)
    except TypeError:  # symbolic sizes have no hash
        return fits_channels_last.__wrapped__(sizes, strides)


@functools.lru_cache(maxsize=4096)
def fits_channels_last(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """As `is_channels_last`, of a tensor's sizes and strides, which are numbers."""
    if strides[1] == 0:
        return False
    least = 0
    for axis in (1, 3, 2, 0):
        if sizes[axis] == 0 or strides[axis] < least:
            return False
        if axis == 0 and least == strides[1]:
            return False
        least = strides[axis]
        if sizes[axis] > 1:
            least *= sizes[axis]
    return True


def memory_format(channels_last: bool) -> torch.memory_format:
    """torch.channels_last or torch.contiguous_format."""
    return torch.channels_last if channels_last else torch.contiguous_format


def empty(like: Tensor, size: Sequence[int], channels_last: bool) -> Tensor:
    """An uninitialised dense tensor, of the dtype and on the device of `like`."""
    return torch.empty(
        size,
        dtype=like.dtype,
        device=like.device,
        memory_format=memory_format(channels_last),
    )


def with_height(tensor: Tensor) -> Tensor:
    """A view [a, b, 1, c] of [a, b, c] that nobody takes for channels_last.

    A size of 1 may have any stride. That of `unsqueeze` keeps what is contiguous so, as tensor maps
    want it. Where channels are innermost it would look like channels_last, which PyTorch's 1-d
    results are not.
    """
    if tensor.stride(1) > tensor.stride(2):
        return tensor.unsqueeze(2)
    return tensor.unsqueeze(3).transpose(2, 3)


def without_height(tensor: Tensor) -> Tensor:
    """The tensor [a, b, c] of [a, b, 1, c] on the same memory.

    It is no view, which PyTorch lets nobody change in place behind a node of autograd in Python.
    """
    (a, b, _, c), (first, second, _, last) = tensor.shape, tensor.stride()
    where = (tensor.untyped_storage(), tensor.storage_offset(), (a, b, c), (first, second, last))
    return tensor.new_empty(0).set_(*where)


def sizes_of(tensor: Tensor) -> Pair:
    """Height and width."""
    return tensor.shape[2], tensor.shape[3]
