from __future__ import annotations

import errno
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cpu.jit.conftest import KEY, named
from tconv.jit import cache
from tconv.jit.cache import DiskCache, default_cache, source_digest

PAYLOAD = bytes(range(256)) * 8


def payload_of(stored: cache.Stored) -> bytes:
    return stored.payload


@pytest.fixture
def folder(cache_folder: Path) -> Path:
    return cache_folder


def test_put_and_get(folder: Path) -> None:
    first = DiskCache(folder)
    assert not folder.exists(), "made when there is something to write"
    assert first.get(KEY) is None
    assert first.entries() == [] and first.size() == 0 and first.clear() == []
    path = first.put(KEY, PAYLOAD, {"stem": "tiny", "resources": {"registers": 3}})
    assert path == folder / f"{KEY}.tconv"
    assert first.get(KEY) == PAYLOAD

    second = DiskCache(folder)
    stored = second.lookup(KEY)
    assert stored is not None and stored.payload == PAYLOAD
    assert stored.metadata["stem"] == "tiny" and stored.metadata["key"] == KEY
    assert stored.metadata["resources"] == {"registers": 3}
    assert stored.metadata["created"].endswith("+00:00")
    second.put(KEY, b"", {})
    assert second.get(KEY) == b"" == DiskCache(folder).get(KEY), "replaced"


def test_listing_and_clearing(folder: Path) -> None:
    stored = DiskCache(folder)
    stored.put(named("b"), b"12345", {"stem": "tiny"})
    stored.put(named("a"), b"123", {})
    stored.write_source(f"{named('b')}.cu", "source")
    strangers = {
        "notes.txt",
        "sources/notes.txt",
        "sources/kernel.cu",
        "b.tconv",
        f"{named('b')}.tconvx",
        f"x{named('b')}.cu",
        "folder",
    }
    (folder / "folder").mkdir()
    (folder / "folder" / f"{named('b')}.tconv").write_text("x")
    leftover = folder / ".b.tconv.0123456789abcdef.tconv-temporary"
    for path in (*(folder / name for name in strangers - {"folder"}), leftover):
        path.write_text("x")
    (folder / f"{named('damaged')}.tconv").write_text("short")
    entries = stored.entries()
    assert [(entry.key, entry.damaged) for entry in entries] == [
        (named("a"), False),
        (named("b"), False),
        (named("damaged"), True),
    ]
    assert entries[1].metadata["stem"] == "tiny"
    nbytes = sum(entry.nbytes for entry in entries)
    assert nbytes == sum(entry.path.stat().st_size for entry in entries)
    assert stored.size() == nbytes + len("source") + len("x")
    assert {str(path) for path in stored.clear()} == strangers
    assert {str(path) for path in stored.clear()} == strangers
    assert stored.entries() == [] and stored.size() == 0 and not leftover.exists()
    assert (folder / "folder" / f"{named('b')}.tconv").exists()
    assert stored.get(named("b")) is None


def test_clearing_takes_links_and_folders_for_strangers(folder: Path, tmp_path: Path) -> None:
    stored = DiskCache(folder)
    stored.put(KEY, PAYLOAD)
    precious = tmp_path / "precious"
    precious.write_text("x")
    (folder / f"{named('link')}.tconv").symlink_to(precious)
    (folder / f"{named('folder')}.tconv").mkdir()
    left = [f"{named('folder')}.tconv", f"{named('link')}.tconv"]
    assert [entry.key for entry in stored.entries()] == [KEY]
    assert [str(path) for path in stored.clear()] == left
    assert precious.exists() and sorted(os.listdir(folder)) == left


def flip(position: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[position] ^= 0x10
        path.write_bytes(data)

    return damage


def truncate(nbytes: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, path.stat().st_size + nbytes)


def become_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "inside").write_text("x")


def become_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def become_socket(path: Path) -> None:
    path.unlink()
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path has 107 bytes at most
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("s")
    os.chdir(here)
    path.with_name("s").rename(path)


