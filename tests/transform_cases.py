"""torch.func's transforms and forward-mode AD of a layer, and the tensors that they leave behind.

Shared by the emulator's tests and the device's. PyTorch computes with a tensor of a finished level
and with zeros that are only noted (ZeroTensors), though neither has memory for a kernel to read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

import tconv

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]
Operands = tuple[Tensor, Tensor, Tensor]


def operands(device: str) -> Operands:
    """Input, weight and bias of the layer, in float64."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(device)

    return normal(1, 2, 2, 2), normal(2, 1, 2, 3), normal(2)


def ours(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return tconv.conv_transpose2d(x, w, b, 2, 1, 1, 2)


def pytorchs(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return F.conv_transpose2d(x, w, b, 2, 1, 1, 2)


def leaked(level: Callable[..., Any], *tensors: Tensor) -> list[Tensor]:
    """The tensors as a level wraps them, and a product of theirs, once it has ended."""
    found: list[Tensor] = []

    def note(*wrapped: Tensor) -> Tensor:
        found.extend(wrapped)
        found.extend(1 * tensor for tensor in wrapped)
        return sum((tensor.sum() for tensor in wrapped), torch.zeros(()))

    level(note)(*tensors)
    return found


def _vjp_after(layer: Layer, x: Tensor, w: Tensor, b: Tensor) -> Any:
    output, pull = vjp(layer, x, w, b)
    return output, pull(output.sin()), vmap(pull)(torch.stack([output, output.cos()]))


def _vjp_of_vjp(layer: Layer, x: Tensor, w: Tensor, b: Tensor) -> Any:
    def gradient(x: Tensor, w: Tensor) -> Tensor:
        output, pull = vjp(lambda x: layer(x, w, b), x)
        return pull(output.sin())[0]

    inner, pull = vjp(gradient, x, w)
    return inner, pull(inner.cos())


def _jvp_of_some(layer: Layer, x: Tensor, w: Tensor, b: Tensor) -> Any:
    return (
        jvp(lambda x: layer(x, w, b), (x,), (x.sin(),)),
        jvp(lambda w, b: layer(x, w, b), (w, b), (w.sin(), b.cos())),
        jvp(lambda x: jvp(lambda w: layer(x, w, b), (w,), (w.sin(),))[1], (x,), (x.cos(),)),
    )


def _jvp_of_vjp(layer: Layer, x: Tensor, w: Tensor, b: Tensor) -> Any:
    def gradient(x: Tensor) -> Tensor:
        output, pull = vjp(lambda w: layer(x, w, b), w)
        return pull(output.pow(2))[0]

    return jvp(gradient, (x,), (x.cos(),))


def _leaked_of_grad(layer: Layer, x: Tensor, w: Tensor, b: Tensor) -> Any:
    found = leaked(lambda f: grad(f, (0, 1, 2)), x, w, b)
    return layer(*found[:3]), layer(*found[3:]), layer(x, found[1], b), layer(x, w, found[5])  # type: ignore[call-arg]


def _gradients_of_leaked(layer: Layer, x: Tensor, w: Tensor, b: Tensor) -> Any:
    leaf = x.clone().requires_grad_()
    (wrapped, _) = leaked(grad, w)
    output = layer(leaf, wrapped, b)
    return output.detach(), torch.autograd.grad(output.sin().sum(), leaf)


def _leaked_of_nested_levels(layer: Layer, x: Tensor, w: Tensor, b: Tensor) -> Any:
    found: list[Tensor] = []
    leaked(lambda f: grad(lambda t: (found.extend(leaked(grad, t)), f(t))[1]), x)
    return [layer(tensor, w, b) for tensor in found]


def _leaked_inside_another_level(layer: Layer, x: Tensor, w: Tensor, b: Tensor) -> Any:
    found = leaked(grad, x)
    return grad(lambda w: sum(layer(t, w, b).sin().sum() for t in found))(w)


def _leaked_of_jvp(layer: Layer, x: Tensor, w: Tensor, b: Tensor) -> Any:
    found = leaked(lambda f: lambda t: jvp(f, (t,), (t.sin(),)), x)
    return [layer(tensor, w, b) for tensor in found]


def _leaked_of_functionalize(layer: Layer, x: Tensor, w: Tensor, b: Tensor) -> Any:
    found = leaked(torch.func.functionalize, x)
    return [layer(tensor, w, b).sum() for tensor in found]


def _zero(like: Tensor) -> Tensor:
    zeros = torch._efficientzerotensor(like.shape, dtype=like.dtype, device=like.device)
    assert zeros._is_zerotensor()
    return zeros


def _zero_operands(layer: Layer, x: Tensor, w: Tensor, b: Tensor) -> Any:
    return layer(_zero(x), w, b), layer(x, _zero(w), b), layer(x, w, _zero(b))


def _gradients_by_zero(layer: Layer, x: Tensor, w: Tensor, b: Tensor) -> Any:
    leaves = [tensor.clone().requires_grad_() for tensor in (x, w, b)]
    output = layer(*leaves)  # type: ignore[call-arg]
    first = torch.autograd.grad(output, leaves[:2], _zero(output), retain_graph=True)
    return first, torch.autograd.grad(layer(_zero(x), *leaves[1:]).sum(), leaves[1:])


def _dual_level(layer: Layer, x: Tensor, w: Tensor, b: Tensor) -> Any:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x.sin())
        some = layer(dual, w, b)
        zero = layer(x, forward_ad.make_dual(w, _zero(w)), b)
        both = layer(dual, forward_ad.make_dual(w, _zero(w)), forward_ad.make_dual(b, b.cos()))
        return [forward_ad.unpack_dual(output)[:] for output in (some, zero, both)]


def _per_sample(layer: Layer, x: Tensor, w: Tensor, b: Tensor) -> Any:
    images = torch.stack([x, 2 * x, x.sin()])
    weights = torch.stack([w, w.cos(), 3 * w])

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return layer(x, w, b).pow(3).sum()

    return (
        vmap(grad(loss), (None, 0))(w, images),
        vmap(lambda w: vmap(lambda x: layer(x, w, b))(images))(weights),
        vmap(lambda w: jvp(lambda x: layer(x, w, b), (x,), (x.sin(),)))(weights),
        grad(lambda w: vmap(lambda x: layer(x, w, b))(images).pow(2).sum())(w),
        jacrev(lambda w: vmap(lambda x: layer(x, w, b).sin().sum())(images))(w),
    )


def _scalar(layer: Layer, x: Tensor, b: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda w: layer(x, w, b).pow(3).sum()


CASES: dict[str, Callable[[Layer, Tensor, Tensor, Tensor], Any]] = {
    "vjp, called when its level has ended": _vjp_after,
    "vjp of vjp": _vjp_of_vjp,
    "jvp, and jvp of jvp": _jvp_of_some,
    "jvp of vjp": _jvp_of_vjp,
    "linearize": lambda f, x, w, b: linearize(lambda x: f(x, w, b), x)[1](x.sin()),
    "jacrev": lambda f, x, w, b: jacrev(f, (0, 1, 2))(x, w, b),
    "jacfwd": lambda f, x, w, b: jacfwd(f, (0, 1, 2))(x, w, b),
    "jacrev of jacrev": lambda f, x, w, b: jacrev(jacrev(_scalar(f, x, b)))(w),
    "jacfwd of jacfwd": lambda f, x, w, b: jacfwd(jacfwd(_scalar(f, x, b)))(w),
    "jacrev of jacfwd": lambda f, x, w, b: jacrev(jacfwd(_scalar(f, x, b)))(w),
    "hessian": lambda f, x, w, b: hessian(_scalar(f, x, b))(w),
    "vmap with the rest": _per_sample,
    "leaked by grad": _leaked_of_grad,
    "gradients by what grad leaked": _gradients_of_leaked,
    "leaked by nested levels": _leaked_of_nested_levels,
    "leaked, and used inside another level": _leaked_inside_another_level,
    "leaked by jvp": _leaked_of_jvp,
    "leaked by functionalize": _leaked_of_functionalize,
    "operands that are ZeroTensors": _zero_operands,
    "gradients by ZeroTensors": _gradients_by_zero,
    "a dual level": _dual_level,
}


def assert_case_is_pytorchs(name: str, device: str) -> None:
    """Compares a case on our kernels with the same on PyTorch's operators."""
    case, tensors = CASES[name], operands(device)
    torch.testing.assert_close(case(ours, *tensors), case(pytorchs, *tensors))
