"""The three operators: derivatives of every order, fakes, transforms, and the ways in to them."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import tconv
from tconv import ops
from tconv.memory_format import is_channels_last

forward_op = torch.ops.tconv.forward.default
input_gradient_op = torch.ops.tconv.input_gradient.default
weight_gradient_op = torch.ops.tconv.weight_gradient.default

# (stride, padding, output_padding, dilation, groups)
GEOMETRIES = {
    "plain": ((1, 1), (0, 0), (0, 0), (1, 1), 1),
    "grouped": ((2, 1), (1, 0), (1, 0), (1, 2), 2),
    "empty phases": ((2, 4), (1, 2), (1, 3), (2, 2), 1),
}


def sample(geometry, dtype=torch.float64, memory_format=torch.contiguous_format, batch=2):
    """An input, weight, bias and output gradient that fit the geometry."""
    groups = geometry[-1]
    input = torch.randn(batch, 4, 3, 4, dtype=dtype).to(memory_format=memory_format)
    weight = torch.randn(4, 2, 3, 2, dtype=dtype).to(memory_format=memory_format)
    bias = torch.randn(2 * groups, dtype=dtype)
    output = forward_op(input, weight, bias, *geometry)
    grad = torch.randn(output.shape, dtype=dtype).to(memory_format=memory_format)
    return input, weight, bias, grad


def reference(geometry):
    stride, padding, output_padding, dilation, groups = geometry

    def function(input, weight, bias):
        return F.conv_transpose2d(
            input, weight, bias, stride, padding, output_padding, groups, dilation
        )

    return function


@pytest.mark.parametrize("way", ["direct", "dispatched"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_gradients_of_first_and_second_order(name, way):
    geometry = GEOMETRIES[name]
    input, weight, bias, grad = (t.requires_grad_() for t in sample(geometry))
    direct = way == "direct"
    forward = ops.forward if direct else forward_op
    input_gradient = ops.input_gradient if direct else input_gradient_op
    weight_gradient = ops.weight_gradient if direct else weight_gradient_op
    given = (geometry,) if direct else geometry
    for function, arguments in (
        (lambda x, w, b: forward(x, w, b, *given), (input, weight, bias)),
        (lambda y, w: input_gradient(y, w, input.shape[2:], *given), (grad, weight)),
        (
            lambda x, y: weight_gradient(x, y, weight.shape[2:], *given, False),
            (input, grad),
        ),
    ):
        assert torch.autograd.gradcheck(
            function, arguments, fast_mode=True, check_forward_ad=True, check_batched_grad=True
        )
        assert torch.autograd.gradgradcheck(
            function, arguments, fast_mode=True, check_fwd_over_rev=True, check_batched_grad=True
        )


def test_a_third_derivative_is_pytorchs():
    geometry = GEOMETRIES["grouped"]
    input, weight, bias, _ = sample(geometry)

    def third(function):
        leaf = weight.clone().requires_grad_()
        value = function(input, leaf, bias).pow(4).sum()
        for _ in range(3):
            (value,) = torch.autograd.grad(value.pow(2).sum(), leaf, create_graph=True)
            value = value / 1e6
        return value

    actual = third(lambda *tensors: tconv.ops.forward(*tensors, geometry))
    torch.testing.assert_close(actual, third(reference(geometry)))


@pytest.mark.parametrize("needs", list(itertools.product((False, True), repeat=3)))
def test_only_the_gradients_that_are_wanted_are_computed(needs):
    geometry = GEOMETRIES["grouped"]
    leaves = [
        tensor.requires_grad_(need)
        for tensor, need in zip(sample(geometry)[:3], needs, strict=True)
    ]

    class Names(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.append(function.name())
            return function(*args, **(kwargs or {}))

    output = ops.forward(*leaves, geometry)
    assert output.requires_grad == any(needs)
    if not any(needs):
        return
    with Names() as mode:
        output.backward(torch.ones_like(output))
    assert ("tconv::input_gradient" in mode.names) == needs[0]
    assert ("tconv::weight_gradient" in mode.names) == needs[1]
    assert ("aten::sum.dim_IntList" in mode.names) == needs[2]
    assert [leaf.grad is not None for leaf in leaves] == list(needs)


@pytest.mark.parametrize("wanted", range(3))
def test_saves_what_pytorchs_node_saves(wanted):
    """`checkpoint` may compute a call by ours, and the second time by PyTorch's."""
    geometry = GEOMETRIES["plain"]
    input, weight, bias, _ = sample(geometry)
    (input, weight, bias)[wanted].requires_grad_()
    saved = []

    def pack(tensor):
        saved.append(tensor.shape)
        return tensor

    stride, padding, output_padding, dilation, groups = geometry
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ops.forward(input, weight, bias, geometry)
        ours = list(saved)
        torch.conv_transpose2d(
            input, weight, bias, stride, padding, output_padding, groups, dilation
        )
    assert ours == saved[len(ours) :]


