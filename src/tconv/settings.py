"""All environment variables that tconv reads, in one table.

Each is read at use and never at import, so a program may set it at any time before the call. A
value that is not allowed raises ValueError, with the variable, the value and what is allowed. The
accessors are cheap enough for a hot path: a text is parsed once, and again only after it changed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Variable:
    """One environment variable, as the documentation and `tconv info` print it."""

    name: str
    default: str
    allowed: str
    meaning: str


def _refuse(name: str, value: str, allowed: str) -> ValueError:
    return ValueError(f"{name} must be {allowed}, got {name}={value!r}")


class _Setting(Generic[T]):
    """The reader of one variable. It keeps the last parsed text and its value.

    An empty value counts as unset, so that `TCONV_X= command` turns a variable off.
    """

    def __init__(
        self,
        name: str,
        default: T,
        parse: Callable[[str], T],
        *,
        shown_default: str,
        allowed: str,
        meaning: str,
    ) -> None:
        self.variable = Variable(name, shown_default, allowed, meaning)
        self._name = name
        self.key = os.environ.encodekey(name)
        self._default = default
        self._parse = parse
        # One tuple, replaced as a whole: other threads see the old pair or the new one.
        self._last: tuple[str, T] = ("", default)

    def __call__(self) -> T:
        # The dict behind `os.environ`: `os.environ.get` takes a microsecond for a missing variable.
        if not os.environ._data.get(self.key):  # type: ignore[attr-defined]
            return self._default
        text = os.environ[self._name]
        last_text, last_value = self._last
        if text == last_text:
            return last_value
        try:
            value = self._parse(text)
        except ValueError:
            raise _refuse(self._name, text, self.variable.allowed) from None
        self._last = (text, value)
        return value


def _parse_switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError
    return text == "1"


def _parse_level(text: str) -> int:
    if text not in ("0", "1", "2", "3"):
        raise ValueError
    return int(text)


def _matching(pattern: str) -> Callable[[str], str]:
    compiled = re.compile(pattern)

    def parse(text: str) -> str:
        if compiled.fullmatch(text) is None:
            raise ValueError
        return text

    return parse


def _parse_directory(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.is_absolute():
        raise ValueError
    return path


def _parse_bytes(text: str) -> int:
    match = re.fullmatch(r"([1-9][0-9]{0,17})([KMG]?)", text)
    if match is None:
        raise ValueError
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]


_SWITCH = "0 or 1"

_cache = _Setting(
    "TCONV_CACHE",
    True,
    _parse_switch,
    shown_default="1",
    allowed=_SWITCH,
    meaning="0 keeps compiled kernels in memory only, for the life of the process",
)
_cache_dir = _Setting[Path | None](
    "TCONV_CACHE_DIR",
    None,
    _parse_directory,
    shown_default="$XDG_CACHE_HOME/tconv, else ~/.cache/tconv",
    allowed="an absolute path (or one that starts with ~)",
    meaning=(
        "the folder that keeps compiled kernels between runs; refused if another user owns it or "
        "can write to it"
    ),
)
_cache_limit = _Setting(
    "TCONV_CACHE_LIMIT",
    1 << 30,
    _parse_bytes,
    shown_default="1G",
    allowed="a whole number of bytes from 1 on (with K, M or G behind it: of KiB, MiB or GiB)",
    meaning="the size that the cache folder is kept to: what was not used for longest goes",
)
_debug = _Setting(
    "TCONV_DEBUG",
    0,
    _parse_level,
    shown_default="0",
    allowed="0, 1, 2 or 3",
    meaning=(
        "1 prints each plan to stderr; 2 also compiler options, resources and times, and adds "
        "line information to kernels; 3 also writes each generated source into the cache folder's "
        "sources/"
    ),
)
_emulate = _Setting(
    "TCONV_EMULATE",
    False,
    _parse_switch,
    shown_default="0",
    allowed=_SWITCH,
    meaning="1 runs the kernels on CPU tensors, compiled by the host's C++ compiler",
)
_emulate_arch = _Setting(
    "TCONV_EMULATE_ARCH",
    "sm_90a",
    _matching(r"sm_[1-9][0-9]{1,2}[af]?"),
    shown_default="sm_90a",
    allowed="an architecture such as sm_80 or sm_90a",
    meaning="the GPU architecture that plans are made for under TCONV_EMULATE=1",
)
_kernel = _Setting[str | None](
    "TCONV_KERNEL",
    None,
    _matching(r"[a-z][a-z0-9_]*"),
    shown_default="",
    allowed="the stem of a kernel (small letters, digits and _)",
    meaning="only this kernel is planned; a problem that it refuses is an error",
)
_sanitize = _Setting(
    "TCONV_SANITIZE",
    False,
    _parse_switch,
    shown_default="0",
    allowed=_SWITCH,
    meaning="1 builds emulated kernels with AddressSanitizer and UndefinedBehaviorSanitizer",
)
_strict = _Setting(
    "TCONV_STRICT",
    False,
    _parse_switch,
    shown_default="0",
    allowed=_SWITCH,
    meaning="1 keeps to our kernels, and raises where none of them serves a call",
)

_timing = _Setting(
    "TCONV_TIMING",
    True,
    _parse_switch,
    shown_default="1",
    allowed=_SWITCH,
    meaning=(
        "0 never times our kernel against PyTorch's operator: PyTorch runs where nothing else "
        "tells which is faster"
    ),
)

_ALL: tuple[_Setting[Any], ...] = (
    _cache,
    _cache_dir,
    _cache_limit,
    _debug,
    _emulate,
    _emulate_arch,
    _kernel,
    _sanitize,
    _strict,
    _timing,
)

VARIABLES: tuple[Variable, ...] = tuple(setting.variable for setting in _ALL)
"""Every variable that tconv reads, in alphabetical order."""


def cache_enabled() -> bool:
    """Whether compiled kernels are kept on disk (`TCONV_CACHE`, default 1)."""
    return _cache()


def cache_dir() -> Path:
    """The folder of the disk cache (`TCONV_CACHE_DIR`). It need not exist, and is not created."""
    configured = _cache_dir()
    if configured is not None:
        return configured
    # NOTE: the XDG specification says to ignore a relative $XDG_CACHE_HOME.
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache"
    return base / "tconv"


def cache_limit() -> int:
    """Bytes that the cache folder may take (`TCONV_CACHE_LIMIT`, default 1 GiB)."""
    return _cache_limit()


def debug() -> int:
    """The debug level, 0 to 3 (`TCONV_DEBUG`, default 0)."""
    return _debug()


def emulate() -> bool:
    """Whether CPU tensors run our kernels through the emulator (`TCONV_EMULATE`, default 0)."""
    return _emulate()


def emulate_arch() -> str:
    """The architecture that emulated plans are made for (`TCONV_EMULATE_ARCH`, "sm_90a")."""
    return _emulate_arch()


def kernel() -> str | None:
    """The stem of the only kernel to plan, or None for all (`TCONV_KERNEL`)."""
    return _kernel()


def sanitize() -> bool:
    """Whether emulated kernels are built with the sanitizers (`TCONV_SANITIZE`, default 0)."""
    return _sanitize()


def strict() -> bool:
    """Whether to use only our kernels, and raise if none serves (`TCONV_STRICT`, default 0)."""
    return _strict()


def timing() -> bool:
    """Whether our kernel may be timed against PyTorch's operator (`TCONV_TIMING`, default 1)."""
    return _timing()


def keeps_to_own_kernels() -> bool:
    """Whether `TCONV_STRICT` or `TCONV_KERNEL` may keep calls to our kernels: one of them is set.

    It parses nothing, since every call asks.
    """
    return bool(environment.get(_strict.key) or environment.get(_kernel.key))


# What `os.environ.get` looks in, which takes a microsecond to say that there is nothing.
environment: dict[Any, Any] = os.environ._data  # type: ignore[attr-defined]

own_kernels_keys = (_strict.key, _kernel.key)
"""The keys, in `environment`, of what `keeps_to_own_kernels` asks for."""


def current() -> dict[str, str]:
    """The text of each variable, "" if it is not set. Nothing is checked."""
    return {variable.name: os.environ.get(variable.name, "") for variable in VARIABLES}


def check() -> None:
    """Parse every variable that is set.

    Raises:
        ValueError: a value is not allowed. The message has the first such variable, its value and
            what is allowed.
    """
    for setting in _ALL:
        setting()
