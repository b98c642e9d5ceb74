"""tconv.conv_transpose2d on a CPU: values, gradients, strides and errors are PyTorch's."""

from __future__ import annotations

import itertools
import warnings

import numpy
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tconv

FORMATS = ("contiguous", "channels_last", "sliced", "expanded")


def lay_out(tensor: Tensor, layout: str) -> Tensor:
    if layout == "channels_last":
        return tensor.to(memory_format=torch.channels_last)
    if layout == "sliced":
        wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
        wide[..., ::2] = tensor
        return wide[..., ::2]
    if layout == "expanded":
        return tensor[:1].expand_as(tensor)
    return tensor


@st.composite
def calls(draw):
    def pair(least, most):
        return draw(st.tuples(st.integers(least, most), st.integers(least, most)))

    groups = draw(st.integers(1, 3))
    stride, dilation, kernel = pair(1, 3), pair(1, 3), pair(1, 4)
    image, padding = pair(1, 5), pair(0, 3)
    output_padding = tuple(
        draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)
    )
    for axis in (0, 1):
        size = (image[axis] - 1) * stride[axis] - 2 * padding[axis]
        if size + dilation[axis] * (kernel[axis] - 1) + output_padding[axis] + 1 < 1:
            padding = (0, 0)
    channels = (groups * draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    return {
        "input": (draw(st.integers(1, 3)), channels[0], *image),
        "weight": (channels[0], channels[1], *kernel),
        "bias": draw(st.booleans()),
        "layouts": (draw(st.sampled_from(FORMATS)), draw(st.sampled_from(FORMATS[:3]))),
        "needs": draw(st.tuples(st.booleans(), st.booleans(), st.booleans())),
        "batched": draw(st.booleans()),
        "geometry": (stride, padding, output_padding, groups, dilation),
        "dtype": draw(st.sampled_from((torch.float32, torch.float64))),
        "grad": draw(st.sampled_from(FORMATS)),
    }


@settings(max_examples=150, deadline=None, derandomize=True)
@given(calls())
def test_output_and_gradients_are_pytorchs(call):
    torch.manual_seed(1)
    dtype = call["dtype"]
    input = lay_out(torch.randn(call["input"], dtype=dtype), call["layouts"][0])
    if not call["batched"]:
        input = input[0]
    weight = lay_out(torch.randn(call["weight"], dtype=dtype), call["layouts"][1])
    out_channels = call["weight"][1] * call["geometry"][3]
    bias = torch.randn(out_channels, dtype=dtype) if call["bias"] else None

    def attempt(function):
        leaves = [
            None if tensor is None else tensor.detach().requires_grad_(needs)
            for tensor, needs in zip((input, weight, bias), call["needs"], strict=True)
        ]
        output = function(*leaves, *call["geometry"])
        wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        gradients = ()
        if wanted:
            torch.manual_seed(2)
            grad = torch.randn(output.shape, dtype=dtype)
            if output.dim() == 4:
                grad = lay_out(grad, call["grad"])
            gradients = torch.autograd.grad(output, wanted, grad)
        return output, gradients

    actual, actual_gradients = attempt(tconv.conv_transpose2d)
    expected, expected_gradients = attempt(F.conv_transpose2d)
    assert torch.equal(actual, expected)
    assert actual.stride() == expected.stride()
    assert actual.requires_grad == expected.requires_grad
    for ours, theirs in zip(actual_gradients, expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_arguments_may_take_any_form_that_pytorch_reads():
    input, weight = torch.randn(2, 4, 5, 6), torch.randn(4, 3, 3, 3)
    for stride in (2, (2,), [2], [2, 2], numpy.int64(2), (numpy.int64(2), 2), torch.tensor(2)):
        actual = tconv.conv_transpose2d(input, weight, stride=stride)
        # torch 2.9 reads no tensor here, 2.13 does.
        stride = int(stride) if isinstance(stride, Tensor) else stride
        assert torch.equal(actual, F.conv_transpose2d(input, weight, stride=stride)), stride


def sample(input=(2, 4, 5, 6), weight=(4, 3, 3, 3), bias=(3,), dtype=torch.float32):
    tensors = []
    for shape in (input, weight, bias):
        values = None if shape is None else torch.randn(shape)
        tensors.append(None if values is None else values.to(dtype))
    return tensors


def nested(*tensors):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that its interface will change
        return torch.nested.nested_tensor(list(tensors))


BAD = {
    "input of 2 dimensions": (sample(input=(5, 6)), {}),
    "input of 5 dimensions": (sample(input=(1, 2, 4, 5, 6)), {}),
    "weight of 3 dimensions": (sample(weight=(3, 3, 3)), {}),
    "weight of 5 dimensions": (sample(weight=(1, 4, 3, 3, 3)), {}),
    "channels": (sample(input=(2, 5, 5, 6)), {}),
    "channels, unbatched": (sample(input=(5, 5, 6)), {}),
    "groups do not divide": (sample(), {"groups": 3}),
    "groups do not divide, no bias": (sample(bias=None), {"groups": 3}),
    "groups of 0, no bias": (sample(bias=None), {"groups": 0}),
    "more groups than channels, no bias": (sample(bias=None), {"groups": 8}),
    "groups of 0": (sample(), {"groups": 0}),
    "negative groups": (sample(), {"groups": -1}),
    "more groups than channels": (sample(), {"groups": 8}),
    "bias of another size": (sample(bias=(4,)), {}),
    "bias of 2 dimensions": (sample(bias=(3, 1)), {}),
    "bias without dimensions": (sample(bias=()), {}),
    "output_padding of stride": (sample(), {"output_padding": 1}),
    "output_padding over both": (
        sample(),
        {"stride": 2, "dilation": 3, "output_padding": (2, 3)},
    ),
    "negative output_padding": (sample(), {"stride": 2, "output_padding": -1}),
    "negative padding": (sample(), {"padding": (0, -1)}),
    "stride of 0": (sample(), {"stride": 0}),
    "negative stride": (sample(), {"stride": (1, -1)}),
    "dilation of 0": (sample(), {"dilation": 0}),
    "negative dilation": (sample(), {"dilation": -1}),
    # In float64, which no oneDNN takes: its kernels need no stride for one pixel.
    "stride over 31 bits": (
        sample(input=(2, 4, 1, 1), dtype=torch.float64),
        {"stride": 2**31},
    ),
    "stride over 31 bits along x": (
        sample(input=(2, 4, 5, 1), dtype=torch.float64),
        {"stride": (1, 2**31)},
    ),
    "stride over 32 bits": (
        sample(input=(2, 4, 1, 1), dtype=torch.float64),
        {"stride": 2**32},
    ),
    "stride over 63 bits": (sample(input=(2, 4, 1, 1)), {"stride": 2**63}),
    "dilation over 31 bits": (
        sample(weight=(4, 3, 1, 1), dtype=torch.float64),
        {"dilation": 2**31},
    ),
    "dilation over 63 bits": (sample(weight=(4, 3, 1, 1)), {"dilation": 2**64}),
    "three strides": (sample(), {"stride": (1, 1, 1)}),
    "three paddings": (sample(), {"padding": (1, 1, 1)}),
    "three output paddings": (sample(), {"output_padding": (0, 0, 0)}),
    "three dilations": (sample(), {"dilation": (1, 1, 1)}),
    "no stride": (sample(), {"stride": ()}),
    "stride of a float": (sample(), {"stride": 1.5}),
    "stride of floats": (sample(), {"stride": (1.0, 1)}),
    "stride of a bool": (sample(), {"stride": True}),
    "stride of None": (sample(), {"stride": None}),
    "padding by name": (sample(), {"padding": "same"}),
    "weight's dtype": ([sample()[0], sample()[1].double(), sample()[2]], {}),
    "bias's dtype": ([*sample()[:2], sample()[2].double()], {}),
    "input's dtype": ([sample()[0].double(), *sample()[1:]], {}),
    "half input": ([sample()[0].half(), *sample()[1:]], {}),
    "no rows": (sample(input=(2, 4, 0, 6)), {}),
    "no columns": (sample(input=(2, 4, 5, 0)), {}),
    "no rows, unbatched": (sample(input=(4, 0, 6)), {}),
    "no channels": (sample(input=(2, 0, 5, 6), weight=(0, 3, 3, 3)), {}),
    "no output channels": (sample(weight=(4, 0, 3, 3), bias=None), {}),
    "no kernel rows": (sample(weight=(4, 3, 0, 3)), {}),
    "output smaller than 0": (sample(input=(2, 4, 1, 1)), {"padding": 5}),
    "int32": (sample(dtype=torch.int32), {}),
    "bool": (sample(dtype=torch.bool), {}),
    "uint8": (sample(dtype=torch.uint8), {}),
    "float8": (sample(dtype=torch.float8_e4m3fn, bias=None), {}),
    "no input": ([None, *sample()[1:]], {}),
    "no weight": ([sample()[0], None, None], {}),
    "input of a list": ([[1.0], *sample()[1:]], {}),
    "bias of a list": ([*sample()[:2], [1.0]], {}),
    "sparse input": ([sample()[0].to_sparse(), sample()[1], None], {}),
    "sparse weight": ([sample()[0], sample()[1].to_sparse(), None], {}),
    "sparse bias": ([*sample()[:2], sample()[2].to_sparse()], {}),
    "nested weight": ([sample()[0], nested(*sample()[1]), None], {}),
    "nested bias": ([*sample()[:2], nested(*torch.randn(3, 1))], {}),
    "meta weight": ([sample()[0], sample()[1].to("meta"), None], {}),
    "meta weight of another dtype": ([sample()[0], sample()[1].double().to("meta"), None], {}),
}


def in_order(arguments, options):
    """All eight arguments by position, as a module passes them: the text may name it."""
    defaults = {"stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}
    return [*arguments, *(defaults | options).values()]


@pytest.mark.parametrize("way", ["pytorch", "ours", "ours, after sound calls"])
@pytest.mark.parametrize("name", BAD)
def test_errors_are_pytorchs(name, way, request):
    ours = way != "pytorch"
    run = request.getfixturevalue("run") if ours else None
    call = in_order(*BAD[name])
    if way == "ours, after sound calls":
        for options in ({}, {"stride": 2, "dilation": 3}):
            for sound in (sample(), sample(bias=None)):
                tconv.conv_transpose2d(*sound, **options)
        assert len(run.remembered) == 4
        run.calls.clear()
    outcomes = []
    for function in (F.conv_transpose2d, tconv.conv_transpose2d):
        try:
            outcome = function(*call)
        except Exception as error:
            outcome = type(error), str(error)
        outcomes.append(outcome)
    expected, actual = outcomes
    if isinstance(expected, Tensor):  # PyTorch takes it, as it does a weight without data
        assert (actual.shape, actual.device) == (expected.shape, expected.device)
    else:
        assert actual == expected
    if ours:
        assert run.calls == [], "a call that is not sound reached a kernel"


def test_most_of_the_bad_calls_do_raise():
    raised = 0
    for arguments, options in BAD.values():
        try:
            tconv.conv_transpose2d(*arguments, **options)
        except (RuntimeError, TypeError, ValueError):
            raised += 1
    assert raised >= len(BAD) - 2  # PyTorch takes a weight without data


@pytest.mark.parametrize("arguments", [(torch.randn(1, 1, 2, 2),), tuple(range(9))])
def test_a_wrong_number_of_arguments_is_a_type_error(arguments):
    for function in (F.conv_transpose2d, tconv.conv_transpose2d):
        with pytest.raises(TypeError, match="argument"):
            function(*arguments)


def test_parameter_names_and_order_are_pytorchs():
    input, weight, bias = sample(weight=(4, 3, 2, 2), bias=(6,))
    positional = (input, weight, bias, 2, 1, 1, 2, 3)
    names = "input weight bias stride padding output_padding groups dilation".split()
    expected = F.conv_transpose2d(*positional)
    assert torch.equal(tconv.conv_transpose2d(*positional), expected)
    named = dict(zip(names, positional, strict=True))
    assert torch.equal(tconv.conv_transpose2d(**named), expected)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.float16, torch.bfloat16])
def test_other_dtypes_are_served_as_pytorch_serves_them(dtype):
    arguments = [(tensor * 4).to(dtype) for tensor in sample()]
    actual = tconv.conv_transpose2d(*arguments, stride=2)
    assert torch.equal(actual, F.conv_transpose2d(*arguments, stride=2))
    assert actual.dtype == dtype


def test_meta_tensors():
    arguments = [tensor.to("meta") for tensor in sample()]
    actual = tconv.conv_transpose2d(*arguments, stride=2)
    expected = F.conv_transpose2d(*arguments, stride=2)
    assert (actual.shape, actual.stride()) == (expected.shape, expected.stride())


@pytest.mark.parametrize("batch", [0, 2])
def test_an_empty_batch_goes_forward_and_back(batch):
    results = []
    for function in (F.conv_transpose2d, tconv.conv_transpose2d):
        torch.manual_seed(3)
        leaves = [tensor.requires_grad_() for tensor in sample(input=(batch, 4, 5, 6))]
        output = function(*leaves, stride=2)
        output.sum().backward()
        results.append([output, *(leaf.grad for leaf in leaves)])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)
        assert actual.stride() == expected.stride()