# Fakes

FORMATS = (torch.contiguous_format, torch.channels_last)


@pytest.mark.parametrize("ours", [False, True], ids=["pytorch", "ours"])
@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_opcheck(name, memory_format, ours, request):
    if ours:
        request.getfixturevalue("run")
    geometry = GEOMETRIES[name]
    input, weight, bias, grad = sample(geometry, torch.float32, memory_format)
    last = memory_format == torch.channels_last
    needs = (tensor.requires_grad_() for tensor in (input, weight, bias, grad))
    input, weight, bias, grad = needs
    torch.library.opcheck(forward_op, (input, weight, bias, *geometry))
    torch.library.opcheck(forward_op, (input, weight, None, *geometry))
    torch.library.opcheck(input_gradient_op, (grad, weight, (3, 4), *geometry))
    torch.library.opcheck(weight_gradient_op, (input, grad, (3, 2), *geometry, last))


SHAPES = [
    # batch, in_channels, height, width, out_channels per group, kernel
    (2, 4, 3, 5, 3, (3, 3)),
    (2, 4, 3, 5, 3, (1, 1)),
    (2, 1, 3, 5, 1, (3, 3)),
    (1, 4, 1, 1, 3, (1, 1)),
    (2, 4, 1, 1, 1, (3, 3)),
    (2, 1, 1, 7, 1, (1, 3)),
    (0, 4, 3, 5, 3, (3, 3)),
]


