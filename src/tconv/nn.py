"""ConvTranspose1d and 2d, and convert(model), which turns a model's PyTorch layers into them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from .functional import conv_transpose1d, conv_transpose2d, leave_to_torchscript, warn_once

_is_scripting = torch.jit.is_scripting  # which TorchScript knows by this name too

_TRACED_AS = "torch.nn"
"""The attribute `__module__` of our layers, by which `torch.fx` keeps PyTorch's layers whole.

A layer's, not its class's, where pickle would look for the class.
NOTE: torch.compile guards layers of "torch.nn." by less. Ours have their whole guards.
"""


class _QuantizationConfig:
    """The attribute `qconfig` of our layers: one that is given one becomes PyTorch's.

    `torch.ao.quantization` gives one to each layer that it is to observe or to quantize, by tables
    of PyTorch's exact classes.
    """

    def __get__(self, layer: torch.nn.Module | None, kind: type | None = None) -> Any:
        if layer is None:
            return self
        try:
            return layer.__dict__["qconfig"]
        except KeyError:
            raise AttributeError("qconfig") from None

    def __set__(self, layer: torch.nn.Module, value: object) -> None:
        layer.__dict__["qconfig"] = value
        if value is not None and _to_pytorchs(layer):
            warn_once(
                "qconfig",
                "A layer that is given a qconfig is PyTorch's from here on, and leaves tconv's "
                "kernels: quantized layers have their own",
            )

    def __delete__(self, layer: torch.nn.Module) -> None:
        try:
            del layer.__dict__["qconfig"]
        except KeyError:
            raise AttributeError("qconfig") from None


def _prepare_scriptable(layer: torch.nn.Module) -> torch.nn.Module:
    """What torch.jit.script compiles in a layer's place: the layer."""
    leave_to_torchscript()
    return layer


class ConvTranspose1d(torch.nn.ConvTranspose1d):
    """`torch.nn.ConvTranspose1d`, computed by tconv.

    The constructor, parameters, initialisation, use of random numbers, state_dict and printed form
    are PyTorch's; only `forward` differs. An instance pickles, copies, scripts and exports as
    PyTorch's does; under torch.jit.script it runs PyTorch's operator. `torch.fx` keeps it whole, as
    PyTorch's. One that is given a `qconfig`, as `torch.ao.quantization` does, becomes PyTorch's.
    """

    qconfig = _QuantizationConfig()
    __prepare_scriptable__ = _prepare_scriptable

    if not TYPE_CHECKING:  # which shall see PyTorch's

        @functools.wraps(torch.nn.ConvTranspose1d.__init__)
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            if type(self) is ConvTranspose1d:
                self.__dict__["__module__"] = _TRACED_AS

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Apply the layer.

        Args:
            input: [N, Cin, L] or [Cin, L]; dtypes as in `tconv.conv_transpose1d`.
            output_size: the length wanted, with or without the sizes before it. It takes the place
                of the layer's output_padding.

        Returns:
            [N, Cout, OL], or without N if the input has none.

        Raises:
            ValueError: for an output_size that the layer cannot make.
            RuntimeError: for an input that does not fit, with PyTorch's own message.
        """
        if self.padding_mode != "zeros":
            raise ValueError("Only `zeros` padding mode is supported for ConvTranspose1d")
        assert isinstance(self.padding, tuple)
        if output_size is None and not _is_scripting():
            # What `self.weight` looks up, in a tenth of the time; a parametrized one is elsewhere.
            found = self._parameters
            weight = found.get("weight")
            return conv_transpose1d(
                input,
                self.weight if weight is None else weight,
                found["bias"] if "bias" in found else self.bias,  # noqa: SIM401, looked up if need be
                self.stride,
                self.padding,
                self.output_padding,
                self.groups,
                self.dilation,
            )
        output_padding = self._output_padding(
            input,
            output_size,
            self.stride,  # type: ignore[arg-type]
            self.padding,  # type: ignore[arg-type]
            self.kernel_size,  # type: ignore[arg-type]
            1,
            self.dilation,  # type: ignore[arg-type]
        )
        return conv_transpose1d(
            input,
            self.weight,
            self.bias,
            self.stride,
            self.padding,
            output_padding,
            self.groups,
            self.dilation,
        )


class ConvTranspose2d(torch.nn.ConvTranspose2d):
    """`torch.nn.ConvTranspose2d`, computed by tconv.

    The constructor, parameters, initialisation, use of random numbers, state_dict and printed form
    are PyTorch's; only `forward` differs. An instance pickles, copies, scripts and exports as
    PyTorch's does; under torch.jit.script it runs PyTorch's operator. `torch.fx` keeps it whole, as
    PyTorch's. One that is given a `qconfig`, as `torch.ao.quantization` does, becomes PyTorch's.
    """

    qconfig = _QuantizationConfig()
    __prepare_scriptable__ = _prepare_scriptable

    if not TYPE_CHECKING:  # which shall see PyTorch's

        @functools.wraps(torch.nn.ConvTranspose2d.__init__)
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            if type(self) is ConvTranspose2d:
                self.__dict__["__module__"] = _TRACED_AS

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Apply the layer.

        Args:
            input: [N, Cin, H, W] or [Cin, H, W]; dtypes as in `tconv.conv_transpose2d`.
            output_size: the height and width wanted, with or without the sizes before them. It
                takes the place of the layer's output_padding.

        Returns:
            [N, Cout, OH, OW], or without N if the input has none.

        Raises:
            ValueError: for an output_size that the layer cannot make.
            RuntimeError: for an input that does not fit, with PyTorch's own message.
        """
        if self.padding_mode != "zeros":
            raise ValueError("Only `zeros` padding mode is supported for ConvTranspose2d")
        assert isinstance(self.padding, tuple)
        if output_size is None and not _is_scripting():
            # What `self.weight` looks up, in a tenth of the time; a parametrized one is elsewhere.
            found = self._parameters
            weight = found.get("weight")
            return conv_transpose2d(
                input,
                self.weight if weight is None else weight,
                found["bias"] if "bias" in found else self.bias,  # noqa: SIM401, looked up if need be
                self.stride,
                self.padding,
                self.output_padding,
                self.groups,
                self.dilation,
            )
        output_padding = self._output_padding(
            input,
            output_size,
            self.stride,  # type: ignore[arg-type]
            self.padding,  # type: ignore[arg-type]
            self.kernel_size,  # type: ignore[arg-type]
            2,
            self.dilation,  # type: ignore[arg-type]
        )
        return conv_transpose2d(
            input,
            self.weight,
            self.bias,
            self.stride,
            self.padding,
            output_padding,
            self.groups,
            self.dilation,
        )