def test_a_conjugate_view_is_read_as_its_values():
    # .imag of a conjugate is a real tensor whose negation is still pending.
    input = torch.randn(2, 4, 5, 6, dtype=torch.complex64).conj().imag
    assert input.is_neg()
    _, weight, bias = sample()
    actual = tconv.conv_transpose2d(input, weight, bias)
    assert torch.equal(actual, F.conv_transpose2d(input.resolve_neg(), weight, bias))


def test_inference_mode_and_no_grad():
    input, weight, bias = sample()
    weight.requires_grad_()
    expected = F.conv_transpose2d(input, weight, bias).detach()
    with torch.no_grad():
        output = tconv.conv_transpose2d(input, weight, bias)
    assert torch.equal(output, expected) and not output.requires_grad
    with torch.inference_mode():
        output = tconv.conv_transpose2d(input, weight, bias)
    assert torch.equal(output, expected) and output.is_inference()


class Plain(torch.Tensor):
    pass


class Logging(torch.Tensor):
    seen: list = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_subclass_keeps_its_class():
    input, weight, bias = sample()
    output = tconv.conv_transpose2d(input.as_subclass(Plain), weight, bias)
    assert type(output) is Plain
    assert torch.equal(output.as_subclass(Tensor), F.conv_transpose2d(input, weight, bias))


