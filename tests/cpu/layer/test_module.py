"""tconv.ConvTranspose2d is torch.nn.ConvTranspose2d in everything but who computes it."""

from __future__ import annotations

import copy
import inspect
import io
import logging
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

import tconv
from tconv import functional

ARGUMENTS = [
    ((4, 6, 3), {}),
    ((4, 6, (3, 2), 2, (1, 0), 1, 2, False, (1, 2)), {}),
    ((4, 6, 3, 2, 1, 1, 2, True, 1, "zeros", "cpu", torch.float64), {}),
    ((4, 6), {"kernel_size": 5, "stride": (2, 3), "device": "meta"}),
]


@pytest.mark.parametrize(("positional", "named"), ARGUMENTS)
def test_construction(positional, named):
    layers, states = [], []
    for kind in (nn.ConvTranspose2d, tconv.ConvTranspose2d):
        torch.manual_seed(7)
        layers.append(kind(*positional, **named))
        states.append(torch.get_rng_state())
    expected, actual = layers
    assert torch.equal(*states)
    assert repr(actual) == repr(expected)
    assert actual.extra_repr() == expected.extra_repr()
    assert isinstance(actual, nn.ConvTranspose2d)
    assert list(actual.state_dict()) == list(expected.state_dict())
    for ours, theirs in zip(actual.parameters(), expected.parameters(), strict=True):
        assert (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)
        assert ours.is_meta or torch.equal(ours, theirs)
    if not actual.weight.is_meta:
        input = torch.randn(2, 4, 5, 6, dtype=actual.weight.dtype)
        assert torch.equal(actual(input), expected(input))


def test_signatures_are_pytorchs():
    for name in ("__init__", "forward"):
        ours = inspect.signature(getattr(tconv.ConvTranspose2d, name))
        theirs = inspect.signature(getattr(nn.ConvTranspose2d, name))
        assert list(ours.parameters) == list(theirs.parameters)


def outcome(function):
    try:
        return function()
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("name", ["stride", "dilation"])
def test_steps_over_31_bits_raise_what_pytorch_raises(name):
    outcomes = []
    for module in (nn, tconv):
        with pytest.raises(RuntimeError, match=f"{name} should be greater than zero") as raised:
            layer = module.ConvTranspose2d(2, 3, 1, **{name: 2**31}).double()
            layer(torch.randn(1, 2, 1, 1, dtype=torch.float64))
        outcomes.append(str(raised.value))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular", "no such mode"])
def test_padding_mode_is_refused_as_by_pytorch(mode):
    refusals = [
        outcome(lambda kind=kind: kind(4, 6, 3, padding_mode=mode))
        for kind in (nn.ConvTranspose2d, tconv.ConvTranspose2d)
    ]
    assert refusals[0] == refusals[1]
    assert refusals[0][0] is ValueError


def test_padding_mode_set_later_is_refused_as_by_pytorch():
    refusals = []
    for kind in (nn.ConvTranspose2d, tconv.ConvTranspose2d):
        layer = kind(4, 6, 3)
        layer.padding_mode = "circular"
        refusals.append(outcome(lambda layer=layer: layer(torch.randn(1, 4, 5, 6))))
    assert refusals[0] == refusals[1]
    assert refusals[0][0] is ValueError


SIZES = [(11, 13), (12, 14), [11, 14], (2, 6, 11, 13), torch.Size((12, 13)), (10, 13), (11, 15)]
SIZES += [(11,), (1, 2, 3), (), (6, 11, 13)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("batched", [True, False])
def test_output_size(size, batched):
    input = torch.randn(2, 4, 5, 6)
    input = input if batched else input[0]
    outcomes = []
    for kind in (nn.ConvTranspose2d, tconv.ConvTranspose2d):
        torch.manual_seed(8)
        layer = kind(4, 6, 3, 2)
        outcomes.append(outcome(lambda layer=layer: layer(input, output_size=size)))
    expected, actual = outcomes
    if isinstance(expected, torch.Tensor):
        assert torch.equal(actual, expected)
        assert tuple(actual.shape[-2:]) == tuple(size[-2:])
    else:
        assert actual == expected


def test_state_dicts_are_exchanged_with_pytorch():
    ours, theirs = tconv.ConvTranspose2d(4, 6, 3), nn.ConvTranspose2d(4, 6, 3)
    theirs.load_state_dict(ours.state_dict())
    input = torch.randn(2, 4, 5, 6)
    assert torch.equal(ours(input), theirs(input))
    ours.load_state_dict(nn.ConvTranspose2d(4, 6, 3).state_dict())
    assert not torch.equal(ours(input), theirs(input))


def through_torch_save(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer)), through_torch_save],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_copies(duplicate):
    layer = tconv.ConvTranspose2d(4, 6, 3, 2)
    twin = duplicate(layer)
    input = torch.randn(2, 4, 5, 6)
    assert type(twin) is tconv.ConvTranspose2d
    assert twin.weight is not layer.weight
    assert torch.equal(twin(input), layer(input))


