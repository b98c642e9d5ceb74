"""The disk cache: cubins, the emulator's builds, and the choices of autotune.

Each entry is one file, `<key>.tconv`: the payload, a JSON description, and a fixed footer. The
footer has the sizes and a SHA-256 of all before it, which every load checks. The payload comes
first, so tools that read ELF files, such as `cuobjdump`, accept the file. A damaged entry is
reported, removed and built again.

Security: code from the cache runs in this process, so no other user may write it. The folder is
created for its owner alone. It is refused if another user owns it or a folder above it, or can
write to them, as ssh refuses keys. The same holds for an entry. One warning then says what to do,
and the process keeps compiled code in memory. So it does if the folder cannot be written. Root is
trusted.

Concurrency: any number of processes may use one folder at once, without lock files. An entry is
written under a temporary name in the same folder and renamed, so a reader sees a whole entry or
none. A file's time of modification is its last use. A process that writes removes the least
recently used files beyond `TCONV_CACHE_LIMIT`, and the temporary files of killed writers.
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
"""Version of the layout of entries, descriptions and keys. It is part of every key."""

SUFFIX = ".tconv"
_SOURCES = "sources"

MAX_ENTRY_BYTES = 64 << 20
"""Limit of an entry's file. A larger one is neither written nor read."""

_LEFTOVER_SECONDS = 3600.0  # the writer of an older temporary file has died

_MAGIC = b"tconv\x00\r\n"
# magic, format, bytes of the description, bytes of the payload, SHA-256 of payload + description
_FOOTER = struct.Struct("<8sIIQ32s")

# Names of the cache's files. A key ends in a digest, which few other files' names do.
_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}-[0-9a-f]{64}")
_ENTRY_NAME = re.compile(_KEY.pattern + re.escape(SUFFIX))
_SOURCE_NAME = re.compile(_KEY.pattern + r"\.(cu|cpp)")
_TEMPORARY_NAME = re.compile(r"\..{1,100}\.[0-9a-f]{16}" + re.escape(files.TEMPORARY_SUFFIX))

T = TypeVar("T")

_logger = logging.getLogger("tconv")
_warned: set[Path] = set()


def source_digest(text: str, include_dirs: Sequence[Path], parts: Iterable[str] = ()) -> str:
    """SHA-256 (hexadecimal) of a translation unit and of all that its compilation depends on.

    Args:
        text: the translation unit.
        include_dirs: the include path, in order. Every file that the text reaches through
            `#include` there is hashed with its name in the directive, so moving the folder
            changes nothing. A header that is not found (the compiler's own) counts by name.
            Conditions are not evaluated. Two keys may then differ without need.
        parts: everything else: options, architecture, compiler and its version.
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
    """A payload and its description."""

    payload: bytes = field(repr=False)
    metadata: Mapping[str, Any]


@dataclass(frozen=True)
class Entry:
    """One entry on disk, for listings. Only the structure of its footer has been checked."""

    key: str
    path: Path
    nbytes: int
    metadata: Mapping[str, Any]
    damaged: bool


class _Damaged(Exception):
    """The reason why an entry cannot be used."""


class DiskCache:
    """Payloads by key, on disk. Those that cannot be written are kept in memory.

    A key is a file name: a readable part of at most 100 letters, digits, `_`, `.` and `-`, then
    `-`, then the `source_digest` of everything that the payload depends on.

    Args:
        folder: where entries are kept, created with the first entry. None: memory only.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._memory: dict[str, Stored] = {}
        self._building: dict[str, threading.Lock] = {}
        # Bytes of all files, or None before this process's first write. They are counted at that
        # write, and again when the writes since then exceed the limit.
        self._bytes_on_disk: int | None = None

    def __repr__(self) -> str:
        return f"DiskCache({str(self.folder)!r})" if self.folder else "DiskCache(None)"

    def why_not(self) -> str | None:
        """Why the folder is not used: who else could change its contents, and what to do."""
        return None if self.folder is None else _why_not(Path(os.path.realpath(self.folder)))

    def get(self, key: str) -> bytes | None:
        """The payload of `key`, or None if there is no intact one."""
        stored = self.lookup(key)
        return None if stored is None else stored.payload

    def lookup(self, key: str) -> Stored | None:
        """The payload of `key` with its description, or None if there is no intact one."""
        return self._memory.get(key) or self._read(key)

    def put(
        self, key: str, payload: bytes, metadata: Mapping[str, Any] | None = None
    ) -> Path | None:
        """Stores a payload, in place of an earlier one.

        Args:
            metadata: JSON-serialisable description, for listings and `lookup`. `key` and
                `created` are added.

        Returns:
            the entry's path, or None if it is kept in memory.
        """
        return self._put(key, _described(key, payload, metadata or {}))

    def get_or_build(
        self,
        key: str,
        build: Callable[[], tuple[bytes, Mapping[str, Any]]],
        read: Callable[[Stored], T],
    ) -> tuple[T, bool]:
        """The entry of `key`, built if there is no readable one.

        Concurrent threads build a key once. Processes do not wait for each other: each builds, and
        the last one's entry remains.

        Args:
            build: returns payload and description. If it raises, nothing is stored, and a thread
                that waited builds for itself.
            read: converts the entry. If it raises KeyError, TypeError or ValueError, the
                description is damaged and the entry is built again.

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
        """Bytes of all files of the cache on disk, sources and temporary files included."""
        folder = self._ready()
        return sum(status.st_size for _, status in _all_ours(folder)) if folder else 0

    def clear(self) -> list[Path]:
        """Removes everything, in memory and on disk.

        On disk it removes only files with the names and places of its own: entries, temporary
        files, and the sources of `write_source`.

        Returns:
            other files that are there, as paths below the folder.
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
        """Writes a generated source for people to read: `<folder>/sources/<name>`.

        Args:
            name: a key, and `.cu` or `.cpp`.
            elsewhere: the folder to use if that one cannot be used. None takes a new one in the
                system's temporary folder.

        Returns:
            its path, or None if it could not be written.
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
        """The folder without links, if no other user can change it. `make` creates it.

        NOTE: use this path, not `self.folder`: another user could change a link.
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
            reason = _why_not(folder)  # another user may have created it
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
    """The cache of the current settings (`TCONV_CACHE`, `TCONV_CACHE_DIR`).

    There is one for each folder, whose memory layer lasts as long as the process.
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
    """The regular files of a folder with such names, and the status of each."""
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
    """All files of the cache in a folder."""
    yield from _ours(folder, _ENTRY_NAME, _TEMPORARY_NAME)
    yield from _ours(folder / _SOURCES, _SOURCE_NAME, _TEMPORARY_NAME)


def _trim(folder: Path, limit: int) -> int:
    """Removes old temporary files, then the least recently used others down to `limit` bytes.

    Returns:
        bytes of the remaining files.
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
