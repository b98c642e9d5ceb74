"""Files and folders that only this user, or root, can change."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shlex
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

TEMPORARY_SUFFIX = ".tconv-temporary"
"""Suffix of the temporary files of `write_whole`."""


class Unsafe(Exception):
    """Another user could have changed a file. The message says who, and what to do."""


class NoFile(Exception):
    """Not a regular file of bounded size. The message says what it is."""


def why_unsafe(folder: Path) -> str | None:
    """Why others could change the contents of a folder, and what to do. None if they cannot.

    Args:
        folder: a path without links (`os.path.realpath`). It need not exist.
    """
    for path in (folder, *folder.parents):
        try:
            status = os.lstat(path)
        except OSError:
            continue  # it does not exist yet, or cannot be used anyway
        # In a folder with the sticky bit, such as /tmp, others can add files, but neither rename
        # nor remove ours. They must not add any to `folder` itself.
        sticky = path != folder and bool(status.st_mode & stat.S_ISVTX)
        reason = _why_unsafe(status, may_be_writable=sticky)
        if reason is not None:
            mode = "700" if path == folder else "go-w"
            return f"{path} {reason}" + (
                f": run `chmod {mode} {shlex.quote(str(path))}`" if _is_ours(status) else ""
            )
    return None


def _is_ours(status: os.stat_result) -> bool:
    # NOTE: the effective user counts, as for every access. Root can do anything anyway.
    return status.st_uid in (0, os.geteuid())


def _why_unsafe(status: os.stat_result, may_be_writable: bool = False) -> str | None:
    if not _is_ours(status):
        return f"belongs to another user (uid {status.st_uid})"
    if status.st_mode & 0o022 and not may_be_writable:
        return f"can be written by others (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def check_safe(path: Path, status: os.stat_result) -> None:
    """Raises `Unsafe` for a regular file that another user owns or can write to."""
    reason = _why_unsafe(status) if stat.S_ISREG(status.st_mode) else None
    if reason is not None:
        raise Unsafe(f"{path} {reason}: remove it, by `rm {shlex.quote(str(path))}`")


@contextlib.contextmanager
def open_safely(path: Path, max_bytes: int) -> Iterator[BinaryIO]:
    """Opens a file for reading, and checks it after it is open.

    Raises:
        Unsafe: another user owns it or can write to it.
        NoFile: it is no regular file, or has more than `max_bytes`.
    """
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(path, "rb", opener=_open))
        except IsADirectoryError:
            raise NoFile("a folder is in its place") from None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise NoFile("a link is in its place") from None
            raise
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise NoFile("it is no regular file")
        check_safe(path, status)
        if status.st_size > max_bytes:
            raise NoFile(f"it has {status.st_size} bytes, more than {max_bytes}")
        yield file


def _open(path: str, _: int) -> int:
    # NOTE: does not follow a link, and does not wait for the writer of a pipe.
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def make_folder(folder: Path) -> None:
    """Creates a folder and its missing parents, for this user alone."""
    # NOTE: `makedirs` applies its mode only to the last folder.
    for path in reversed((folder, *folder.parents)):
        if not path.exists():
            with contextlib.suppress(FileExistsError):  # another process was faster
                path.mkdir(0o700)


def write_whole(path: Path, chunks: Iterable[bytes], mode: int = 0o666) -> None:
    """Writes a file atomically. `mode` is as for `os.open`."""
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, mode), "wb") as file:
            for chunk in chunks:
                file.write(chunk)
        os.replace(temporary, path)
    except BaseException:
        remove(temporary)
        raise


def remove(path: Path) -> None:
    """Removes the file, link or folder at `path` if possible."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