@pytest.mark.parametrize("ours", [False, True], ids=["pytorch", "ours"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("formats", list(itertools.product(FORMATS, repeat=3)))
@pytest.mark.parametrize("shape", SHAPES)
def test_fake_sizes_and_strides_are_the_real_ones(shape, formats, dtype, ours, request):
    if ours:
        request.getfixturevalue("run")
    batch, in_channels, height, width, out_channels, kernel = shape
    geometry = ((2, 1), (0, 0), (0, 0), (1, 1), 1)
    input = torch.randn(batch, in_channels, height, width, dtype=dtype)
    weight = torch.randn(in_channels, out_channels, *kernel, dtype=dtype)
    input = input.to(memory_format=formats[0])
    weight = weight.to(memory_format=formats[1])
    real = forward_op(input, weight, None, *geometry)
    grad = torch.randn(real.shape, dtype=dtype).to(memory_format=formats[2])
    calls = (
        (forward_op, (input, weight), (None, *geometry)),
        (input_gradient_op, (grad, weight), ((height, width), *geometry)),
        (weight_gradient_op, (input, grad), (kernel, *geometry, False)),
        (weight_gradient_op, (input, grad), (kernel, *geometry, True)),
    )
    for operator, tensors, rest in calls:
        real = operator(*tensors, *rest)
        with FakeTensorMode() as mode:
            fake = operator(*(mode.from_tensor(tensor) for tensor in tensors), *rest)
        assert (fake.shape, fake.stride()) == (real.shape, real.stride()), operator.name()
        assert (fake.dtype, fake.device) == (real.dtype, real.device)
        assert real.is_contiguous() or real.is_contiguous(memory_format=torch.channels_last)


def test_a_fake_cuda_call_needs_no_gpu_and_follows_our_formats():
    geometry = GEOMETRIES["plain"]
    with FakeTensorMode():
        for x_format, w_format in itertools.product(FORMATS, repeat=2):
            input = torch.empty(2, 4, 3, 4, device="cuda").to(memory_format=x_format)
            weight = torch.empty(4, 2, 3, 2, device="cuda").to(memory_format=w_format)
            output = tconv.conv_transpose2d(input, weight)
            expected = torch.empty(2, 2, 5, 5, device="cuda").to(
                memory_format=max(x_format, w_format, key=FORMATS.index)
            )
            assert output.device.type == "cuda"
            assert (output.shape, output.stride()) == (expected.shape, expected.stride())
            gradient = weight_gradient_op(
                input, output, (3, 2), *geometry, w_format == torch.channels_last
            )
            assert gradient.stride() == weight.stride()


def test_channels_last_is_what_pytorch_calls_so():
    sizes = [(2, 3, 4, 5), (2, 1, 4, 5), (2, 3, 1, 1), (1, 1, 1, 1), (1, 3, 1, 5), (2, 1, 1, 1)]
    answers = set()
    for size in sizes:
        for order in itertools.permutations(range(4)):
            # every dense layout of the size, and one with gaps
            for step in (1, 2):
                strides, stride = [0] * 4, step
                for axis in reversed(order):
                    strides[axis] = stride
                    stride *= size[axis]
                tensor = torch.zeros(10**4).as_strided(size, strides)
                # An operator whose output has the input's format, and sizes that tell it.
                expected = F.interpolate(tensor, size=(6, 7)).stride(1) == 1
                assert is_channels_last(tensor) == expected, (size, strides)
                answers.add(expected)
    assert answers == {False, True}
    assert not is_channels_last(torch.empty(1).expand(2, 3, 4, 5))


# Transforms


def test_grad_of_grad_and_jacobians():
    geometry = GEOMETRIES["grouped"]
    tensors = sample(geometry, batch=1)[:3]
    expected = reference(geometry)

    def actual(input, weight, bias):
        return tconv.ops.forward(input, weight, bias, geometry)

    for transform in (
        lambda f: grad(lambda *t: f(*t).pow(3).sum(), (0, 1, 2))(*tensors),
        lambda f: grad(
            lambda w: grad(lambda *t: f(*t).pow(3).sum(), 1)(tensors[0], w, tensors[2]).pow(2).sum()
        )(tensors[1]),
        lambda f: hessian(lambda w: f(tensors[0], w, tensors[2]).pow(3).sum())(tensors[1]),
        lambda f: jacfwd(f, 0)(*tensors),
        lambda f: jacrev(f, 1)(*tensors),
        lambda f: jvp(f, tensors, tuple(2 * tensor for tensor in tensors)),
        lambda f: jvp(lambda b: f(*tensors[:2], b), tensors[2:], tensors[2:]),
    ):
        torch.testing.assert_close(transform(actual), transform(expected))


@pytest.mark.parametrize("mapped", [m for m in itertools.product((0, 1), repeat=3) if any(m)])
def test_vmap(mapped):
    geometry = GEOMETRIES["grouped"]
    tensors = list(sample(geometry)[:3])
    dimensions = [None, None, None]
    for index, dimension in enumerate((2, 0, 1)):
        if mapped[index]:
            copies = [torch.randn_like(tensors[index]) for _ in range(3)]
            tensors[index] = torch.stack(copies, dimension)
            dimensions[index] = dimension

    def actual(input, weight, bias):
        return tconv.ops.forward(input, weight, bias, geometry)

    def gradients(function):
        return grad(lambda *tensors: function(*tensors).pow(3).sum(), (0, 1, 2))

    for transform in (lambda f: f, gradients, lambda f: vmap(gradients(f), (0, None, None))):
        inputs, in_dims = list(tensors), tuple(dimensions)
        if transform is not gradients and transform(actual) is not actual:
            inputs[0] = torch.stack([inputs[0], 2 * inputs[0]])
            in_dims = tuple(d if i or d is None else d + 1 for i, d in enumerate(dimensions))
        ours = vmap(transform(actual), in_dims)(*inputs)
        theirs = vmap(transform(reference(geometry)), in_dims)(*inputs)
        torch.testing.assert_close(ours, theirs)


def test_vmap_of_every_operator_over_either_argument():
    geometry = GEOMETRIES["grouped"]
    input, weight, _, grad = sample(geometry)
    for function, tensors in (
        (lambda y, w: input_gradient_op(y, w, (3, 4), *geometry), (grad, weight)),
        (lambda x, y: weight_gradient_op(x, y, (3, 2), *geometry, False), (input, grad)),
    ):
        for mapped in ((0, None), (None, 0), (0, 0)):
            stacked = [
                torch.stack([tensor, 2 * tensor, tensor + 1]) if dimension == 0 else tensor
                for tensor, dimension in zip(tensors, mapped, strict=True)
            ]
            expected = torch.stack(
                [
                    function(*(t[i] if m == 0 else t for t, m in zip(stacked, mapped, strict=True)))
                    for i in range(3)
                ]
            )
            torch.testing.assert_close(vmap(function, mapped)(*stacked), expected)


def test_per_sample_gradients_of_a_module():
    layer = tconv.ConvTranspose2d(4, 6, 3, 2, 1, 1, groups=2).double()
    images = torch.randn(5, 4, 3, 4, dtype=torch.float64)
    parameters = dict(layer.named_parameters())

    def loss(parameters, image):
        return functional_call(layer, parameters, image).pow(2).sum()

    per_sample = vmap(grad(loss), (None, 0))(parameters, images)
    for index, image in enumerate(images):
        alone = grad(loss)(parameters, image)
        for name, gradient in alone.items():
            torch.testing.assert_close(per_sample[name][index], gradient)


# The ways in


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


def test_modes_see_the_operator():
    input, weight, bias, _ = sample(GEOMETRIES["plain"])
    with Functions() as mode:
        tconv.conv_transpose2d(input, weight, bias)
    assert forward_op in mode.seen


def test_the_profiler_sees_the_operator():
    input, weight, bias, _ = sample(GEOMETRIES["plain"])
    with torch.profiler.profile() as profile:
        tconv.conv_transpose2d(input, weight.requires_grad_(), bias).sum().backward()
    names = {event.name for event in profile.events()}
    assert {"tconv::forward", "tconv::weight_gradient"} <= names
    assert "tconv::input_gradient" not in names


def test_flops_are_counted_as_pytorchs():
    # Without groups: PyTorch counts a grouped layer's gradients several times over.
    geometry = GEOMETRIES["empty phases"]
    leaves = [tensor.requires_grad_() for tensor in sample(geometry)[:3]]
    totals = []
    for function in (reference(geometry), lambda *t: ops.forward(*t, geometry)):
        with FlopCounterMode(display=False) as counter:
            function(*leaves).sum().backward()
        totals.append(counter.get_total_flops())
    assert totals[0] == totals[1] > 0


def test_batched_backward():
    geometry = GEOMETRIES["plain"]
    input, weight, bias, grad = sample(geometry)
    output = ops.forward(input.requires_grad_(), weight.requires_grad_(), bias, geometry)
    grads = torch.stack([grad, 2 * grad])
    batched = torch.autograd.grad(
        output, (input, weight), grads, is_grads_batched=True, retain_graph=True
    )
    single = torch.autograd.grad(output, (input, weight), grad)
    for many, one in zip(batched, single, strict=True):
        torch.testing.assert_close(many, torch.stack([one, 2 * one]))