class Derived(tconv.ConvTranspose2d):
    """Someone's own layer."""


def test_fx_keeps_the_layer_whole_as_pytorchs():
    model = nn.Sequential(
        tconv.ConvTranspose2d(4, 6, 3, 2, 1, 1),
        nn.ConvTranspose2d(6, 6, 3),
        nn.ReLU(),
        nn.utils.parametrizations.weight_norm(nn.ConvTranspose2d(6, 4, 3)),
        pickle.loads(pickle.dumps(tconv.ConvTranspose2d(4, 4, 3))),
    )
    assert tconv.convert(model) == 2
    traced = torch.fx.symbolic_trace(model)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == [*"01234"]
    input = torch.randn(2, 4, 5, 6)
    assert torch.equal(traced(input), model(input))


def test_fx_records_our_function_in_a_derived_layer():
    model = nn.Sequential(Derived(4, 6, 3, 2, 1, 1), nn.ReLU())
    traced = torch.fx.symbolic_trace(model)
    assert tconv.conv_transpose2d in [node.target for node in traced.graph.nodes]
    input = torch.randn(2, 4, 5, 6)
    assert torch.equal(traced(input), model(input))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("make", [torch.jit.script, "trace"], ids=["script", "trace"])
def test_torchscript_holds_pytorchs_operator_and_says_so_once(make, caplog, monkeypatch):
    monkeypatch.setattr(functional, "_warned", set())
    layer = tconv.ConvTranspose2d(4, 6, 3, 2, 1, 1)
    input = torch.randn(2, 4, 5, 6)
    with caplog.at_level(logging.WARNING, logger="tconv"):
        for _ in range(2):
            scripted = torch.jit.trace(layer, input) if make == "trace" else make(layer)
    (said,) = [record.message for record in caplog.records if record.name == "tconv"]
    assert "TorchScript" in said and "leaves tconv's kernels" in said
    kinds = {node.kind() for node in scripted.inlined_graph.nodes()}
    assert kinds & {"aten::conv_transpose2d", "aten::_convolution"}
    assert not any(kind.startswith("tconv::") for kind in kinds)
    assert torch.equal(scripted(input), layer(input))


def test_what_our_kernels_do_not_serve_is_said_once_for_each(caplog, monkeypatch):
    monkeypatch.setattr(functional, "_warned", set())
    with caplog.at_level(logging.WARNING, logger="tconv"):
        for what in ("a", "b", "a"):
            functional._decline(functional._TWO, what)
    assert len(caplog.records) == 2


@pytest.mark.parametrize("cuda", [None, "13.0"], ids=["CPU build", "CUDA build"])
def test_importing_starts_nothing(cuda):
    """Of CUDA builds, the libraries alone: their driver is neither loaded nor initialised."""
    script = (
        "import os, pathlib, sys, torch\n"
        f"torch.version.cuda = {cuda!r}\n"
        "def has_driver(): return 'libcuda.so' in pathlib.Path('/proc/self/maps').read_text()\n"
        "had_driver = has_driver()\n"
        "opened = []\n"
        "sys.addaudithook(lambda event, arguments: event == 'open' and opened.append(arguments))\n"
        "before, modules = set(os.environ.items()), set(sys.modules)\n"
        "import tconv\n"
        "written = [a for a in opened if isinstance(a[1], str) and set(a[1]) & set('wax+')]\n"
        "assert not written, written\n"
        "assert set(os.environ.items()) == before\n"
        "assert not torch.cuda.is_initialized()\n"
        "new = {name for name in set(sys.modules) - modules if name.startswith('cuda')}\n"
        "if torch.version.cuda is None: assert not new, 'for the first launch'\n"
        "else: assert 'cuda.bindings.nvrtc' in new, new\n"
        "assert has_driver() == had_driver\n"
        "from tconv.jit import libraries\n"
        "assert libraries.driver.cache_info().currsize == 0\n"
        "print(sorted(tconv.__all__))\n"
    )
    done = subprocess.run(
        [sys.executable, "-B", "-c", script],
        env={"PYTHONPATH": ":".join(sys.path), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert all(hasattr(tconv, name) for name in tconv.__all__)
