"""`Layer`: one transposed convolution and the size of its input.

There are three ways to write one down: the constructor, a line of text (`Layer.parse`) and a record
of a JSON file (`read_layers`). It needs no torch and no GPU.

A layer of one dimension is one of two with a height of 1. Text and files leave its height out.
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

_OF_HEIGHT = {"kernel_size": 1, "stride": 1, "padding": 0, "output_padding": 0, "dilation": 1}
"""The height's numbers in one dimension."""

DEFAULT_INPUTS = {1: "8x4096", 2: "8x64x64"}
"""By the number of dimensions."""

_ONE = "1d:"
"""What the text of a layer of one dimension starts with."""

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
    "32,64,3x5,stride=2x3,groups=4,bias=no. HEIGHTxWIDTH where the two differ. 1d: before it "
    "makes it a torch.nn.ConvTranspose1d: 1d:512,256,16,8,4"
)


@dataclass(frozen=True)
class Layer:
    """A layer and the size of its input. Sizes are in elements, pairs are (height, width).

    With `dimensions` of 1 it is a ConvTranspose1d: its width is the length, its height 1.

    Raises:
        ValueError: parameters that PyTorch would refuse, an input without any output, or a height
            in one dimension.
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
    dimensions: int = 2

    def __post_init__(self) -> None:
        """Refuses what PyTorch would refuse."""
        if self.dimensions not in DEFAULT_INPUTS:
            raise ValueError(f"dimensions must be 1 or 2, got {self.dimensions}")
        if self.dimensions == 1:
            found = {"size": self.height, **{name: getattr(self, name)[0] for name in PAIRS}}
            for name, number in {"size": 1, **_OF_HEIGHT}.items():
                if found[name] != number:
                    raise ValueError(
                        f"{name} must be {number} along the height in one dimension, got "
                        f"{found[name]}"
                    )
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

    def flattened(self) -> Layer:
        """The layer's width alone, as one of one dimension, on as many pixels."""
        pairs: dict[str, Any] = {
            name: (of_height, getattr(self, name)[1]) for name, of_height in _OF_HEIGHT.items()
        }
        width = self.height * self.width
        return dataclasses.replace(self, **pairs, height=1, width=width, dimensions=1)

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
        """The problem of a call on dense tensors of this layout.

        Raises:
            ValueError: channels_last in one dimension, which has no such format.
        """
        last = layout == "channels_last"
        if last and self.dimensions == 1:
            raise ValueError(f"tensors of one dimension have no channels_last format: {self}")
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
                dense_strides(self.w_shape, last),
                dense_strides(self.y_shape, last),
            ),
        )

    @property
    def kind(self) -> str:
        """The class in torch.nn."""
        return f"ConvTranspose{self.dimensions}d"

    def sizes(self, pair: tuple[int, ...]) -> tuple[int, ...]:
        """Sizes that end with (height, width) as PyTorch's layer has them: in one dimension without
        the height.
        """
        return pair if self.dimensions == 2 else (*pair[:-2], pair[-1])

    @property
    def arguments(self) -> str:
        """The arguments of PyTorch's layer: "64, 32, kernel_size=(4, 4), stride=..."."""
        kernel_size = self.sizes(self.kernel_size)
        parts = [str(self.in_channels), str(self.out_channels), f"kernel_size={kernel_size}"]
        for field in dataclasses.fields(self):
            if field.name in ("stride", *PAIRS[2:], "groups", "bias"):
                value = getattr(self, field.name)
                if value != field.default:
                    shown = self.sizes(value) if field.name in PAIRS else value
                    parts.append(f"{field.name}={shown}")
        return ", ".join(parts)

    @property
    def text(self) -> str:
        """The layer without its input, as `parse` reads it."""
        prefix = _ONE if self.dimensions == 1 else ""
        parts = [f"{prefix}{self.in_channels}", str(self.out_channels)]
        parts.append(_pair_text(self.sizes(self.kernel_size)))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in PAIRS[1:] and value != field.default:
                parts.append(f"{field.name}={_pair_text(self.sizes(value))}")
            elif field.name == "groups" and value != 1:
                parts.append(f"groups={value}")
            elif field.name == "bias" and not value:
                parts.append("bias=no")
        return ",".join(parts)

    @property
    def input_text(self) -> str:
        """The input, as `parse` reads it: "8x64x64"."""
        return "x".join(map(str, self.sizes((self.batch, *self.size))))

    def __str__(self) -> str:
        """The name if there is one, the layer, and its input's size."""
        return f"{self.name + ': ' if self.name else ''}{self.text} on {self.input_text}"

    def record(self) -> dict[str, Any]:
        """The layer as a record of a layers file."""
        values = dataclasses.asdict(self)
        if self.dimensions == 2:
            del values["dimensions"]
            return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
        values["length"] = values.pop("width")
        del values["height"]
        return {k: v[1] if isinstance(v, tuple) else v for k, v in values.items()}

    @staticmethod
    def parse(text: str, input: str | None = None) -> Layer:
        """The layer that a line of text describes.

        Args:
            text: see `GRAMMAR`.
            input: "BATCHxHEIGHTxWIDTH", in one dimension "BATCHxLENGTH"; one of `DEFAULT_INPUTS` if
                it is None.

        Raises:
            ValueError: it describes none. The message names the part and what is expected.
        """
        values: dict[str, Any] = {}
        allowed = (*POSITIONAL, "dilation", "bias")
        named = False
        dimensions = 1 if text.lstrip().startswith(_ONE) else 2
        for position, part in enumerate(text.lstrip().removeprefix(_ONE).split(",")):
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
            values[name] = _value(name, value, text, dimensions)
        for name in POSITIONAL[:3]:
            if name not in values:
                raise ValueError(f"a layer needs {name}: {GRAMMAR}; got {text!r}")
        wanted = "BATCHxLENGTH" if dimensions == 1 else "BATCHxHEIGHTxWIDTH"
        given = input or DEFAULT_INPUTS[dimensions]
        batch, *size = _integers(given, f"an input of {text!r} is {wanted}", dimensions + 1)
        height = size[0] if dimensions == 2 else 1
        return Layer(**values, batch=batch, height=height, width=size[-1], dimensions=dimensions)


