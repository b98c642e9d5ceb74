"""Packed weights that stay between calls: when they do, and that no change is missed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tconv
from tconv import keeping, run, tuning
from tconv import plan as planning
from tconv.kernels import sm90_tf32_flat_forward as family
from tconv.plan import Candidate, candidates

GEOMETRY = ((2, 2), (1, 1), (0, 0), (1, 1), 1)


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TCONV_EMULATE", "1")
    monkeypatch.setattr(family, "LEAST_KEPT_SHARE", 0)
    monkeypatch.setattr(family, "LEAST_KEPT_SECONDS", 0)
    monkeypatch.setattr(keeping, "_kept", {})
    _forget_plans()
    torch.manual_seed(0)
    yield
    _forget_plans()


def _forget_plans() -> None:
    for cached in (run._call, run._prepare, planning._plan):
        cached.cache_clear()
    run._known.clear()


def tile(name: str = "128x88/half") -> Candidate:
    found = next(tile for tile in family.TILES if str(tile) == name)
    return Candidate(family.STEM, found, None, 0.0)


class Layer:
    """A layer whose weights may be kept, and what its calls launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.x = torch.randn(2, 40, 3, 5)
        self.w = torch.nn.Parameter(torch.randn(40, 64, 4, 4) / 10)
        self.launched: list[str] = []
        for name in ("launches", "launches_on_kept", "launches_that_keep"):
            whole = getattr(run._Call, name).func

            def noting(call: Any, name: str = name, whole: Callable[..., Any] = whole) -> Any:
                self.launched.append(name)
                return whole(call)

            monkeypatch.setattr(run._Call, name, property(noting))

    def __call__(self, x: Tensor | None = None, w: Tensor | None = None) -> list[str]:
        """Runs it, checks the result, and tells what was launched."""
        x, w = self.x if x is None else x, self.w if w is None else w
        self.launched.clear()
        with torch.no_grad(), tuning.using(tile()):
            found = tconv.conv_transpose2d(x, w, None, 2, 1)
        want = F.conv_transpose2d(x.double(), w.detach().double(), None, 2, 1)
        assert (found - want).norm() <= 4e-4 * want.norm()
        return [name.removeprefix("launches").strip("_") for name in self.launched]


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> Layer:
    return Layer(monkeypatch)


PACKED, KEPT, FIRST_KEPT = [""], ["on_kept"], ["on_kept", "that_keep"]
FRESH = [PACKED, FIRST_KEPT, KEPT]


def settle(layer: Layer, **operands: Tensor) -> None:
    """So many calls that to keep the weight has paid."""
    calls = [layer(**operands) for _ in range(1 + keeping.LEAST_USES)]
    assert calls == FRESH + [KEPT] * (keeping.LEAST_USES - 2)


def test_weights_are_kept_from_the_second_call_on(layer: Layer) -> None:
    assert [layer() for _ in range(4)] == [PACKED, FIRST_KEPT, KEPT, KEPT]


@pytest.mark.parametrize("how", ("in place", "optimizer", "load_state_dict"))
def test_changes_that_autograd_counts_are_packed_again(layer: Layer, how: str) -> None:
    settle(layer)
    if how == "in place":
        with torch.no_grad():
            layer.w.mul_(2)
    elif how == "optimizer":
        layer.w.grad = torch.randn_like(layer.w)
        torch.optim.SGD([layer.w], lr=0.1).step()
    else:
        torch.nn.ParameterList([layer.w]).load_state_dict({"0": torch.randn_like(layer.w)})
    assert [layer() for _ in range(3)] == FRESH


@pytest.mark.parametrize("how", ("data", "numpy", "one value"))
def test_changes_that_nobody_counts_are_found(layer: Layer, how: str) -> None:
    settle(layer)
    version = layer.w._version
    if how == "data":
        layer.w.data.mul_(2)
    elif how == "numpy":
        layer.w.detach().numpy()[:] = 0.25
    else:
        layer.w.data[7, 11, 1, 2] += 0.5
    assert layer.w._version == version
    assert layer() == KEPT, "the host cannot know"
    assert [layer() for _ in range(3)] == FRESH


def test_patience_with_weights_that_do_not_stay(layer: Layer) -> None:
    # Two calls between changes: what the second keeps is used once.
    assert [layer() for _ in range(2)] == [PACKED, FIRST_KEPT]
    for _ in range(3):
        with torch.no_grad():
            layer.w.mul_(-1)
        assert [layer() for _ in range(2)] == [PACKED] * 2
    # And when they stay at last.
    assert [layer() for _ in range(2)] == [FIRST_KEPT, KEPT]


def test_patience_with_weights_that_change_unseen_before_each_call(layer: Layer) -> None:
    calls = []
    for _ in range(24):
        layer.w.data.mul_(-1)
        calls.append(layer())
    kept = [1, 5, 11, 21]
    assert [number for number, call in enumerate(calls) if call == FIRST_KEPT] == kept
    assert [number for number, call in enumerate(calls) if call == KEPT] == [n + 1 for n in kept]


