"""Packed weights that stay from one call to the next, for as long as they are the layer's.

Whether they are is not decided here. Nothing on the host tells of a write through `.data`, from
another library's kernel, or of another tensor in the same memory: a call on kept weights compares
them with the layer's on the device, and computes its output again where they differ
(`kernels.family.Keeping`). What is decided here is when that is worth it: a weight that calls in a
row have seen unchanged, as far as the host can tell, is packed to be kept. Two calls at first; more
for a weight whose packed form was not used often enough to pay.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tconv import settings

LEAST_USES = 4
"""Calls on kept weights that pay for having packed them by a launch of its own."""

MOST_PATIENCE = 1024

_WORDS = 4096


@dataclass(eq=False)
class Kept:
    """What is known of one weight.

    Attributes:
        weight: the tensor.
        version: of it when it was seen, as autograd counts.
        address: of its memory.
        layout: how it is packed.
        stream: of the calls that have seen it, whose order keeps its packed memory safe.
        patience: calls that must see it before the one that keeps it.
        seen: calls that have.
        memory: the packed weights, once they are kept.
        stale: address of the word by which a device says that they are not the layer's.
        fresh: whether they are still to be packed.
    """

    weight: weakref.ref[Tensor]
    version: int
    address: int
    layout: object
    stream: int
    patience: int = 1
    seen: int = 1
    memory: Tensor | None = None
    stale: int = 0
    fresh: bool = True
    _word: ctypes.c_int = field(default_factory=ctypes.c_int)

    def is_stale(self) -> bool:
        """Whether a device has said so; it may say so long after the call was launched."""
        return self._word.value != 0

    def next_patience(self) -> int:
        """For what the weight has become."""
        short = self.memory is not None and self.seen - self.patience < LEAST_USES
        return min(2 * self.patience, MOST_PATIENCE) if short else self.patience

    def keep(self, elements: int) -> None:
        """Allocates what holds the packed weights."""
        weight = self.weight()
        assert weight is not None
        # Detached, for no autograd to follow.
        self.memory = weight.detach().new_empty(elements, dtype=torch.float32)
        self.stale, self._word = _word(pinned=weight.is_cuda)


_kept: dict[int, Kept] = {}


def find(weight: Tensor, layout: object, stream: int, elements: int) -> Kept | None:
    """The weight's packed form, or None for a call that packs by itself.

    Args:
        weight: the layer's, contiguous.
        layout: what its packed form depends on; the same object for the same.
        stream: of the call.
        elements: float32 values of the packed form.
    """
    # A graph is replayed when kept memory may be another's.
    if not settings.keep_weights() or (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    # Tensors of inference mode have none.
    version = 0 if weight.is_inference() else weight._version
    found = _kept.get(id(weight))
    patience = 1
    if found is not None and found.weight() is weight:
        if (
            found.version == version
            and found.layout is layout
            and found.stream == stream
            and found.address == weight.data_ptr()
            and not found.is_stale()
        ):
            found.seen += 1
            if found.memory is None:
                if found.seen <= found.patience:
                    return None
                try:
                    found.keep(elements)
                except torch.cuda.OutOfMemoryError:  # the call by itself may do with less
                    found.patience = 2 * found.seen
                    return None
            return found
        patience = found.next_patience()
    forget = functools.partial(_forget, id(weight))
    reference = weakref.ref(weight, forget)
    _kept[id(weight)] = Kept(reference, version, weight.data_ptr(), layout, stream, patience)
    return None


def _forget(number: int, reference: weakref.ref[Tensor]) -> None:
    found = _kept.get(number)
    if found is not None and found.weight is reference:
        del _kept[number]


@functools.cache
def _words(pinned: bool) -> tuple[Tensor, itertools.count[int]]:
    # Never given back: a launch that is still to run may set one. For the same reason a weight that
    # is given a word that another had may be taken for changed, once.
    return torch.zeros(_WORDS, dtype=torch.int32, pin_memory=pinned), itertools.count()


def _word(pinned: bool) -> tuple[int, ctypes.c_int]:
    words, count = _words(pinned)
    address = words.data_ptr() + 4 * (next(count) % _WORDS)
    word = ctypes.c_int.from_address(address)
    word.value = 0
    return address, word
