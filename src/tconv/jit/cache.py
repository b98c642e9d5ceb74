"""A cache of compiled things on disk: cubins, and the emulator's shared libraries.

Each entry is one file, `<key>.tconv`: the payload, then a JSON object that describes it, then a
fixed footer with the sizes and a SHA-256 of all before it. The payload comes first so that the
file can be used as what it holds: ELF readers, `dlopen` among them, ignore what follows.

Any number of processes may use one folder at once: an entry is written under a temporary name in
the same folder and renamed into place, so a reader sees a whole entry or none. There are no lock
files. An entry that does not match its checksum is removed, reported and made again; a folder
that cannot be written costs one warning, and the memory layer does what it can.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import struct
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tconv import settings

FORMAT = 1
"""Version of the entries' layout and of the keys; part of every key."""

SUFFIX = ".tconv"
_TEMPORARY_SUFFIX = ".tconv-temporary"
_SOURCES = "sources"

_MAGIC = b"tconv\x00\r\n"
# magic, format, bytes of the description, bytes of the payload, SHA-256 of payload + description
_FOOTER = struct.Struct("<8sIIQ32s")

# Larger payloads (libraries built with sanitizers) are kept in memory only if they have no file.
_REMEMBERED_BYTES = 1 << 20

_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"\n]+)[>"]', re.MULTILINE)

_logger = logging.getLogger("tconv")
_warned_folders: set[str] = set()


