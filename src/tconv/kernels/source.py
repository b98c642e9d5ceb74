"""`KernelSource`: one specialised kernel as text, and the bytes of its arguments.

A kernel reads its constants by name from `struct Layer`. What varies from call to call is its one
by-value parameter, `struct Arguments`. Both structs are generated from the lists that the host
packs, so the two sides cannot disagree.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from pathlib import Path

from tconv import includes

KERNEL_DIRECTORY = Path(__file__).resolve().parent

Constant = int | float | bool | str | tuple[int, ...]


@cache
def file_of(stem: str) -> str:
    """A kernel's file as its text includes it: `<family>/<stem>.cu`, or `<stem>.cu`."""
    paths = KERNEL_DIRECTORY.glob(f"*/{stem}.cu")
    return next((path.relative_to(KERNEL_DIRECTORY).as_posix() for path in paths), f"{stem}.cu")


TENSOR_MAP = "ptx::TensorMap"
TENSOR_MAP_BYTES = 128

# C type of a field -> its `struct` code; the code's native size is also its alignment.
_FIELD_CODES = {"int": "i", "unsigned": "I", "long long": "q", "float": "f", "double": "d"}


@dataclass(frozen=True)
class KernelSource:
    """The text of one kernel, specialised for one layer and tile.

    Attributes:
        stem: the kernel's name. It names `<family>/<stem>.cu`, the entry point, the cache entry
            and the profiler's row.
        constants: name and value of each member of `struct Layer`. A str value is a C++ type
            (`using name = value;`), a tuple is an array of int.
        arguments: name and C type of each field of `struct Arguments`, in order.
        shared_bytes: dynamic shared memory of a block, in bytes.
        threads: threads of a block.
        repair_source: the kernel whose functions each block runs at its end, or None. Their text
            is in `namespace repair`. They have a `Layer` of their own and the same arguments.
            The text then defines TCONV_REPAIR. It also defines TCONV_INNER around these
            functions, which omits their entry point.
    """

    stem: str
    constants: tuple[tuple[str, Constant], ...]
    arguments: tuple[tuple[str, str], ...]
    shared_bytes: int
    threads: int
    repair_source: KernelSource | None = field(default=None, kw_only=True)

    @property
    def path(self) -> Path:
        """The kernel's `.cu` file."""
        return KERNEL_DIRECTORY / file_of(self.stem)

    def text(self) -> str:
        """The complete translation unit: the generated structs, then the kernel's file."""
        return self._text

    @cached_property
    def _text(self) -> str:
        fields = "".join(f"    {type_} {name};\n" for name, type_ in self.arguments)
        constants = "".join(
            f"    {_declaration(name, value)}\n"
            for name, value in (("threads", self.threads), *self.constants)
        )
        maps = any(type_ == TENSOR_MAP for _, type_ in self.arguments)
        repair = "" if self.repair_source is None else _inner(self.repair_source)
        return (
            "#include <ptx/cuda.cuh>\n"
            + ("#include <ptx/tensor_map.cuh>\n" if maps else "")
            + "#include <common/element.cuh>\n"
            f"struct Arguments {{\n{fields}}};\n"
            f"{repair}"
            f"struct Layer {{\n{constants}}};\n"
            f"#include <{file_of(self.stem)}>\n"
        )

    @cached_property
    def _layout(self) -> tuple[struct.Struct, Mapping[str, int]]:
        return _layout(self.arguments)

    @property
    def offsets(self) -> Mapping[str, int]:
        """Where each field of `struct Arguments` lies in its bytes."""
        return self._layout[1]

    def pack(self, **values: int | float | bytes) -> bytes:
        """The bytes of `struct Arguments`, in C's natural alignment.

        Args:
            **values: one value for each field, by name: pointers as int addresses, tensor maps
                as their 128 bytes.

        Raises:
            TypeError: a field is missing or unknown.
        """
        layout, offsets = self._layout
        if values.keys() != offsets.keys():
            raise TypeError(
                f"{self.stem} takes the arguments {sorted(offsets)}, got {sorted(values)}"
            )
        return layout.pack(*map(values.__getitem__, offsets))


def _inner(source: KernelSource) -> str:
    """A kernel's functions in `namespace repair`, for a kernel whose blocks end with them."""
    files = includes.files(file_of(source.stem), KERNEL_DIRECTORY)
    first = "".join(f"#include <{name}>\n" for name in files if name.startswith("ptx/"))
    texts = "".join(text for name, text in files.items() if not name.startswith("ptx/"))
    constants = "".join(
        f"    {_declaration(name, value)}\n"
        for name, value in (("threads", source.threads), *source.constants)
    )
    return (
        f"{first}#define TCONV_INNER\nnamespace repair {{\n"
        f"struct Layer {{\n{constants}}};\n{texts}\n}}\n#undef TCONV_INNER\n#define TCONV_REPAIR\n"
    )


@lru_cache(maxsize=256)
def _layout(arguments: tuple[tuple[str, str], ...]) -> tuple[struct.Struct, Mapping[str, int]]:
    """The bytes of `struct Arguments`, and where each field lies in them, in order.

    Remembered: each new image size makes sources with the same few.
    """
    offsets, end, codes, alignment = {}, 0, ["="], 1
    for name, type_ in arguments:
        code, size, align = _field(type_)
        padding = -end % align
        codes.append(f"{padding}x{code}" if padding else code)
        offsets[name] = end + padding
        end += padding + size
        alignment = max(alignment, align)
    if -end % alignment:
        codes.append(f"{-end % alignment}x")
    return struct.Struct("".join(codes)), offsets


def _field(type_: str) -> tuple[str, int, int]:
    """`struct` code, size and alignment of a C type."""
    if type_ == TENSOR_MAP:
        return f"{TENSOR_MAP_BYTES}s", TENSOR_MAP_BYTES, 64
    code = "Q" if type_.endswith("*") else _FIELD_CODES[type_]
    size = struct.calcsize(f"={code}")
    return code, size, size


def _declaration(name: str, value: Constant) -> str:
    if isinstance(value, str):
        return f"using {name} = {value};"
    if isinstance(value, bool):
        return f"static constexpr bool {name} = {str(value).lower()};"
    if isinstance(value, int):
        return f"static constexpr int {name} = {value};"
    if isinstance(value, float):
        return f"static constexpr double {name} = {value!r};"
    elements = ", ".join(map(str, value))
    return f"static constexpr int {name}[{len(value)}] = {{{elements}}};"
