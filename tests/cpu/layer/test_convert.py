"""convert and revert: in place, and nothing but the class changes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import tconv


class Derived(nn.ConvTranspose2d):
    """A layer that someone has derived, with nothing of its own."""


class OwnForward(nn.ConvTranspose2d):
    def forward(self, input, output_size=None):
        return super().forward(input, output_size) + 1


def network():
    shared = nn.ConvTranspose2d(4, 4, 3, padding=1)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        shared,
        nn.ModuleDict({"up": nn.ConvTranspose2d(4, 4, 4, 2, 1)})["up"],
        shared,
        nn.ConvTranspose2d(4, 2, 3, 2, bias=False),
    )


def types(model):
    return [type(module) for module in model.modules()]


def test_counts_each_layer_once_and_undoes_itself(run):
    model = network()
    before, names = types(model), dict(model.named_parameters())
    input = torch.randn(2, 3, 8, 8)
    expected = model(input)
    assert tconv.convert(model) == 3
    assert types(model).count(tconv.ConvTranspose2d) == 3
    assert nn.ConvTranspose2d not in types(model)
    assert torch.equal(model(input), expected)
    assert run.calls == ["forward"] * 4
    assert tconv.convert(model) == 0
    assert all(model.get_parameter(name) is parameter for name, parameter in names.items())
    assert tconv.revert(model) == 3
    assert types(model) == before
    assert tconv.revert(model) == 0
    model(input)
    assert run.calls == ["forward"] * 4


def test_the_model_may_be_the_layer():
    layer = nn.ConvTranspose2d(4, 6, 3)
    assert tconv.convert(layer) == 1
    assert type(layer) is tconv.ConvTranspose2d
    assert tconv.revert(layer) == 1
    assert type(layer) is nn.ConvTranspose2d
    assert vars(layer).keys() == vars(nn.ConvTranspose2d(4, 6, 3)).keys()


@pytest.mark.parametrize("change", [tconv.convert, tconv.revert])
@pytest.mark.parametrize(
    "given, found",
    [
        (None, "got NoneType"),
        ([nn.ConvTranspose2d(4, 6, 3)], "got list"),
        (nn.ConvTranspose2d, "got the class ConvTranspose2d: make an instance"),
    ],
    ids=["None", "list", "class"],
)
def test_what_is_no_module_is_named(change, given, found):
    with pytest.raises(
        TypeError, match=rf"tconv.{change.__name__} takes a torch.nn.Module, {found}"
    ):
        change(given)


def test_verbose_says_what_is_left_and_why(capsys):
    patched, quantized = nn.ConvTranspose2d(4, 6, 3), nn.ConvTranspose2d(4, 6, 3)
    patched.forward = lambda input: input
    quantized.qconfig = object()
    layers = [nn.ConvTranspose2d(4, 6, 3), tconv.ConvTranspose2d(4, 6, 3), nn.Conv2d(4, 6, 3)]
    layers += [Derived(4, 6, 3), patched, nn.LazyConvTranspose2d(6, 3), quantized]
    model = nn.ModuleDict({"up": nn.Sequential(*layers, nn.ConvTranspose3d(4, 6, 3))})
    assert tconv.convert(model, verbose=True) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "tconv.convert: 1 turned"
    for line, name, reason in zip(
        said[1:],
        ("up.3", "up.4", "up.5", "up.6", "up.7"),
        ("derived class", "forward was replaced", "convert again", "qconfig", "three dimensions"),
        strict=True,
    ):
        assert line.startswith(f"  {name} is left to PyTorch: ") and reason in line
    assert "Derived" in said[1]
    tconv.convert(model)
    assert not capsys.readouterr().out


def test_what_is_derived_or_of_another_kind_is_left_alone():
    others = [Derived(4, 6, 3), OwnForward(4, 6, 3), nn.ConvTranspose3d(4, 6, 3)]
    others += [nn.ConvTranspose3d(4, 6, 3), nn.Conv2d(4, 6, 3), nn.LazyConvTranspose2d(6, 3)]
    instance = nn.ConvTranspose2d(4, 6, 3)
    instance.forward = lambda input: input
    others.append(instance)
    model = nn.ModuleList(others)
    before = types(model)
    assert tconv.convert(model) == 0
    assert types(model) == before


def test_a_lazy_layer_is_converted_once_it_has_its_shape():
    model = nn.Sequential(nn.LazyConvTranspose2d(6, 3))
    input = torch.randn(2, 4, 5, 6)
    assert tconv.convert(model) == 0
    expected = model(input)
    assert tconv.convert(model) == 1
    assert torch.equal(model(input), expected)


def test_training_goes_on_across_conversion(run):
    results = []
    for converts in (False, True):
        torch.manual_seed(9)
        model = network().double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for step in range(4):
            if converts and step == 1:
                tconv.convert(model)
            if converts and step == 3:
                tconv.revert(model)
            optimizer.zero_grad()
            model(torch.randn(2, 3, 8, 8, dtype=torch.float64)).pow(2).mean().backward()
            optimizer.step()
        results.append(model.state_dict())
    assert run.calls.count("forward") == 8
    expected, actual = results
    assert list(expected) == list(actual)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-10, atol=1e-12)


def test_hooks_and_attributes_stay():
    layer = nn.ConvTranspose2d(4, 6, 3).eval()
    seen = []
    layer.register_forward_pre_hook(lambda module, inputs: seen.append("before"))
    layer.register_forward_hook(lambda module, inputs, output: seen.append("after"))
    layer.register_full_backward_hook(lambda module, grads, outputs: seen.append("back"))
    layer.note = "kept"
    layer.weight.requires_grad_(False)
    tconv.convert(layer)
    layer(torch.randn(1, 4, 5, 6, requires_grad=True)).sum().backward()
    assert seen == ["before", "after", "back"]
    assert layer.note == "kept" and not layer.training and layer.weight.grad is None


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_norms_by_hooks_keep_working(norm, run):
    layers = []
    for converts in (False, True):
        torch.manual_seed(10)
        layer = norm(nn.ConvTranspose2d(4, 6, 3))
        assert tconv.convert(layer) == 1 if converts else True
        output = layer(torch.ones(1, 4, 5, 6))
        output.sum().backward()
        layers.append((output, [parameter.grad for parameter in layer.parameters()]))
    assert run.calls.count("forward") == 1
    torch.testing.assert_close(layers[1], layers[0])


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrized_layers(norm, run):
    torch.manual_seed(11)
    layer = norm(nn.ConvTranspose2d(4, 6, 3)).eval()
    twin = copy.deepcopy(layer)
    input = torch.randn(1, 4, 5, 6)
    expected, keys = layer(input), list(layer.state_dict())
    assert tconv.convert(layer) == 1
    assert isinstance(layer, tconv.ConvTranspose2d)
    assert not isinstance(twin, tconv.ConvTranspose2d)
    assert type(layer).__name__ == type(twin).__name__
    run.calls.clear()
    torch.testing.assert_close(layer(input), expected)
    torch.testing.assert_close(copy.deepcopy(layer)(input), expected)
    assert run.calls == ["forward"] * 2
    assert list(layer.state_dict()) == keys
    assert tconv.revert(layer) == 1
    assert not isinstance(layer, tconv.ConvTranspose2d)
    torch.testing.assert_close(layer(input), expected)
    assert tconv.convert(layer) == 1
    parametrize.remove_parametrizations(layer, "weight")
    assert type(layer) is tconv.ConvTranspose2d
    torch.testing.assert_close(layer(input), expected)


def test_parametrizing_a_converted_layer():
    layer = parametrizations.weight_norm(tconv.ConvTranspose2d(4, 6, 3))
    assert tconv.convert(layer) == 0
    assert tconv.revert(layer) == 1
    parametrize.remove_parametrizations(layer, "weight")
    assert type(layer) is nn.ConvTranspose2d


def test_parametrized_layers_of_a_derived_class_are_left_alone():
    layer = parametrizations.weight_norm(Derived(4, 6, 3))
    kind = type(layer)
    assert tconv.convert(layer) == 0
    assert type(layer) is kind
