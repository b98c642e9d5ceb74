"""Our operators by PyTorch's, for tools that know ATen alone.

NOTE: PyTorch's own tables must not have them. Inductor starts from `default_decompositions`: our
operators would be gone from every compiled graph. What the table of all decompositions holds,
inductor refuses to call as it is, if the environment has `CI` set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tconv import aten
from tconv.ops import fake, schema
from tconv.problem import Geometry, Pair

# NOTE: results keep the memory format that PyTorch gives them. To compare strides, as `tconv.aten`
# does, would guard the sizes that an export leaves open.


def _forward(input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    stride, padding, output_padding, dilation, groups = geometry
    return torch.convolution(
        input, weight, bias, stride, padding, dilation, True, output_padding, groups
    )


def _input_gradient(
    grad_output: Tensor, weight: Tensor, input_size: Pair, geometry: Geometry
) -> Tensor:
    input = fake.input_gradient(grad_output, weight, input_size, geometry)
    gradient = aten.backward(grad_output, input, weight, geometry, (True, False))[0]
    assert gradient is not None
    return gradient


def _weight_gradient(
    input: Tensor, grad_output: Tensor, kernel_size: Pair, geometry: Geometry, channels_last: bool
) -> Tensor:
    weight = fake.weight_gradient(input, grad_output, kernel_size, geometry, channels_last)
    gradient = aten.backward(grad_output, input, weight, geometry, (False, True))[1]
    assert gradient is not None
    return gradient


def decompositions() -> dict[torch._ops.OpOverload, Callable[..., Tensor]]:
    """tconv's operators by PyTorch's, as `run_decompositions` takes them.

        program = torch.export.export(model, inputs)
        program = program.run_decompositions(tconv.decompositions())

    The program then holds `aten::convolution` in our place: it loads without tconv, and runs
    PyTorch's kernels. With PyTorch's own table as well, for Core ATen:

        table = torch.export.default_decompositions()
        table.update(tconv.decompositions())
        program = program.run_decompositions(table)

    From torch 2.9 on `torch.onnx.export(..., dynamo=True)` needs none of this. An older one takes
    the decomposed program.

    Returns:
        A new table: operator -> the function that computes it by `aten::convolution` or
        `aten::convolution_backward`.
    """
    return {
        schema.forward: schema.flat(_forward),
        schema.input_gradient: schema.flat(_input_gradient),
        schema.weight_gradient: schema.flat(_weight_gradient),
    }


def while_exporting_onnx(
    implementation: Callable[..., Tensor], operator: torch._ops.OpOverload
) -> Callable[..., Tensor]:
    """An operator's implementation, but its decomposition where `torch.onnx.export` traces it.

    The exporter knows no operator of ours, and asks nobody for a decomposition.
    """
    decomposed = decompositions()[operator]

    def run(*arguments: Any) -> Tensor:
        if torch.onnx.is_in_onnx_export():
            return decomposed(*arguments)
        return implementation(*arguments)

    return run
