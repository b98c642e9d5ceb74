"""Registers what the dispatcher runs for each operator, and what PyTorch's FLOP counter counts."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from tconv import aten, private
from tconv.ops import autocast, autograd, compute, decomposition, fake, schema, vmap


def _multiply_adds(image: Sequence[int], weight: Sequence[int]) -> int:
    """FLOPs of all three: each pixel of the input meets each tap in a product and a sum."""
    batch, _, height, width = image
    return 2 * batch * height * width * math.prod(weight)


def _forward_flops(
    input: Sequence[int], weight: Sequence[int], *_: Any, out_shape: Any = None
) -> int:
    return _multiply_adds(input, weight)


def _input_gradient_flops(
    _grad_output: Sequence[int], weight: Sequence[int], *_: Any, out_shape: Sequence[int]
) -> int:
    return _multiply_adds(out_shape, weight)


def _weight_gradient_flops(input: Sequence[int], *_: Any, out_shape: Sequence[int]) -> int:
    return _multiply_adds(input, out_shape)


def register() -> None:
    """Give the operators all that they need; once in a process."""
    if not private.has_nodes_below_transforms:
        logging.getLogger("tconv").warning(
            "torch %s lacks what tconv's own derivatives need: under torch.compile, torch.func, "
            "modes and forward-mode differentiation PyTorch's operators run",
            torch.__version__,
        )
    for operator, implementation, fake_map, node, pytorchs, vmap_rule, flops in (
        (
            schema.forward,
            compute.forward_of_any_size,
            fake.forward,
            autograd.TconvForward,
            aten.forward,
            vmap.forward,
            _forward_flops,
        ),
        (
            schema.input_gradient,
            compute.input_gradient,
            fake.input_gradient,
            autograd.TconvInputGradient,
            aten.input_gradient,
            vmap.input_gradient,
            _input_gradient_flops,
        ),
        (
            schema.weight_gradient,
            compute.weight_gradient,
            fake.weight_gradient,
            autograd.TconvWeightGradient,
            aten.weight_gradient,
            vmap.weight_gradient,
            _weight_gradient_flops,
        ),
    ):
        name = operator.name()
        unqualified = name.removeprefix("tconv::")
        library = schema.library
        library.impl(unqualified, schema.flat(implementation), "CompositeExplicitAutograd")
        if private.has_nodes_below_transforms:
            differentiable = autograd.dispatched(node, operator)
        else:
            differentiable = schema.flat(pytorchs)
        differentiable = decomposition.while_exporting_onnx(differentiable, operator)
        library.impl(unqualified, differentiable, "Autograd")
        torch.library.register_fake(name, schema.flat(fake_map), lib=library)
        torch.library.register_vmap(name, vmap_rule, lib=library)
        register_flop_formula(operator.overloadpacket)(flops)
    for device in ("cpu", "cuda"):
        schema.library.impl("forward", autocast.dispatched(device), f"Autocast{device.upper()}")
