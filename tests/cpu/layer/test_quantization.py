"""torch.fx, torch.ao.quantization and torchao see a converted layer as PyTorch's."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import tconv

ao = pytest.importorskip("torch.ao.quantization")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.skipif(
        "qnnpack" not in torch.backends.quantized.supported_engines, reason="needs QNNPACK"
    ),
]


@pytest.fixture(autouse=True)
def _engine():
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "qnnpack"
    yield
    torch.backends.quantized.engine = before


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.enter, self.leave = ao.QuantStub(), ao.DeQuantStub()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.up = nn.ConvTranspose2d(4, 4, 4, 2, 1)
        self.last = nn.ConvTranspose2d(4, 2, 3)

    def forward(self, input):
        return self.leave(self.last(self.up(self.first(self.enter(input)))))


def kinds(model):
    return [type(module) for module in model.modules()]


def eager(model, input, trains):
    if trains:
        model.train().qconfig = ao.get_default_qat_qconfig("qnnpack")
        prepared = ao.prepare_qat(model)
        prepared(input).sum().backward()
    else:
        model.qconfig = ao.get_default_qconfig("qnnpack")
        prepared = ao.prepare(model.eval())
        prepared(input)
    return kinds(prepared), ao.convert(prepared.eval())


def by_graph(model, input, trains):
    fx = pytest.importorskip("torch.ao.quantization.quantize_fx")
    if trains:
        mapping = ao.get_default_qat_qconfig_mapping("qnnpack")
        prepared = fx.prepare_qat_fx(model.train(), mapping, (input,))
    else:
        mapping = ao.get_default_qconfig_mapping("qnnpack")
        prepared = fx.prepare_fx(model.eval(), mapping, (input,))
    prepared(input)
    return kinds(prepared)[1:], fx.convert_fx(prepared.eval())  # without the class of the graph


@pytest.mark.parametrize("trains", [False, True], ids=["after training", "while training"])
@pytest.mark.parametrize("way", [eager, by_graph])
def test_a_converted_model_is_quantized_as_pytorchs(way, trains):
    input, results = torch.randn(2, 3, 8, 9), []
    for converts in (False, True):
        model = Network()
        assert tconv.convert(model) == 2 if converts else True
        prepared, quantized = way(model, input, trains)
        results.append((prepared, kinds(quantized)[1:], quantized(input)))
    expected, actual = results
    assert actual[:2] == expected[:2]
    assert torch.ao.nn.quantized.ConvTranspose2d in actual[1]
    torch.testing.assert_close(actual[2], expected[2], rtol=0, atol=0)


def test_a_layer_with_a_qconfig_is_pytorchs_and_stays_so(caplog, monkeypatch):
    monkeypatch.setattr(tconv.functional, "_warned", set())
    model = nn.Sequential(*(tconv.ConvTranspose2d(4, 6, 3) for _ in range(3)))
    assert not hasattr(model[0], "qconfig")
    with pytest.raises(AttributeError):
        del model[0].qconfig
    with caplog.at_level(logging.WARNING, logger="tconv"):
        for layer in model[:2]:
            layer.qconfig = ao.default_qconfig
        model[2].qconfig = None
    assert [record.name for record in caplog.records] == ["tconv"]
    assert kinds(model)[1:] == [nn.ConvTranspose2d, nn.ConvTranspose2d, tconv.ConvTranspose2d]
    assert model[0].qconfig is ao.default_qconfig and model[2].qconfig is None
    assert tconv.convert(model) == 0
    del model[0].qconfig, model[2].qconfig
    assert not hasattr(model[2], "qconfig") and tconv.convert(model) == 1


def test_torchao_leaves_our_layers_alone():
    try:
        from torchao import quantization
    except (ImportError, AttributeError) as error:  # the latter beside an older PyTorch
        pytest.skip(f"could not import torchao: {error}")
    model = nn.Sequential(nn.ConvTranspose2d(4, 6, 3), nn.Flatten(), nn.Linear(6 * 36, 32)).eval()
    tconv.convert(model)
    weight, input = model[0].weight, torch.randn(2, 4, 4, 4)
    expected = model(input)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    assert type(model[0]) is tconv.ConvTranspose2d and model[0].weight is weight
    assert type(model[2].weight) is not nn.Parameter
    torch.testing.assert_close(model(input), expected, rtol=0.05, atol=0.05)
