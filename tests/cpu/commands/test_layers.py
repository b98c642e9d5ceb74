"""How layers are written down: the line of text, the JSON file, and what both refuse."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import nn

from tconv import run
from tconv.layers import DIRECTIONS, Layer, read_layers
from tconv.reference import operands, random_layers
from tconv.run import binding


def test_positions_are_those_of_pytorch():
    layer = Layer.parse("6,8,3x5,2x3,1,1x2,2")
    module = nn.ConvTranspose2d(6, 8, (3, 5), (2, 3), 1, (1, 2), 2)
    for name in ("in_channels", "out_channels", "kernel_size", "stride", "padding", "groups"):
        assert getattr(layer, name) == getattr(module, name)
    assert layer.output_padding == module.output_padding
    assert layer.w_shape == tuple(module.weight.shape)
    assert (layer.batch, layer.size) == (8, (64, 64))
    assert layer.bias
    assert layer.y_shape == module(torch.zeros(layer.x_shape)).shape


def test_by_name():
    layer = Layer.parse("6,8,3, stride=2x3, dilation=2,groups=2,bias=no", "2x5x7")
    assert layer == Layer(6, 8, (3, 3), (2, 3), dilation=(2, 2), groups=2, bias=False,
                          batch=2, height=5, width=7)  # fmt: skip


def in_one_dimension(layer):
    """The layer along its width alone; None where that has no output."""
    numbers = {"kernel_size": 1, "stride": 1, "padding": 0, "output_padding": 0, "dilation": 1}
    pairs = {name: (one, getattr(layer, name)[1]) for name, one in numbers.items()}
    return dataclasses.replace(layer, **pairs, height=1, dimensions=1)


def test_one_dimension():
    layer = Layer.parse("1d:512,256,16,8,4", "16x32")
    assert layer == Layer(512, 256, (1, 16), (1, 8), (0, 4), batch=16, height=1, width=32,
                          dimensions=1)  # fmt: skip
    assert layer.problem("forward") == Layer.parse(
        "512,256,1x16,stride=1x8,padding=0x4", "16x1x32"
    ).problem("forward")
    assert str(layer) == "1d:512,256,16,stride=8,padding=4 on 16x32"
    assert layer.arguments == "512, 256, kernel_size=(16,), stride=(8,), padding=(4,)"
    assert (Layer.parse("1d:4,4,3").batch, Layer.parse("1d:4,4,3").size) == (8, (1, 4096))
    with pytest.raises(ValueError, match="have no channels_last format: 1d:512"):
        layer.problem("forward", layout="channels_last")


@pytest.mark.parametrize("of", [lambda layer: layer, in_one_dimension], ids=["2d", "1d"])
def test_text_is_what_parse_reads(of, tmp_path):
    layers = [of(layer) for layer in random_layers(50, seed=1)]
    for layer in layers:
        assert Layer.parse(layer.text, layer.input_text) == layer
    path = tmp_path / "layers.json"
    path.write_text(json.dumps([layer.record() for layer in layers]))
    assert read_layers(path) == layers


@pytest.mark.parametrize("of", [lambda layer: layer, in_one_dimension], ids=["2d", "1d"])
def test_arguments_build_the_layer(of):
    for layer in map(of, random_layers(20, seed=2)):
        module = eval(f"nn.{layer.kind}({layer.arguments})")
        output = module(torch.zeros(layer.sizes(layer.x_shape)))
        assert output.shape == layer.sizes(layer.y_shape)
        assert (module.bias is not None) == layer.bias


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("64,32", "needs kernel_size"),
        ("64,x,3", "out_channels is a number"),
        ("64,32,3x4x5", "kernel_size is a number or HEIGHTxWIDTH"),
        ("64,32,3,-1", "stride is a number or HEIGHTxWIDTH"),
        ("64,32,3,depth=1", "got 'depth'"),
        ("64,32,3,2,stride=2", "stride is given twice"),
        ("64,32,3,stride=2,1", "by position after one by name"),
        ("64,32,3,1,1,0,1,1", "at most 7 values by position"),
        ("64,32,3,bias=2", "bias is yes or no"),
        ("64,32,3,output_padding=1", "output_padding must be smaller than stride or dilation"),
        ("6,4,3,groups=4", "in_channels divisible by groups"),
        ("6,4,1,padding=40", "at least one output"),
        ("6,4,0", "kernel >= 1"),
        ("1d:6,4,3x3", "kernel_size is a number"),
        ("1d:6,4,3,output_padding=1", "output_padding must be smaller than stride or dilation"),
        ("2d:6,4,3", "in_channels is a number"),
    ],
)
def test_refused_texts(text, says):
    with pytest.raises(ValueError, match=says):
        Layer.parse(text)


def test_file(tmp_path):
    path = tmp_path / "layers.json"
    records = [
        {"name": "a", "source": "a paper", "in_channels": 4, "out_channels": 6,
         "kernel_size": [3, 5], "stride": 2, "batch": 2, "height": 7, "width": 9},
        Layer.parse("6,8,3,groups=2,bias=no", "2x5x7").record(),
    ]  # fmt: skip
    path.write_text(json.dumps(records))
    first, second = read_layers(path)
    assert first == Layer(4, 6, (3, 5), (2, 2), batch=2, height=7, width=9, name="a")
    assert second == Layer.parse("6,8,3,groups=2,bias=no", "2x5x7")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is no JSON file"),
        ("{}", "must hold a list"),
        ('[{"name": "a", "in_channels": 4}]', "layer 'a': it lacks out_channels, kernel_size"),
        ('[{"in_channels": 4, "depth": 1}]', "layer 0: unknown field 'depth'"),
        ('[{"in_channels": "4"}]', "in_channels must be a int, got '4'"),
        ('[{"kernel_size": [3, 4, 5]}]', "kernel_size must be a number or a pair"),
        ('[{"bias": 1}]', "bias must be a bool"),
        ('[{"dimensions": 1, "kernel_size": [1, 3]}]', "kernel_size must be a number in one"),
        ('[{"dimensions": 1, "height": 3}]', "unknown field 'height'; known are .*length"),
        ('[{"length": 3}]', "unknown field 'length'"),
        (
            '[{"in_channels": 4, "out_channels": 4, "kernel_size": 3, "dimensions": 3}]',
            "dimensions must be 1 or 2, got 3",
        ),
    ],
)
def test_refused_files(tmp_path, text, says):
    path = tmp_path / "layers.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=says):
        read_layers(path)


@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
@pytest.mark.parametrize("tf32", (True, False))
def test_problem_is_what_a_call_plans(monkeypatch, layout, tf32):
    """`explain` asks the planner the very question that a call of the layer asks."""
    asked = {}
    monkeypatch.setattr(
        binding, "_prepare", lambda problem, *rest: asked.update({problem: 1}) or 1 / 0
    )
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    for text in ("20,18,3,2,1", "40,6,3x4,groups=2", "4,20,2,2"):
        layer = Layer.parse(text, "2x5x7")
        t = operands(layer, torch.float32, layout, "cpu")
        calls = (
            lambda t=t, g=layer.geometry: run.forward(t.x, t.w, t.bias, g),
            lambda t=t, g=layer.geometry, s=layer.size: run.input_gradient(
                t.grad_output, t.w, s, g
            ),
            lambda t=t, g=layer.geometry, k=layer.kernel_size: run.weight_gradient(
                t.x, t.grad_output, k, g, False
            ),
        )
        for direction, call in zip(DIRECTIONS, calls, strict=True):
            asked.clear()
            with pytest.raises(ZeroDivisionError):
                call()
            assert list(asked) == [layer.problem(direction, "float32", layout, tf32)]


def test_height_in_one_dimension_is_refused():
    for wrong in ({"height": 2}, {"kernel_size": (3, 3)}, {"padding": (1, 0)}, {"stride": (2, 1)}):
        values = {"kernel_size": (1, 3), "height": 1, "dimensions": 1, **wrong}
        with pytest.raises(ValueError, match="along the height in one dimension, got"):
            Layer(4, 4, **values)


def test_an_input_of_the_other_kind_is_refused():
    with pytest.raises(ValueError, match="an input of '1d:4,4,3' is BATCHxLENGTH, got '8x64x64'"):
        Layer.parse("1d:4,4,3", "8x64x64")
    with pytest.raises(ValueError, match="an input of '4,4,3' is BATCHxHEIGHTxWIDTH, got '8x64'"):
        Layer.parse("4,4,3", "8x64")


def test_wide_offsets():
    assert Layer.parse("1,2,2,2", "1030x512x512").problem("forward").wide_offsets
    assert not Layer.parse("1,2,2,2", "1023x512x512").problem("forward").wide_offsets
