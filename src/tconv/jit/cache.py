"""A cache of compiled things on disk: cubins, the emulator's builds, and what autotune chose.

Each entry is one file, `<key>.tconv`: the payload, then a JSON object that describes it, then a
fixed footer with the sizes and a SHA-256 of all before it, which is checked at every load. The
payload comes first so that tools which read ELF files, `cuobjdump` among them, take the file as it
is. An entry that cannot be used is removed, reported and made again.

What is loaded from here runs in the process, so nobody else may put it here. The folder is made
for its owner alone, and is refused where another user owns it or a folder above it, or could write
to them, as ssh refuses its keys; so is an entry. One warning says what to do, and the process
keeps in memory what it compiles, as where the folder cannot be written. Root is trusted.

Any number of processes may use one folder at once: an entry is written under a temporary name in
the same folder and renamed into place, so a reader sees a whole entry or none. There are no lock
files. A file's time of modification is when it was last used: a process that writes removes the
oldest beyond `TCONV_CACHE_LIMIT`, and what killed writers left.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from tconv import includes, settings
from tconv.jit import files

FORMAT = 2
"""Version of the entries' layout, of their descriptions and of the keys; part of every key."""

SUFFIX = ".tconv"
_SOURCES = "sources"

MAX_ENTRY_BYTES = 64 << 20
"""Of an entry's file: one that is larger is neither written nor read."""

_LEFTOVER_SECONDS = 3600.0  # a temporary file this old has no writer any more

_MAGIC = b"tconv\x00\r\n"
# magic, format, bytes of the description, bytes of the payload, SHA-256 of payload + description
_FOOTER = struct.Struct("<8sIIQ32s")

# The names of all that is written here. Each key ends in a digest, as few other files' names do.
_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}-[0-9a-f]{64}")
_ENTRY_NAME = re.compile(_KEY.pattern + re.escape(SUFFIX))
_SOURCE_NAME = re.compile(_KEY.pattern + r"\.(cu|cpp)")
_TEMPORARY_NAME = re.compile(r"\..{1,100}\.[0-9a-f]{16}" + re.escape(files.TEMPORARY_SUFFIX))

T = TypeVar("T")

_logger = logging.getLogger("tconv")
_warned: set[Path] = set()