def become_link(path: Path) -> None:
    """To an entry that is intact."""
    elsewhere = path.parent.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def reseal(path: Path, **metadata: Any) -> None:
    """Writes an entry whose checksum is right and whose description is not."""
    stored = cache.Stored(PAYLOAD, metadata)
    path.write_bytes(b"".join(cache._pack(stored)))


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "empty": (lambda path: path.write_bytes(b""), "0 bytes, fewer than any entry"),
    "payload cut": (lambda path: path.write_bytes(path.read_bytes()[1:]), "its footer says"),
    "end cut": (truncate(-1), "does not end as an entry does"),
    "end added": (truncate(+1), "does not end as an entry does"),
    "no entry": (lambda path: path.write_text("x" * 999), "does not end as an entry does"),
    "payload flipped": (flip(100), "does not match its checksum"),
    "description flipped": (flip(len(PAYLOAD) + 3), "does not match its checksum"),
    "checksum flipped": (flip(-1), "does not match its checksum"),
    "format changed": (flip(8 - cache._FOOTER.size), "its format is 18"),
    "huge": (lambda path: os.truncate(path, 10 << 30), "has 10737418240 bytes, more than"),
    "folder": (become_folder, "a folder is in its place"),
    "link": (become_link, "a link is in its place"),
    "pipe": (become_pipe, "it is no regular file"),
    "another key": (lambda path: reseal(path, key="other"), "belongs to the key 'other'"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_entries_are_made_again(
    folder: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    path = DiskCache(folder).put(KEY, PAYLOAD, {"stem": "tiny"})
    assert path is not None
    do, reason = DAMAGES[damage]
    do(path)
    again = DiskCache(folder)
    with caplog.at_level(logging.WARNING, logger="tconv"):
        assert again.get(KEY) is None
    (record,) = caplog.records
    assert f"{KEY}.tconv is damaged and will be made again" in record.getMessage()
    assert reason in record.getMessage()
    assert not path.exists()
    payload, built = again.get_or_build(KEY, lambda: (PAYLOAD, {}), payload_of)
    assert built and payload == PAYLOAD == DiskCache(folder).get(KEY)
    assert len(caplog.records) == 1


def test_a_socket_is_replaced(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = DiskCache(folder).put(KEY, PAYLOAD)
    assert path is not None
    become_socket(path)
    assert DiskCache(folder).get_or_build(KEY, lambda: (PAYLOAD, {}), payload_of)[1]
    assert DiskCache(folder).get(KEY) == PAYLOAD
    assert "is made again: it cannot be read" in caplog.text


def test_a_description_that_cannot_be_read_is_made_again(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its checksum is right: another version of the caller wrote it."""

    def seconds(stored: cache.Stored) -> float:
        return float(stored.metadata["seconds"])

    for wrong in ({}, {"seconds": "soon"}, {"seconds": [1]}):
        caplog.clear()
        DiskCache(folder).put(KEY, PAYLOAD, wrong)
        assert DiskCache(folder).get_or_build(KEY, lambda: (b"", {"seconds": 2}), seconds) == (
            2,
            True,
        )
        assert f"{KEY} is damaged and will be made again: its description" in caplog.text
        assert DiskCache(folder).get_or_build(KEY, lambda: pytest.fail("built"), seconds) == (
            2,
            False,
        )


def test_every_single_bit_counts(folder: Path) -> None:
    path = DiskCache(folder).put(KEY, b"payload", {})
    assert path is not None
    good = path.read_bytes()
    for position in range(len(good)):
        for bit in (0x01, 0x80):
            bad = bytearray(good)
            bad[position] ^= bit
            path.write_bytes(bad)
            assert DiskCache(folder).get(KEY) is None, (position, bit)
    path.write_bytes(good)
    assert DiskCache(folder).get(KEY) == b"payload"


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("trouble", ["below a file", "full", "read only"])
def test_a_folder_that_cannot_be_written(
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    trouble: str,
) -> None:
    if trouble == "below a file":
        folder.write_text("a file")
        unusable = DiskCache(folder / "cache")
    elif trouble == "full":
        unusable = DiskCache(folder)
        monkeypatch.setattr(os, "replace", no_space)
    else:
        unusable = DiskCache(Path("/proc/tconv"))
    with caplog.at_level(logging.WARNING, logger="tconv"):
        for key in (named("one"), named("two")):
            assert unusable.put(key, PAYLOAD) is None
            assert unusable.get(key) == PAYLOAD
    (record,) = caplog.records
    assert "cannot be written" in record.getMessage()
    assert "TCONV_CACHE_DIR" in record.getMessage()
    assert unusable.entries() == []
    if trouble == "full":
        assert list(folder.iterdir()) == [], "no temporary file is left"


def test_an_entry_that_cannot_be_read(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = DiskCache(folder).put(KEY, PAYLOAD)
    assert path is not None

    honest = os.open

    def denied(name: Any, flags: int, *mode: int) -> int:
        if Path(name) == path and not flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, "denied")
        return honest(name, flags, *mode)

    monkeypatch.setattr(os, "open", denied)  # root may read whatever its mode
    assert DiskCache(folder).get(KEY) is None
    assert DiskCache(folder).get(KEY) is None
    (record,) = caplog.records
    assert "it cannot be read" in record.getMessage()
    assert path.exists(), "it may be intact"
    assert DiskCache(folder).get_or_build(KEY, lambda: (b"new", {}), payload_of) == (b"new", True)
    monkeypatch.undo()
    assert DiskCache(folder).get(KEY) == b"new", "it does not fail for ever"


def test_memory_only() -> None:
    memory = DiskCache(None)
    assert memory.put(KEY, PAYLOAD) is None
    assert memory.get(KEY) == PAYLOAD
    assert memory.entries() == [] and memory.size() == 0 and memory.why_not() is None
    assert memory.clear() == [] and memory.get(KEY) is None


def test_what_is_on_disk_is_checked_at_every_load(folder: Path) -> None:
    stored = DiskCache(folder)
    path = stored.put(KEY, PAYLOAD)
    assert path is not None and stored.get(KEY) == PAYLOAD
    flip(100)(path)
    assert stored.get(KEY) is None, "memory holds only what the disk does not"


@pytest.mark.parametrize(
    "key",
    [
        "",
        "key",
        named("a/b"),
        named("../a"),
        named(".a"),
        named("a b"),
        named("x" * 101),
        KEY + "0",
    ],
)
def test_keys_are_file_names(folder: Path, key: str) -> None:
    with pytest.raises(ValueError, match="a cache key is"):
        DiskCache(folder).put(key, b"")


def test_threads_build_a_key_once(folder: Path) -> None:
    stored = DiskCache(folder)
    builds: list[int] = []
    results: list[tuple[bytes, bool]] = []
    start = threading.Barrier(8)

    def build() -> tuple[bytes, dict[str, Any]]:
        builds.append(1)
        time.sleep(0.05)
        return PAYLOAD, {}

    def work() -> None:
        start.wait()
        results.append(stored.get_or_build(KEY, build, payload_of))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1
    assert sorted(built for _, built in results) == [False] * 7 + [True]
    assert all(payload == PAYLOAD for payload, _ in results)


def test_a_failed_build_is_not_kept(folder: Path) -> None:
    stored = DiskCache(folder)

    def fail() -> tuple[bytes, dict[str, Any]]:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        stored.get_or_build(KEY, fail, payload_of)
    assert not folder.exists()
    assert stored.get_or_build(KEY, lambda: (b"yes", {}), payload_of) == (b"yes", True)


def test_the_default_cache_follows_the_settings(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert default_cache().folder == folder
    assert default_cache() is default_cache()
    monkeypatch.setenv("TCONV_CACHE", "0")
    assert default_cache().folder is None


def test_write_source(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{KEY}.cu"
    assert DiskCache(folder).write_source(name, "text") == folder / "sources" / name
    assert (folder / "sources" / name).read_text() == "text"
    assert DiskCache(None).write_source(name, "text", tmp_path) == tmp_path / name
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = DiskCache(None).write_source(name, "text")
    assert path is not None and path.read_text() == "text" and path.parent.parent == tmp_path
    monkeypatch.setattr(os, "replace", no_space)
    assert DiskCache(folder).write_source(name, "text") is None
    for bad in ("tiny.cu", KEY, f"{KEY}.txt", f"../{name}"):
        with pytest.raises(ValueError, match="a source's name is"):
            DiskCache(folder).write_source(bad, "text")


class TestSourceDigest:
    @pytest.fixture
    def include(self, tmp_path: Path) -> Path:
        folder = tmp_path / "include"
        (folder / "ptx").mkdir(parents=True)
        (folder / "kernel.cu").write_text("#include <ptx/a.cuh>\n  #  include <ptx/b.cuh>\n")
        (folder / "ptx" / "a.cuh").write_text('#pragma once\n#include "c.cuh"\n')
        (folder / "ptx" / "b.cuh").write_text("#include <ptx/a.cuh>\n#include <ptx/b.cuh>\n")
        (folder / "ptx" / "c.cuh").write_text("#include <cstdint>\n")
        (folder / "ptx" / "unused.cuh").write_text("unused\n")
        return folder

    TEXT = "#include <kernel.cu>\n"

    @pytest.mark.parametrize("name", ["kernel.cu", "ptx/a.cuh", "ptx/b.cuh", "ptx/c.cuh"])
    def test_every_reached_file_counts(self, include: Path, name: str) -> None:
        before = source_digest(self.TEXT, [include])
        assert source_digest(self.TEXT, [include]) == before
        path = include / name
        original = path.read_text()
        path.write_text(original + "// changed\n")
        assert source_digest(self.TEXT, [include]) != before
        path.write_text(original)
        assert source_digest(self.TEXT, [include]) == before

    def test_what_is_not_reached_does_not_count(self, include: Path, tmp_path: Path) -> None:
        before = source_digest(self.TEXT, [include])
        (include / "ptx" / "unused.cuh").write_text("changed\n")
        assert source_digest(self.TEXT, [include]) == before
        moved = include.rename(tmp_path / "elsewhere")
        assert source_digest(self.TEXT, [moved]) == before, "nor does where the folder lies"

    def test_the_include_path_is_searched_in_order(self, include: Path, tmp_path: Path) -> None:
        before = source_digest(self.TEXT, [include])
        host = tmp_path / "host"
        (host / "ptx").mkdir(parents=True)
        assert source_digest(self.TEXT, [host, include]) == before
        (host / "ptx" / "b.cuh").write_text("// the host's\n")
        assert source_digest(self.TEXT, [host, include]) != before
        assert source_digest(self.TEXT, [include, host]) == before

    def test_everything_else_counts(self, include: Path) -> None:
        digests = [
            source_digest(self.TEXT, [include]),
            source_digest(self.TEXT + " ", [include]),
            source_digest(self.TEXT, [include], ["-a"]),
            source_digest(self.TEXT, [include], ["-a", "-b"]),
            source_digest(self.TEXT, [include], ["-a-b"]),
            source_digest("#include <absent.cuh>\n", [include]),
            source_digest("#include <missing.cuh>\n", [include]),
        ]
        assert len(set(digests)) == len(digests)


def test_the_description_is_plain_json(folder: Path) -> None:
    path = DiskCache(folder).put(KEY, PAYLOAD, {"stem": "tiny"})
    assert path is not None
    text = path.read_bytes()[len(PAYLOAD) : -cache._FOOTER.size]
    assert json.loads(text)["stem"] == "tiny"
