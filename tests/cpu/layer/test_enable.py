"""enable and disable: PyTorch's own name is ours for a while, then PyTorch's again."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tconv

PYTORCH = F.conv_transpose2d


@pytest.fixture(autouse=True)
def _off():
    yield
    tconv.disable()


def test_every_caller_by_name_is_served(run):
    input, layer = torch.randn(2, 4, 5, 6), nn.ConvTranspose2d(4, 6, 3)
    expected = layer(input)
    with tconv.enable():
        results = [
            layer(input),
            F.conv_transpose2d(input, layer.weight, layer.bias),
            torch.conv_transpose2d(input, layer.weight, layer.bias),
            tconv.ConvTranspose2d.forward(layer, input),
        ]
    assert run.calls == ["forward"] * 4
    assert all(torch.equal(result, expected) for result in results)
    layer(input)
    assert run.calls == ["forward"] * 4
    assert torch.conv_transpose2d is F.conv_transpose2d is PYTORCH


def test_without_a_context_it_holds_until_disable():
    tconv.enable()
    tconv.enable()
    assert F.conv_transpose2d is torch.conv_transpose2d is tconv.conv_transpose2d
    tconv.disable()
    assert F.conv_transpose2d is torch.conv_transpose2d is PYTORCH
    tconv.disable()
    assert F.conv_transpose2d is PYTORCH


def test_contexts_nest():
    with tconv.enable():
        with tconv.disable():
            assert F.conv_transpose2d is PYTORCH
            with tconv.enable():
                assert F.conv_transpose2d is tconv.conv_transpose2d
            assert F.conv_transpose2d is PYTORCH
        with tconv.enable():
            pass
        assert F.conv_transpose2d is tconv.conv_transpose2d
    assert F.conv_transpose2d is PYTORCH


def test_an_exception_restores_what_was():
    with pytest.raises(KeyError), tconv.enable():
        raise KeyError
    assert F.conv_transpose2d is PYTORCH
    tconv.enable()
    with pytest.raises(KeyError), tconv.disable():
        raise KeyError
    assert F.conv_transpose2d is tconv.conv_transpose2d


def test_errors_and_unserved_calls_do_not_loop_back_to_us():
    input, weight = torch.randn(2, 4, 5, 6), torch.randn(4, 3, 3, 3)
    with tconv.enable():
        with pytest.raises(RuntimeError, match="negative padding is not supported"):
            F.conv_transpose2d(input, weight, padding=-1)
        output = F.conv_transpose2d(input.to(torch.complex64), weight.to(torch.complex64))
    assert output.dtype == torch.complex64


def test_other_threads_see_it_and_neighbours_do_not():
    seen = []
    neighbours = F.conv1d, F.conv_transpose3d, F.conv2d
    with tconv.enable():
        thread = threading.Thread(target=lambda: seen.append(F.conv_transpose2d))
        thread.start()
        thread.join()
        assert (F.conv1d, F.conv_transpose3d, F.conv2d) == neighbours
        assert F.conv_transpose1d is torch.conv_transpose1d is tconv.conv_transpose1d
    assert F.conv_transpose1d is torch.conv_transpose1d is not tconv.conv_transpose1d
    assert seen == [tconv.conv_transpose2d]


def test_many_threads_leave_pytorchs_name_behind():
    def toggle():
        for _ in range(200):
            with tconv.enable():
                pass

    threads = [threading.Thread(target=toggle) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tconv.disable()
    assert F.conv_transpose2d is torch.conv_transpose2d is PYTORCH


def test_what_others_put_there_meanwhile_is_not_touched(monkeypatch, caplog):
    def theirs(*arguments):
        raise AssertionError

    tconv.enable()
    with monkeypatch.context() as patch:
        patch.setattr(F, "conv_transpose2d", theirs)
        with caplog.at_level(logging.WARNING, logger="tconv"):
            tconv.disable()
        assert F.conv_transpose2d is theirs
        assert torch.conv_transpose2d is PYTORCH
        assert "torch.nn.functional.conv_transpose2d" in caplog.text
    F.conv_transpose2d = PYTORCH


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripting_while_enabled():
    layer = nn.ConvTranspose2d(4, 6, 3)
    with tconv.enable():
        scripted = torch.jit.script(layer)
    input = torch.randn(2, 4, 5, 6)
    assert torch.equal(scripted(input), layer(input))
