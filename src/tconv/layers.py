"""`Layer`: one transposed convolution and the size of its input.

There are three ways to write one down: the constructor, a line of text (`Layer.parse`) and a record
of a JSON file (`read_layers`). It needs no torch and no GPU.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tconv.problem import (
    Axis,
    Direction,
    DType,
    Geometry,
    Layout,
    Pair,
    Problem,
    dense_strides,
)

DIRECTIONS: tuple[Direction, ...] = ("forward", "input_gradient", "weight_gradient")

PAIRS = ("kernel_size", "stride", "padding", "output_padding", "dilation")
"""The parameters that are (height, width)."""

POSITIONAL = (
    "in_channels",
    "out_channels",
    "kernel_size",
    "stride",
    "padding",
    "output_padding",
    "groups",
)
"""Parameters that a line of text may give by position, in torch.nn.ConvTranspose2d's order."""

GRAMMAR = (
    "IN,OUT,KERNEL[,STRIDE[,PADDING[,OUTPUT_PADDING[,GROUPS]]]], as torch.nn.ConvTranspose2d "
    "orders them; any from STRIDE on, and dilation and bias, also by name: 64,32,4,2,1 or "
    "32,64,3x5,stride=2x3,groups=4,bias=no. HEIGHTxWIDTH where the two differ"
)


@dataclass(frozen=True)
class Layer:
    """A layer and the size of its input. Sizes are in elements, pairs are (height, width).

    Raises:
        ValueError: parameters that PyTorch would refuse, or an input without any output.
    """

    in_channels: int
    out_channels: int
    kernel_size: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    output_padding: Pair = (0, 0)
    groups: int = 1
    bias: bool = True
    dilation: Pair = (1, 1)
    batch: int = 8
    height: int = 64
    width: int = 64
    name: str = ""

    def __post_init__(self) -> None:
        """Refuses what PyTorch would refuse."""
        for axis, name in enumerate(("height", "width")):
            extra, stride = self.output_padding[axis], self.stride[axis]
            if extra >= stride and extra >= self.dilation[axis]:
                raise ValueError(
                    "output_padding must be smaller than stride or dilation, got "
                    f"output_padding={extra}, stride={stride}, dilation={self.dilation[axis]} "
                    f"along the {name}"
                )
        # A Problem refuses the rest.
        self.problem("forward")

    @cached_property
    def axes(self) -> tuple[Axis, Axis]:
        """The height and the width."""
        height, width = (
            Axis(
                size,
                self.kernel_size[i],
                self.stride[i],
                self.padding[i],
                self.output_padding[i],
                self.dilation[i],
            )
            for i, size in enumerate(self.size)
        )
        return height, width

    @property
    def size(self) -> Pair:
        """The input's height and width."""
        return self.height, self.width

    @property
    def output_size(self) -> Pair:
        """The output's height and width."""
        height, width = self.axes
        return height.output_size, width.output_size

    @property
    def x_shape(self) -> tuple[int, int, int, int]:
        """(N, Cin, H, W)."""
        return (self.batch, self.in_channels, *self.size)

    @property
    def w_shape(self) -> tuple[int, int, int, int]:
        """(Cin, Cout/groups, kH, kW)."""
        return (self.in_channels, self.out_channels // self.groups, *self.kernel_size)

    @property
    def y_shape(self) -> tuple[int, int, int, int]:
        """(N, Cout, OH, OW)."""
        return (self.batch, self.out_channels, *self.output_size)

    @property
    def geometry(self) -> Geometry:
        """stride, padding, output_padding, dilation, groups."""
        return (self.stride, self.padding, self.output_padding, self.dilation, self.groups)

    def problem(
        self,
        direction: Direction,
        dtype: DType = "float32",
        layout: Layout = "contiguous",
        tf32: bool = True,
    ) -> Problem:
        """The problem of a call on dense tensors of this layout."""
        last = layout == "channels_last"
        return Problem.of(
            direction,
            self.x_shape,
            self.w_shape,
            self.geometry,
            dtype=dtype,
            tf32=tf32,
            bias=self.bias,
            strides=(
                dense_strides(self.x_shape, last),
                dense_strides(self.w_shape),
                dense_strides(self.y_shape, last),
            ),
        )

    @property
    def arguments(self) -> str:
        """The arguments of torch.nn.ConvTranspose2d: "64, 32, kernel_size=(4, 4), stride=..."."""
        parts = [str(self.in_channels), str(self.out_channels), f"kernel_size={self.kernel_size}"]
        for field in dataclasses.fields(self):
            if field.name in ("stride", *PAIRS[2:], "groups", "bias"):
                value = getattr(self, field.name)
                if value != field.default:
                    parts.append(f"{field.name}={value}")
        return ", ".join(parts)

    @property
    def text(self) -> str:
        """The layer without its input, as `parse` reads it."""
        parts = [str(self.in_channels), str(self.out_channels), _pair_text(self.kernel_size)]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in PAIRS[1:] and value != field.default:
                parts.append(f"{field.name}={_pair_text(value)}")
            elif field.name == "groups" and value != 1:
                parts.append(f"groups={value}")
            elif field.name == "bias" and not value:
                parts.append("bias=no")
        return ",".join(parts)

    @property
    def input_text(self) -> str:
        """The input, as `parse` reads it: "8x64x64"."""
        return f"{self.batch}x{self.height}x{self.width}"

    def __str__(self) -> str:
        """The name if there is one, the layer, and its input's size."""
        return f"{self.name + ': ' if self.name else ''}{self.text} on {self.input_text}"

    def record(self) -> dict[str, Any]:
        """The layer as a record of a layers file."""
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in dataclasses.asdict(self).items()
        }

    @staticmethod
    def parse(text: str, input: str = "8x64x64") -> Layer:
        """The layer that a line of text describes.

        Args:
            text: see `GRAMMAR`.
            input: "BATCHxHEIGHTxWIDTH".

        Raises:
            ValueError: it describes none. The message names the part and what is expected.
        """
        values: dict[str, Any] = {}
        allowed = (*POSITIONAL, "dilation", "bias")
        named = False
        for position, part in enumerate(text.split(",")):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if equals:
                named = True
            elif named:
                raise ValueError(f"a value by position after one by name: {part!r} in {text!r}")
            elif position >= len(POSITIONAL):
                raise ValueError(
                    f"a layer has at most {len(POSITIONAL)} values by position "
                    f"({','.join(POSITIONAL)}), got {text!r}; dilation and bias go by name"
                )
            else:
                name, value = POSITIONAL[position], part.strip()
            if name not in allowed:
                raise ValueError(f"a layer has {', '.join(allowed)}, got {name!r} in {text!r}")
            if name in values:
                raise ValueError(f"{name} is given twice in {text!r}")
            values[name] = _value(name, value, text)
        for name in POSITIONAL[:3]:
            if name not in values:
                raise ValueError(f"a layer needs {name}: {GRAMMAR}; got {text!r}")
        batch, height, width = _integers(input, "an input is BATCHxHEIGHTxWIDTH", 3)
        return Layer(**values, batch=batch, height=height, width=width)


