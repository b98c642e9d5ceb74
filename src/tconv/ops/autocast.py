"""Autocast of `forward`, as of aten::conv_transpose2d.

The gradients run in the dtype of the saved tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tconv import private
from tconv.ops import schema


def dtype_for(tensor: Tensor) -> torch.dtype | None:
    """The dtype that autocast computes a call on this tensor in; None where it is off."""
    if not private.is_any_autocast_enabled():
        return None
    device = "cuda" if tensor.is_cuda else tensor.device.type  # which makes its name each time
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def cast(tensor: Any, device: str, dtype: torch.dtype) -> Any:
    """The tensor as autocast on that device passes it on; anything else as it is."""
    eligible = (
        isinstance(tensor, Tensor)
        and tensor.device.type == device
        and tensor.is_floating_point()
        and tensor.dtype != torch.float64
    )
    return tensor.to(dtype) if eligible else tensor


def dispatched(device: str) -> Callable[..., Tensor]:
    """What the dispatcher runs for the autocast key of a device."""
    without_autocast = private.without_autocast(device)

    def kernel(*arguments: Any) -> Tensor:
        dtype = torch.get_autocast_dtype(device)
        with without_autocast():
            return schema.forward(*(cast(argument, device, dtype) for argument in arguments))

    return kernel
