"""conv_transpose1d and ConvTranspose1d: PyTorch's, on our operators with a height of 1."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import tconv

CALLS = {
    "plain": {},
    "stride": {"stride": 3, "padding": 1},
    "tuples": {"stride": (2,), "padding": (1,), "output_padding": (1,), "dilation": (2,)},
    "groups": {"groups": 2, "stride": 2},
}


def operands(groups=1, requires_grad=False, **_):
    x = torch.randn(2, 4, 7, requires_grad=requires_grad)
    w = torch.randn(4, 6 // groups, 3, requires_grad=requires_grad)
    return x, w, torch.randn(6, requires_grad=requires_grad)


@pytest.fixture(params=["pytorch", "ours"])
def where(request, monkeypatch):
    """On PyTorch's operators, and on our kernels in the emulator."""
    if request.param == "ours":
        monkeypatch.setenv("TCONV_EMULATE", "1")
    return request.param


@pytest.mark.parametrize("name", CALLS)
def test_output_and_gradients(where, name):
    call = CALLS[name]
    found = []
    for function in (tconv.conv_transpose1d, F.conv_transpose1d):
        torch.manual_seed(1)
        x, w, b = operands(requires_grad=True, **call)
        out = function(x, w, b, **call)
        grads = torch.autograd.grad(out.square().sum(), (x, w, b), create_graph=True)
        second = torch.autograd.grad(grads[0].square().sum(), (x, w))
        found.append((out, *grads, *second))
    for number, (ours, theirs) in enumerate(zip(*found, strict=True)):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        if number < 4:  # gradients of gradients have whatever strides
            assert ours.stride() == theirs.stride()


@pytest.mark.parametrize("shape", [(2, 5, 7), (2, 1, 7), (2, 5, 1), (1, 1, 1)])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "expanded"])
def test_outputs_are_contiguous_whatever_the_input_is(where, shape, layout):
    n, c, length = shape
    x = {
        "contiguous": lambda: torch.randn(shape),
        "transposed": lambda: torch.randn(n, length, c).mT,
        "sliced": lambda: torch.randn(n, c, 2 * length)[..., ::2],
        "expanded": lambda: torch.randn(n, c, 1).expand(shape),
    }[layout]()
    for w in (torch.randn(c, 4, 3), torch.randn(c, 3, 4).mT):
        out = tconv.conv_transpose1d(x, w, stride=2)
        torch.testing.assert_close(out, F.conv_transpose1d(x, w, stride=2))
        assert out.is_contiguous()


def test_unbatched_and_empty(where):
    x, w, b = operands()
    for one in (x[0], x[:0]):
        ours, theirs = (f(one, w, b) for f in (tconv.conv_transpose1d, F.conv_transpose1d))
        torch.testing.assert_close(ours, theirs)


BAD = {
    "channels": lambda x, w, b: ((x[:, :3], w, b), {}),
    "dimensions": lambda x, w, b: ((x[None], w, b), {}),
    "2-d weight": lambda x, w, b: ((x, w[..., None], b), {}),
    "two strides": lambda x, w, b: ((x, w, b), {"stride": (1, 2)}),
    "a float": lambda x, w, b: ((x, w, b, 1, 1.5), {}),
    "output_padding": lambda x, w, b: ((x, w, b), {"output_padding": 2}),
    "too small": lambda x, w, b: ((x, w, b), {"padding": 9}),
    "bias": lambda x, w, b: ((x, w, b[:2]), {}),
    "dtype": lambda x, w, b: ((x.double(), w, b), {}),
    "no weight": lambda x, w, b: ((x, None, b), {}),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_are_pytorchs(where, name):
    arguments, options = BAD[name](*operands())
    raised = []
    for function in (tconv.conv_transpose1d, F.conv_transpose1d):
        with pytest.raises((RuntimeError, TypeError)) as error:
            function(*arguments, **options)
        raised.append((type(error.value), str(error.value)))
    assert raised[0] == raised[1]


def test_the_layer_is_pytorchs_but_for_its_forward(where):
    torch.manual_seed(3)
    ours = tconv.ConvTranspose1d(4, 6, 4, stride=2, padding=1)
    torch.manual_seed(3)
    theirs = nn.ConvTranspose1d(4, 6, 4, stride=2, padding=1)
    assert repr(ours) == repr(theirs)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 4, 9)
    for one in (ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        torch.testing.assert_close(one(x), theirs(x))
        torch.testing.assert_close(one(x, output_size=[19]), theirs(x, output_size=[19]))
    for layer in (ours, theirs):
        with pytest.raises(ValueError, match="requested an output size"):
            layer(x, output_size=[30])
    scripted = torch.jit.script(ours)
    torch.testing.assert_close(scripted(x), theirs(x))


@pytest.mark.parametrize("norm", [torch.nn.utils.weight_norm, parametrizations.weight_norm])
def test_convert_and_revert(where, norm):
    model = nn.Sequential(nn.ConvTranspose1d(4, 6, 3), norm(nn.ConvTranspose1d(6, 2, 4, 2)))
    x = torch.randn(2, 4, 9)
    before = model(x)
    assert tconv.convert(model) == 2
    assert isinstance(model[0], tconv.ConvTranspose1d)
    torch.testing.assert_close(model(x), before)
    assert tconv.revert(model) == 2
    torch.testing.assert_close(model(x), before)
    assert tconv.convert(nn.ModuleList([nn.LazyConvTranspose1d(6, 3)])) == 0


def test_under_transforms_and_compile(where):
    x, w, _ = operands()
    expected = F.conv_transpose1d(x, w, stride=2)
    mapped = torch.vmap(lambda one: tconv.conv_transpose1d(one, w, stride=2))(x)
    torch.testing.assert_close(mapped, expected)
    _, pull = torch.func.vjp(lambda one: tconv.conv_transpose1d(one, w, stride=2), x)
    torch.testing.assert_close(pull(expected)[0].shape, x.shape)
    with torch.autocast("cpu", torch.bfloat16):
        assert tconv.conv_transpose1d(x, w).dtype == torch.bfloat16


@pytest.mark.thorough
def test_compiled_whole():
    x, w, _ = operands()
    compiled = torch.compile(
        lambda x, w: tconv.conv_transpose1d(x, w, stride=2), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(x, w), F.conv_transpose1d(x, w, stride=2))