def test_a_subclass_with_rules_of_its_own_sees_pytorchs_function():
    input, weight, bias = sample()
    Logging.seen.clear()
    output = tconv.conv_transpose2d(input.as_subclass(Logging), weight, bias)
    assert type(output) is Logging
    assert F.conv_transpose2d in Logging.seen


def test_default_device_mode_changes_nothing():
    input, weight, bias = sample()
    with torch.device("cpu"):
        output = tconv.conv_transpose2d(input, weight, bias)
    assert torch.equal(output, F.conv_transpose2d(input, weight, bias))


# Autocast

FLOATS = (torch.float32, torch.float64, torch.bfloat16)


@pytest.mark.parametrize("dtypes", list(itertools.product(FLOATS, repeat=3)), ids=str)
@pytest.mark.parametrize("way", ["function", "operator"])
def test_autocast_casts_what_pytorch_casts(dtypes, way):
    def attempt(function):
        torch.manual_seed(4)
        leaves = [
            tensor.to(dtype).requires_grad_()
            for tensor, dtype in zip(sample(), dtypes, strict=True)
        ]
        with torch.autocast("cpu", torch.bfloat16):
            try:
                output = function(*leaves)
            except RuntimeError as error:
                return str(error)
        output.float().sum().backward()
        return [output, *(leaf.grad for leaf in leaves)]

    def operator(input, weight, bias):
        return torch.ops.tconv.forward(input, weight, bias, (1, 1), (0, 0), (0, 0), (1, 1), 1)

    actual = attempt(tconv.conv_transpose2d if way == "function" else operator)
    expected = attempt(F.conv_transpose2d)
    if isinstance(expected, str):
        assert actual == expected
        return
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs)


def test_autocast_that_is_off_or_of_another_device_casts_nothing():
    input, weight, bias = sample()
    for context in (
        torch.autocast("cpu", torch.bfloat16, enabled=False),
        torch.autocast("cuda", torch.float16, enabled=False),
    ):
        with context:
            assert tconv.conv_transpose2d(input, weight, bias).dtype == torch.float32