def read_layers(path: Path) -> list[Layer]:
    """The layers of a JSON file: a list of objects with `Layer`'s fields.

    The kernel's size and the channels are required. A number stands for an equal height and width.
    `source` may say where a layer comes from.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no such list. The message names the record and the field.
    """
    try:
        records = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON file: {error}") from None
    if not isinstance(records, list) or not all(isinstance(r, dict) for r in records):
        raise ValueError(f"{path} must hold a list of objects, one for each layer")
    layers = []
    for number, record in enumerate(records):
        where = f"{path}, layer {record.get('name', number)!r}"
        try:
            layers.append(_from_record(record))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from None
    return layers


def _from_record(record: Mapping[str, Any]) -> Layer:
    known = {field.name for field in dataclasses.fields(Layer)}
    values: dict[str, Any] = {}
    for name, value in record.items():
        if name == "source":
            continue
        if name not in known:
            raise ValueError(f"unknown field {name!r}; known are {', '.join(sorted(known))}")
        kind: type = {"name": str, "bias": bool}.get(name, int)
        if name in PAIRS:
            value = (value, value) if isinstance(value, int) else tuple(value)
            fits = len(value) == 2 and all(type(size) is int for size in value)
        else:
            fits = type(value) is kind
        if not fits:
            wanted = "a number or a pair of numbers" if name in PAIRS else f"a {kind.__name__}"
            raise ValueError(f"{name} must be {wanted}, got {value!r}")
        values[name] = value
    missing = [name for name in POSITIONAL[:3] if name not in values]
    if missing:
        raise ValueError(f"it lacks {', '.join(missing)}")
    return Layer(**values)


def _value(name: str, value: str, text: str) -> int | bool | Pair:
    if name == "bias":
        if value.lower() not in ("yes", "no", "true", "false"):
            raise ValueError(f"bias is yes or no, got {value!r} in {text!r}")
        return value.lower() in ("yes", "true")
    if name in PAIRS:
        sizes = _integers(value, f"{name} is a number or HEIGHTxWIDTH (in {text!r})", 1, 2)
        return sizes[0], sizes[-1]
    (number,) = _integers(value, f"{name} is a number (in {text!r})", 1)
    return number


def _integers(text: str, wanted: str, *counts: int) -> tuple[int, ...]:
    parts = text.lower().split("x")
    if len(parts) not in counts or not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"{wanted}, got {text!r}")
    return tuple(map(int, parts))


def _pair_text(pair: Pair) -> str:
    return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]}x{pair[1]}"