def _swap(module: torch.nn.Module, old: type, new: type) -> bool:
    """Make a module whose class is `old` one of `new`, in place; False if it is something else."""
    if "forward" in module.__dict__:
        # Something has put a forward of its own on the instance.
        return False
    kind = type(module)
    if kind is old:
        module.__class__ = new
    elif parametrize.is_parametrized(module) and kind.__bases__ == (old,):
        # torch.nn.utils.parametrize has given the module a class of its own, derived from its
        # class before. Copies of the module share that class, so it is remade, not changed.
        members = {
            name: member
            for name, member in vars(kind).items()
            if name not in ("__dict__", "__weakref__")
        }
        module.__class__ = type(kind.__name__, (new,), members)
    else:
        return False
    if new in (ConvTranspose1d, ConvTranspose2d):
        module.__dict__["__module__"] = _TRACED_AS
    else:
        module.__dict__.pop("__module__", None)
    return True


_PAIRS: tuple[tuple[type[torch.nn.Module], type[torch.nn.Module]], ...] = (
    (torch.nn.ConvTranspose1d, ConvTranspose1d),
    (torch.nn.ConvTranspose2d, ConvTranspose2d),
)
"""PyTorch's layers and ours."""


def _to_ours(module: torch.nn.Module) -> bool:
    if module.__dict__.get("qconfig") is not None:
        return False
    return any(_swap(module, theirs, ours) for theirs, ours in _PAIRS)


def _to_pytorchs(module: torch.nn.Module) -> bool:
    return any(_swap(module, ours, theirs) for theirs, ours in _PAIRS)


def _why_not(module: torch.nn.Module) -> str | None:
    """Why `convert` leaves a transposed convolution of PyTorch's alone; None of anything else."""
    if isinstance(module, torch.nn.ConvTranspose3d):
        return "tconv has no kernels for three dimensions"
    if isinstance(module, (ConvTranspose1d, ConvTranspose2d)) or not isinstance(
        module, (torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d)
    ):
        return None
    if isinstance(module, torch.nn.modules.lazy.LazyModuleMixin):
        return "lazy, and without its first input yet: convert again after that"
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance"
    if module.__dict__.get("qconfig") is not None:
        return "it has a qconfig, and is to be quantized"
    kind = type(module)
    return f"of a derived class, {kind.__module__}.{kind.__qualname__}"


def _check(model: object, name: str) -> None:
    """Raise TypeError, in the name of a function, unless this is a module."""
    if isinstance(model, torch.nn.Module):
        return
    if isinstance(model, type):
        found = f"the class {model.__name__}: make an instance of it"
    else:
        found = type(model).__name__
    raise TypeError(f"tconv.{name} takes a torch.nn.Module, got {found}")


def convert(model: torch.nn.Module, *, verbose: bool = False) -> int:
    """Turn every `torch.nn.ConvTranspose1d` and 2d in a model, or the model, into ours, in place.

    Each layer stays the object that it was: its parameters, hooks, parametrizations and place in
    optimizers and state dicts are untouched. Left alone are layers of a derived class, layers with
    a `forward` of their own, layers that are to be quantized (they have a `qconfig`), and lazy
    layers that have not seen their first input (PyTorch makes them ordinary layers then, which a
    second call converts).

    Args:
        model: any module.
        verbose: whether to print how many layers were turned, and each transposed convolution that
            was left alone, with the reason.

    Returns:
        How many layers were turned, each counted once, wherever it occurs.

    Raises:
        TypeError: if the model is no module.
    """
    _check(model, "convert")
    turned = sum(map(_to_ours, model.modules()))
    if verbose:
        print(f"tconv.convert: {turned} turned")
        for name, module in model.named_modules():
            reason = _why_not(module)
            if reason is not None:
                print(f"  {name or 'the model'} is left to PyTorch: {reason}")
    return turned


def revert(model: torch.nn.Module) -> int:
    """Turn our layers in a model into PyTorch's: the opposite of `convert`.

    Args:
        model: any module.

    Returns:
        How many layers were turned, each counted once, wherever it occurs.

    Raises:
        TypeError: if the model is no module.
    """
    _check(model, "revert")
    return sum(map(_to_pytorchs, model.modules()))