def source_digest(text: str, include_dirs: Sequence[Path], parts: Iterable[str] = ()) -> str:
    """SHA-256 (hexadecimal) of a translation unit and of all that decides what it compiles to.

    Args:
        text: the translation unit.
        include_dirs: the include path, in order. Every file that the text reaches through
            `#include` there is hashed under the name it was included by, so that moving the
            folder changes nothing; a header found nowhere (the compiler's own) counts by name.
            Conditions are not evaluated, which can only make two keys differ that need not.
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
    for name, content in includes.reached(text, include_dirs):
        add("include", name)
        add("content" if content is not None else "elsewhere", content or b"")
    return digest.hexdigest()


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
    """Payloads by key, on disk, and in memory those that cannot be kept there.

    A key is a file's name, of letters, digits, `_`, `.` and `-`: a readable part of at most 100,
    `-`, and the `source_digest` of everything that decides the payload.

    Args:
        folder: where entries are kept; made when the first is written. None: memory only.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._memory: dict[str, Stored] = {}
        self._building: dict[str, threading.Lock] = {}
        # Bytes of all files, once this process has written one: counted then, and again when what
        # it has written since takes the sum over the limit.
        self._bytes_on_disk: int | None = None

    def __repr__(self) -> str:
        return f"DiskCache({str(self.folder)!r})" if self.folder else "DiskCache(None)"

    def why_not(self) -> str | None:
        """Why the folder is not used: who else could change what is in it, and what to do."""
        return None if self.folder is None else _why_not(Path(os.path.realpath(self.folder)))

    def get(self, key: str) -> bytes | None:
        """The payload of `key`, or None where there is none that is intact."""
        stored = self.lookup(key)
        return None if stored is None else stored.payload

    def lookup(self, key: str) -> Stored | None:
        """The payload of `key` with its description, or None where none is intact."""
        return self._memory.get(key) or self._read(key)

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

    def get_or_build(
        self,
        key: str,
        build: Callable[[], tuple[bytes, Mapping[str, Any]]],
        read: Callable[[Stored], T],
    ) -> tuple[T, bool]:
        """The entry of `key`, built where there is none that can be read.

        Threads that ask for one key at once build it once. Processes do not wait for each other:
        each builds, and the last one's entry stays.

        Args:
            build: returns payload and description. What it raises passes through and nothing is
                kept; a thread that waited then builds for itself.
            read: makes of the entry what is wanted; KeyError, TypeError or ValueError say that
                the description is not what it should be, and the entry is built again.

        Returns:
            what `read` returned, and whether this call built the entry.
        """
        with self._building.setdefault(key, threading.Lock()):
            stored = self.lookup(key)
            if stored is not None:
                try:
                    return read(stored), False
                except (KeyError, TypeError, ValueError) as error:
                    _warn_damaged(key, f"its description cannot be read ({error!r})")
            stored = _described(key, *build())
            self._put(key, stored)
            return read(stored), True

    def entries(self) -> list[Entry]:
        """All entries on disk, in order of their keys."""
        folder = self._ready()
        listed = []
        for path, status in sorted(_ours(folder, _ENTRY_NAME)) if folder else ():
            try:
                metadata, damaged = _read_description(path), False
            except FileNotFoundError:
                continue  # removed by another process since
            except (OSError, _Damaged, files.NoFile, files.Unsafe):
                metadata, damaged = {}, True
            key = path.name.removesuffix(SUFFIX)
            listed.append(Entry(key, path, status.st_size, metadata, damaged))
        return listed

    def size(self) -> int:
        """Bytes that all files of the cache take on disk, also sources and temporary files."""
        folder = self._ready()
        return sum(status.st_size for _, status in _all_ours(folder)) if folder else 0

    def clear(self) -> list[Path]:
        """Forget everything, in memory and on disk.

        Only files that this class wrote, by their names and places, are removed: entries,
        temporary files, and the sources written by `write_source`.

        Returns:
            what else is there, as paths below the folder.
        """
        self._memory.clear()
        folder = self._ready()
        if folder is None or not folder.is_dir():
            return []
        for path, _ in _all_ours(folder):
            files.remove(path)
        sources = folder / _SOURCES
        with contextlib.suppress(OSError):
            sources.rmdir()
        left = {*folder.iterdir(), *sources.glob("*")} - {sources}
        ours = {path for path, _ in _all_ours(folder)}  # of other processes, since
        return sorted(path.relative_to(folder) for path in left - ours)

    def write_source(self, name: str, text: str, elsewhere: Path | None = None) -> Path | None:
        """Write a generated source where a person can read it: `<folder>/sources/<name>`.

        Args:
            name: a key, and `.cu` or `.cpp`.
            elsewhere: the folder to take where that one cannot be used; None takes a new one
                below the system's temporary folder.

        Returns:
            its path, or None where it could not be written.
        """
        if _SOURCE_NAME.fullmatch(name) is None:
            raise ValueError(f"a source's name is a cache key and .cu or .cpp, got {name!r}")
        folder = self._ready(make=True)
        if folder is not None:
            with contextlib.suppress(OSError):
                files.make_folder(folder / _SOURCES)
                self._write_file(folder, folder / _SOURCES / name, [text.encode()])
                return folder / _SOURCES / name
        with contextlib.suppress(OSError):
            path = (elsewhere or Path(tempfile.mkdtemp(prefix=f"tconv-{_SOURCES}-"))) / name
            files.write_whole(path, [text.encode()])
            return path
        return None

    def _put(self, key: str, stored: Stored) -> Path | None:
        path = self._write(key, stored)
        if path is None:
            self._memory[key] = stored
        else:
            self._memory.pop(key, None)
        return path

    def _ready(self, make: bool = False) -> Path | None:
        """The folder, its links followed, if nobody else can change it; made first if `make`.

        NOTE: what this returns is to be used, not `self.folder`: links can be changed.
        """
        if self.folder is None:
            return None
        folder = Path(os.path.realpath(self.folder))
        reason = _why_not(folder)
        if reason is None and make:
            try:
                files.make_folder(folder)
            except OSError as error:
                self._cannot_write(error)
                return None
            reason = _why_not(folder)  # another user may have been quicker
        if reason is not None:
            _warn_once(self.folder, f"{reason} Compiled kernels are kept in memory only.")
            return None
        return folder

    def _read(self, key: str) -> Stored | None:
        name, folder = f"{_checked(key)}{SUFFIX}", self._ready()
        if folder is None:
            return None
        path = folder / name
        try:
            with files.open_safely(path, MAX_ENTRY_BYTES) as file:
                stored = _unpack(file.read(MAX_ENTRY_BYTES), key)
                with contextlib.suppress(OSError):  # root's entries, read-only file systems
                    os.utime(file.fileno())
                return stored
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            _warn_once(folder, f"the cache entry {path} is made again: it cannot be read ({error})")
        except files.Unsafe as reason:
            _warn_once(path, f"the cache entry is not used: {reason}")
        except (files.NoFile, _Damaged) as damage:
            _warn_damaged(path, damage)
            files.remove(path)
        return None

    def _write(self, key: str, stored: Stored) -> Path | None:
        name, folder = f"{_checked(key)}{SUFFIX}", self._ready(make=True)
        chunks = _pack(stored)
        if folder is None or sum(map(len, chunks)) > min(MAX_ENTRY_BYTES, settings.cache_limit()):
            return None
        path = folder / name
        try:
            with contextlib.suppress(FileNotFoundError):
                files.check_safe(path, os.lstat(path))
            self._write_file(folder, path, chunks)
        except OSError as error:
            self._cannot_write(error)
            return None
        except files.Unsafe as reason:
            _warn_once(path, f"the cache entry is not used: {reason}")
            return None
        return path

    def _write_file(self, folder: Path, path: Path, chunks: Sequence[bytes]) -> None:
        try:
            files.write_whole(path, chunks, mode=0o600)
        except FileNotFoundError:  # `clear` in another process, between writing and renaming
            files.make_folder(path.parent)
            files.write_whole(path, chunks, mode=0o600)
        limit = settings.cache_limit()
        if self._bytes_on_disk is not None:
            self._bytes_on_disk += sum(map(len, chunks))
        if self._bytes_on_disk is None or self._bytes_on_disk > limit:
            self._bytes_on_disk = _trim(folder, limit)

    def _cannot_write(self, error: OSError) -> None:
        assert self.folder is not None
        _warn_once(
            self.folder,
            f"the cache folder {self.folder} cannot be written ({error}): compiled kernels are "
            "kept in memory only. Set TCONV_CACHE_DIR to another folder, or TCONV_CACHE=0 to keep "
            "none",
        )