def read_layers(path: Path) -> list[Layer]:
    """The layers of a JSON file: a list of objects with `Layer`'s fields.

    The kernel's size and the channels are required. A number stands for an equal height and width.
    `source` may say where a layer comes from. With "dimensions": 1 it is a ConvTranspose1d, of
    numbers, and has a `length` in the place of `height` and `width`.

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
    one = record.get("dimensions") == 1
    if one:
        known = known - {"height", "width"} | {"length"}
    values: dict[str, Any] = {}
    for name, value in record.items():
        if name == "source":
            continue
        if name not in known:
            raise ValueError(f"unknown field {name!r}; known are {', '.join(sorted(known))}")
        kind: type = {"name": str, "bias": bool}.get(name, int)
        if name in PAIRS and one:
            fits = type(value) is int
            value = (_OF_HEIGHT[name], value)
        elif name in PAIRS:
            value = (value, value) if isinstance(value, int) else tuple(value)
            fits = len(value) == 2 and all(type(size) is int for size in value)
        else:
            fits = type(value) is kind
        if not fits:
            wanted = "a number or a pair of numbers" if name in PAIRS else f"a {kind.__name__}"
            if name in PAIRS and one:
                wanted = "a number in one dimension"
            raise ValueError(f"{name} must be {wanted}, got {record[name]!r}")
        values[name] = value
    missing = [name for name in POSITIONAL[:3] if name not in values]
    if missing:
        raise ValueError(f"it lacks {', '.join(missing)}")
    if one:
        if "length" not in values:
            values["length"] = int(DEFAULT_INPUTS[1].rpartition("x")[2])
        values.update(height=1, width=values.pop("length"))
    return Layer(**values)


def _value(name: str, value: str, text: str, dimensions: int) -> int | bool | Pair:
    if name == "bias":
        if value.lower() not in ("yes", "no", "true", "false"):
            raise ValueError(f"bias is yes or no, got {value!r} in {text!r}")
        return value.lower() in ("yes", "true")
    if name in PAIRS and dimensions == 2:
        sizes = _integers(value, f"{name} is a number or HEIGHTxWIDTH (in {text!r})", 1, 2)
        return sizes[0], sizes[-1]
    (number,) = _integers(value, f"{name} is a number (in {text!r})", 1)
    return (_OF_HEIGHT[name], number) if name in PAIRS else number


def _integers(text: str, wanted: str, *counts: int) -> tuple[int, ...]:
    parts = text.lower().split("x")
    if len(parts) not in counts or not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"{wanted}, got {text!r}")
    return tuple(map(int, parts))


def _pair_text(pair: tuple[int, ...]) -> str:
    return str(pair[0]) if pair[0] == pair[-1] else f"{pair[0]}x{pair[1]}"