def source_digest(text: str, include_dirs: Sequence[Path], parts: Iterable[str] = ()) -> str:
    """SHA-256 (hexadecimal) of a translation unit and of all that decides what it compiles to.

    Args:
        text: the translation unit.
        include_dirs: the include path, in order. Every file that the text reaches through
            `#include` there is hashed under the name it was included by, so that moving the
            folder changes nothing; a header found nowhere (the compiler's own) counts by name.
        parts: all else: options, architecture, compiler and its version.
    """
    digest = hashlib.sha256()

    def add(kind: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else value
        digest.update(f"{kind}:{len(data)}:".encode())
        digest.update(data)

    add("format", str(FORMAT))
    for part in parts:
        add("part", part)
    add("text", text)
    for name, content in _reached(text, include_dirs):
        add("include", name)
        add("content" if content is not None else "elsewhere", content or b"")
    return digest.hexdigest()


def _reached(text: str, include_dirs: Sequence[Path]) -> Iterator[tuple[str, bytes | None]]:
    """Each include that `text` reaches, once, in a fixed order: its name and its content.

    NOTE: conditions are not evaluated, so this is a superset of what the compiler reads, which
    can only make two keys differ that need not.
    """
    seen: set[str] = set()
    pending: list[tuple[str, Path | None]] = [(text, None)]
    while pending:
        current, folder = pending.pop()
        for opening, name in _INCLUDE.findall(current):
            beside = [folder] if opening == '"' and folder is not None else []
            path = next(
                (base / name for base in [*beside, *include_dirs] if (base / name).is_file()), None
            )
            identity = name if path is None else str(path)
            if identity in seen:
                continue
            seen.add(identity)
            if path is None:
                yield name, None
                continue
            content = path.read_bytes()
            yield name, content
            pending.append((content.decode(errors="replace"), path.parent))


@dataclass(frozen=True)
class Stored:
    """A payload and its description, as they were put."""

    payload: bytes = field(repr=False)
    metadata: Mapping[str, Any]


@dataclass(frozen=True)
class Entry:
    """One entry on disk, for listings; only its footer's structure has been checked."""

    key: str
    path: Path
    nbytes: int
    metadata: Mapping[str, Any]
    damaged: bool


class _Damaged(Exception):
    """The reason why an entry cannot be used."""


class DiskCache:
    """Payloads by key, in memory and, where there is a folder, on disk.

    A key is a file's name: letters, digits, `_`, `.` and `-`, at most 200; the readable part
    comes first and a digest of everything that decides the payload last.

    Args:
        folder: where entries are kept; made when the first is written. None: memory only.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._memory: dict[str, Stored] = {}
        self._lock = threading.Lock()
        self._building: dict[str, _Building] = {}

    def __repr__(self) -> str:
        return f"DiskCache({str(self.folder)!r})" if self.folder else "DiskCache(None)"

    def get(self, key: str) -> bytes | None:
        """The payload of `key`, or None where there is none that is intact."""
        stored = self.lookup(key)
        return None if stored is None else stored.payload

    def lookup(self, key: str) -> Stored | None:
        """The payload of `key` with its description, or None where none is intact."""
        stored = self._memory.get(key)
        if stored is None:
            stored = self._read(key)
            if stored is not None:
                self._remember(key, stored)
        return stored

    def put(
        self, key: str, payload: bytes, metadata: Mapping[str, Any] | None = None
    ) -> Path | None:
        """Keep a payload; one that is there already is replaced.

        Args:
            metadata: JSON-serialisable description, for listings and for whoever looks it up;
                `key` and `created` are added.

        Returns:
            the entry's path, or None where it could be kept in memory only.
        """
        return self._put(key, _described(key, payload, metadata or {}))

    def path(self, key: str) -> Path | None:
        """The path of the intact entry of `key` on disk, whose file starts with the payload.

        An entry that is in memory but no longer on disk is written again. None where there is
        no entry or no folder to keep it in.
        """
        if self._read(key) is not None:
            return self._path(key)
        stored = self._memory.get(key)
        return None if stored is None else self._write(key, stored)

    def get_or_build(
        self, key: str, build: Callable[[], tuple[bytes, Mapping[str, Any]]]
    ) -> tuple[Stored, bool]:
        """The entry of `key`, built where there is none.

        Threads that ask for one key at once build it once. Processes do not wait for each other:
        each builds, and the last one's entry stays.

        Args:
            build: returns payload and description. What it raises passes through and nothing is
                kept; a thread that waited then builds for itself.

        Returns:
            the entry, and whether this call built it.
        """
        stored = self._memory.get(key)
        if stored is not None:
            return stored, False
        with self._only_one(key):
            stored = self.lookup(key)
            if stored is not None:
                return stored, False
            stored = _described(key, *build())
            self._put(key, stored)
            return stored, True

    def entries(self) -> list[Entry]:
        """All entries on disk, in order of their keys."""
        if self.folder is None or not self.folder.is_dir():
            return []
        listed = []
        for path in sorted(self.folder.glob(f"*{SUFFIX}")):
            try:
                nbytes = path.stat().st_size
            except OSError:
                continue  # removed by another process since
            try:
                metadata, damaged = _read_description(path), False
            except (OSError, _Damaged):
                metadata, damaged = {}, True
            listed.append(Entry(path.name[: -len(SUFFIX)], path, nbytes, metadata, damaged))
        return listed

    def size(self) -> int:
        """Bytes that the entries take on disk."""
        return sum(entry.nbytes for entry in self.entries())

    def clear(self) -> int:
        """Forget everything, in memory and on disk; the number of entries removed from disk.

        Only files that this class wrote are removed: entries, leftover temporary files and the
        sources written by `write_source`.
        """
        self._memory.clear()
        if self.folder is None:
            return 0
        removed = 0
        for entry in self.entries():
            _remove(entry.path)
            removed += 1
        for leftover in self.folder.glob(f".*{_TEMPORARY_SUFFIX}"):
            _remove(leftover)
        for source in (self.folder / _SOURCES).glob("*.cu"):
            _remove(source)
        return removed

    def write_source(self, name: str, text: str) -> Path | None:
        """Write a generated source where a person can read it: `<folder>/sources/<name>.cu`.

        Without a usable folder it goes below the system's temporary folder; None where that
        fails too.
        """
        file_name = f"{_checked(name)}.cu"
        if self.folder is not None:
            with contextlib.suppress(OSError):
                path = self.folder / _SOURCES / file_name
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, [text.encode()])
                return path
        with contextlib.suppress(OSError):
            path = Path(tempfile.mkdtemp(prefix=f"tconv-{_SOURCES}-")) / file_name
            write_whole(path, [text.encode()])
            return path
        return None

    def _put(self, key: str, stored: Stored) -> Path | None:
        path = self._write(key, stored)
        self._memory.pop(key, None)
        self._remember(key, stored, only_copy=path is None)
        return path

    def _remember(self, key: str, stored: Stored, only_copy: bool = False) -> None:
        if only_copy or len(stored.payload) <= _REMEMBERED_BYTES:
            self._memory[key] = stored

    def _path(self, key: str) -> Path | None:
        return None if self.folder is None else self.folder / f"{_checked(key)}{SUFFIX}"

    def _read(self, key: str) -> Stored | None:
        path = self._path(key)
        if path is None:
            return None
        try:
            data = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except IsADirectoryError:
            reason = "a folder is in its place"
        except OSError as error:
            self._warn_once("read", error)
            return None
        else:
            try:
                return _unpack(data, key)
            except _Damaged as damage:
                reason = str(damage)
        _logger.warning("the cache entry %s is damaged and will be made again: %s", path, reason)
        _remove(path)
        return None

    def _write(self, key: str, stored: Stored) -> Path | None:
        path = self._path(key)
        if path is None:
            return None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, _pack(stored))
        except OSError as error:
            self._warn_once("written", error)
            return None
        return path

    def _warn_once(self, verb: str, error: OSError) -> None:
        folder = str(self.folder)
        if folder in _warned_folders:
            return
        _warned_folders.add(folder)
        _logger.warning(
            "the cache folder %s cannot be %s (%s): compiled kernels are kept in memory only. "
            "Set TCONV_CACHE_DIR to another folder, or TCONV_CACHE=0 to keep none",
            folder,
            verb,
            error,
        )

    @contextlib.contextmanager
    def _only_one(self, key: str) -> Iterator[None]:
        """Let one thread at a time in for `key`; its lock lives while somebody wants it."""
        with self._lock:
            building = self._building.setdefault(key, _Building())
            building.users += 1
        try:
            with building.lock:
                yield
        finally:
            with self._lock:
                building.users -= 1
                if building.users == 0:
                    del self._building[key]


@dataclass
class _Building:
    """The lock of a key that some threads are at, and how many they are."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    users: int = 0


_caches: dict[Path | None, DiskCache] = {}
_caches_lock = threading.Lock()


def default_cache() -> DiskCache:
    """The cache that the settings ask for now (`TCONV_CACHE`, `TCONV_CACHE_DIR`).

    One for each folder, so that its memory layer lasts as long as the process.
    """
    folder = settings.cache_dir() if settings.cache_enabled() else None
    with _caches_lock:
        return _caches.setdefault(folder, DiskCache(folder))


def _described(key: str, payload: bytes, metadata: Mapping[str, Any]) -> Stored:
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Stored(payload, {**metadata, "key": key, "created": created})


def _checked(key: str) -> str:
    if _KEY.fullmatch(key) is None:
        raise ValueError(f"a cache key has 1 to 200 letters, digits, '_', '.' and '-', got {key!r}")
    return key


def _pack(stored: Stored) -> list[bytes]:
    description = json.dumps(dict(stored.metadata), sort_keys=True).encode()
    digest = hashlib.sha256(stored.payload)
    digest.update(description)
    footer = _FOOTER.pack(_MAGIC, FORMAT, len(description), len(stored.payload), digest.digest())
    return [stored.payload, description, footer]


def _unpack(data: bytes, key: str) -> Stored:
    body, footer = data[: -_FOOTER.size], data[-_FOOTER.size :]
    description_bytes, payload_bytes, digest = _unpack_footer(footer, len(data))
    if hashlib.sha256(body).digest() != digest:
        raise _Damaged("its content does not match its checksum")
    metadata = _unpack_description(body[payload_bytes:])
    assert len(body) == payload_bytes + description_bytes
    if metadata.get("key") != key:
        raise _Damaged(f"it belongs to the key {metadata.get('key')!r}")
    return Stored(body[:payload_bytes], metadata)


def _unpack_footer(footer: bytes, file_bytes: int) -> tuple[int, int, bytes]:
    """Bytes of the description, bytes of the payload, and the digest of both."""
    if len(footer) != _FOOTER.size:
        raise _Damaged(f"it has {file_bytes} bytes, fewer than any entry")
    magic, version, description_bytes, payload_bytes, digest = _FOOTER.unpack(footer)
    if magic != _MAGIC:
        raise _Damaged("it does not end as an entry does (cut short, or no entry)")
    if version != FORMAT:
        raise _Damaged(f"its format is {version}, this version of tconv writes {FORMAT}")
    expected = payload_bytes + description_bytes + _FOOTER.size
    if expected != file_bytes:
        raise _Damaged(f"it has {file_bytes} bytes, its footer says {expected}")
    return description_bytes, payload_bytes, digest


def _unpack_description(data: bytes) -> dict[str, Any]:
    try:
        metadata = json.loads(data)
    except ValueError:
        raise _Damaged("its description is no JSON") from None
    if not isinstance(metadata, dict):
        raise _Damaged("its description is no JSON object")
    return metadata


def _read_description(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        file_bytes = file.seek(0, os.SEEK_END)
        file.seek(max(0, file_bytes - _FOOTER.size))
        description_bytes, payload_bytes, _ = _unpack_footer(file.read(), file_bytes)
        file.seek(payload_bytes)
        return _unpack_description(file.read(description_bytes))


def write_whole(path: Path, chunks: Iterable[bytes]) -> None:
    """Write a file whole, or not at all."""
    # NOTE: not tempfile.mkstemp, whose files only their owner may read: folders may be shared.
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}{_TEMPORARY_SUFFIX}")
    try:
        with temporary.open("xb") as file:
            for chunk in chunks:
                file.write(chunk)
        os.replace(temporary, path)
    except BaseException:
        _remove(temporary)
        raise


def _remove(path: Path) -> None:
    """Remove what is at `path`, whatever it is, if it can be."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