_caches: dict[Path | None, DiskCache] = {}


def default_cache() -> DiskCache:
    """The cache that the settings ask for now (`TCONV_CACHE`, `TCONV_CACHE_DIR`).

    One for each folder, so that its memory layer lasts as long as the process.
    """
    folder = settings.cache_dir() if settings.cache_enabled() else None
    return _caches.setdefault(folder, DiskCache(folder))


def _described(key: str, payload: bytes, metadata: Mapping[str, Any]) -> Stored:
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Stored(payload, {**metadata, "key": key, "created": created})


def _checked(key: str) -> str:
    if _KEY.fullmatch(key) is None:
        raise ValueError(
            "a cache key is 1 to 100 letters, digits, '_', '.' and '-', then '-' and a SHA-256, "
            f"got {key!r}"
        )
    return key


def _ours(folder: Path, *names: re.Pattern[str]) -> Iterator[tuple[Path, os.stat_result]]:
    """The regular files of a folder with such names, and what the file system says of each."""
    try:
        found = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for item in found:
        if any(name.fullmatch(item.name) for name in names):
            with contextlib.suppress(FileNotFoundError):  # removed by another process since
                status = item.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    yield Path(item.path), status


def _all_ours(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """All files that were written to a cache folder."""
    yield from _ours(folder, _ENTRY_NAME, _TEMPORARY_NAME)
    yield from _ours(folder / _SOURCES, _SOURCE_NAME, _TEMPORARY_NAME)


def _trim(folder: Path, limit: int) -> int:
    """Removes old temporary files, and of the others the longest unused until `limit` bytes hold.

    Returns:
        bytes of the files that are left.
    """
    kept = []
    for path, status in _all_ours(folder):
        if not path.name.endswith(files.TEMPORARY_SUFFIX):
            kept.append((status.st_mtime_ns, status.st_size, path))
        elif time.time() - status.st_mtime > _LEFTOVER_SECONDS:
            files.remove(path)
    total = sum(nbytes for _, nbytes, _ in kept)
    for _, nbytes, path in sorted(kept):
        if total <= limit:
            break
        files.remove(path)
        total -= nbytes
    return total


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
    with files.open_safely(path, MAX_ENTRY_BYTES) as file:
        file_bytes = file.seek(0, os.SEEK_END)
        file.seek(max(0, file_bytes - _FOOTER.size))
        description_bytes, payload_bytes, _ = _unpack_footer(file.read(), file_bytes)
        file.seek(payload_bytes)
        return _unpack_description(file.read(description_bytes))


def _why_not(folder: Path) -> str | None:
    reason = files.why_unsafe(folder)
    return reason and (
        f"the cache folder {folder} is not used, because others could put code there: {reason}. "
        "TCONV_CACHE_DIR can name another folder, one that only you can write to."
    )


def _warn_damaged(entry: Path | str, reason: object) -> None:
    _logger.warning("the cache entry %s is damaged and will be made again: %s", entry, reason)


def _warn_once(path: Path, message: str) -> None:
    if path not in _warned:
        _warned.add(path)
        _logger.warning("%s", message)
