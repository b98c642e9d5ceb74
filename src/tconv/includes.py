"""The one reader of `#include`: which files a text reaches, and the text with these in it.

Conditions of the preprocessor are not evaluated: a text reaches every file that it names.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

_DIRECTIVE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"\n]+)[>"][^\n]*\n?', re.MULTILINE)
_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[ \t]*\n", re.MULTILINE)


def replaced(text: str, by: Callable[[str], str | None]) -> str:
    """The text, each line that includes a file replaced by what `by` makes of its name.

    None leaves the line as it is.
    """

    def one(match: re.Match[str]) -> str:
        new = by(match[2])
        return match[0] if new is None else new

    return _DIRECTIVE.sub(one, text)


def without_guard(text: str) -> str:
    """The text without `#pragma once`."""
    return _ONCE.sub("", text)


def files(name: str, directory: Path) -> dict[str, str]:
    """The file of that name and all that it reaches in `directory`, each after those it includes.

    Returns:
        name -> text, without includes and `#pragma once`.

    Raises:
        OSError: a file is not there.
    """
    found: dict[str, str] = {}

    def add(name: str) -> str:
        if name not in found:
            text = replaced((directory / name).read_text(encoding="utf-8"), add)
            found.setdefault(name, without_guard(text))
        return ""

    add(name)
    return found


def inlined(text: str, directory: Path) -> str:
    """The text with every file of `directory` that it reaches in it, where it is first included."""
    seen: set[str] = set()

    def body(name: str) -> str | None:
        path = directory / name
        if name in seen:
            return ""
        if not path.is_file():
            return None
        seen.add(name)
        inner = replaced(without_guard(path.read_text(encoding="utf-8")), body)
        return f"// {name}\n{inner.rstrip()}\n"

    return replaced(text, body)


def reached(text: str, directories: Sequence[Path]) -> Iterator[tuple[str, bytes | None]]:
    """Each file that the text reaches, once, in a fixed order: its name and its content.

    Args:
        text: a translation unit.
        directories: the include path, in order. A file that is in none of them has no content.
    """
    # Strings, as each kernel's load comes here: a `Path` takes longer than its file's reading.
    seen: set[str] = set()
    pending = [(_names(text.encode(errors="surrogatepass")), "")]
    folders = [str(directory) for directory in directories]
    while pending:
        names, folder = pending.pop()
        for opening, name in names:
            beside = [folder] if opening == '"' and folder else []
            paths = (os.path.join(base, name) for base in (*beside, *folders))
            path = next((path for path in paths if os.path.isfile(path)), None)
            identity = name if path is None else path
            if identity in seen:
                continue
            seen.add(identity)
            if path is None:
                yield name, None
                continue
            with open(path, "rb", buffering=0) as file:
                content = file.read()
            yield name, content
            pending.append((_names(content), os.path.dirname(path)))


@functools.lru_cache(maxsize=256)
def _names(text: bytes) -> list[tuple[str, str]]:
    """Opening quote and name of each directive."""
    return _DIRECTIVE.findall(text.decode(errors="replace"))