def test_patience_is_not_lost_where_it_paid(layer: Layer) -> None:
    for _ in range(3):
        settle(layer)
        with torch.no_grad():
            layer.w.mul_(-1)


def test_weights_that_float16_cannot_hold_are_tried_less_and_less_often(layer: Layer) -> None:
    layer.w.data[0, 0] = 300.0
    calls = [layer() for _ in range(17)]
    assert [number for number, call in enumerate(calls) if call == FIRST_KEPT] == [1, 4, 9]
    assert KEPT not in calls


def test_a_weight_that_moves_is_packed_again(layer: Layer) -> None:
    settle(layer)
    layer.w.data = layer.w.data.clone()
    assert [layer() for _ in range(3)] == FRESH


def test_another_tensor_in_the_same_memory_is_another_weight(layer: Layer) -> None:
    settle(layer)
    assert layer(w=layer.w.detach()) == PACKED
    assert layer() == KEPT


def test_each_weight_has_its_own(layer: Layer) -> None:
    other = torch.randn_like(layer.w)
    for expected in FRESH:
        assert layer() == layer(w=other) == expected


def test_inputs_of_other_sizes_share_what_is_kept(layer: Layer) -> None:
    for _ in range(2):
        layer()
    assert layer(x=torch.randn(3, 40, 2, 5)) == KEPT
    assert len(keeping._kept) == 1


def test_tiles_may_share_what_is_kept(layer: Layer) -> None:
    layer()
    layer()
    with torch.no_grad(), tuning.using(tile("128x96/storers/half")):
        layer.launched.clear()
        tconv.conv_transpose2d(layer.x, layer.w, None, 2, 1)
    assert layer.launched == ["launches_on_kept"]


def test_layouts_that_take_turns_are_packed_in_every_call(layer: Layer) -> None:
    for name in ("128x88/half", "128x128/storers/paired/half") * 3:
        with torch.no_grad(), tuning.using(tile(name)):
            layer.launched.clear()
            tconv.conv_transpose2d(layer.x, layer.w, None, 2, 1)
            assert layer.launched == ["launches"]


def test_a_weight_takes_what_is_kept_of_it_along(layer: Layer) -> None:
    settle(layer)
    (kept,) = keeping._kept.values()
    assert kept.memory is not None and kept.memory.numel() < 2 * layer.w.numel()
    del layer.w
    gc.collect()
    assert not keeping._kept


def test_nothing_is_kept_where_the_setting_forbids_it(
    layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TCONV_KEEP_WEIGHTS", "0")
    assert [layer() for _ in range(3)] == [PACKED] * 3
    assert not keeping._kept


def test_nothing_is_kept_of_weights_that_are_not_dense(layer: Layer) -> None:
    weight = (torch.randn(40, 64, 4, 8) / 10)[..., ::2]
    assert not weight.is_contiguous()
    assert [layer(w=weight) for _ in range(3)] == [PACKED] * 3


def test_nothing_is_kept_of_weights_that_do_not_start_on_16_bytes(layer: Layer) -> None:
    weight = (torch.randn(layer.w.numel() + 1) / 10)[1:].view(layer.w.shape)
    assert weight.is_contiguous() and weight.data_ptr() % 16
    assert [layer(w=weight) for _ in range(3)] == [PACKED] * 3


def test_weights_of_inference_mode(layer: Layer) -> None:
    with torch.inference_mode():
        weight = torch.randn_like(layer.w)
        settle(layer, w=weight)
        weight.mul_(2)  # which no tensor of inference mode counts
        assert layer(w=weight) == KEPT
        assert [layer(w=weight) for _ in range(3)] == FRESH


def test_no_memory_to_keep_them_in(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(kept: keeping.Kept, elements: int) -> None:
        raise torch.cuda.OutOfMemoryError

    with monkeypatch.context() as patched:
        patched.setattr(keeping.Kept, "keep", full)
        assert [layer() for _ in range(4)] == [PACKED] * 4
    assert [layer() for _ in range(2)] == [FIRST_KEPT, KEPT]


def test_under_autograd(layer: Layer) -> None:
    for _ in range(3):
        with tuning.using(tile()):
            found = tconv.conv_transpose2d(layer.x, layer.w, None, 2, 1)
        (gradient,) = torch.autograd.grad(found.square().sum(), layer.w)
        assert torch.isfinite(gradient).all()
    assert layer.launched.count("launches_on_kept") == 2


def test_candidates_are_timed_as_they_pack(layer: Layer) -> None:
    call = run._find("forward", GEOMETRY, layer.x, layer.w.detach(), None)
    candidate = next(c for c in candidates(call.problem, call.plan.target) if c.stem == family.STEM)
    output = layer.x.new_empty(call.y_shape)
    layer.launched.clear()
    for _ in range(3):
        run._run(call.on(candidate), layer.x, layer.w.detach(), output, None, keeps=False)
    assert layer.launched == ["launches"] * 3
    assert not keeping._kept
