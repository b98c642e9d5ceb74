from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tconv.jit import cache
from tconv.jit.cache import DiskCache, default_cache, source_digest

PAYLOAD = bytes(range(256)) * 8


@pytest.fixture
def folder(cache_folder: Path) -> Path:
    return cache_folder


def test_put_and_get(folder: Path) -> None:
    first = DiskCache(folder)
    assert not folder.exists(), "made when there is something to write"
    assert first.get("key") is None and first.path("key") is None
    assert first.entries() == [] and first.size() == 0 and first.clear() == 0
    path = first.put("key", PAYLOAD, {"stem": "tiny", "resources": {"registers": 3}})
    assert path == first.path("key") == folder / "key.tconv"
    assert first.get("key") == PAYLOAD

    second = DiskCache(folder)
    stored = second.lookup("key")
    assert stored is not None and stored.payload == PAYLOAD
    assert stored.metadata["stem"] == "tiny" and stored.metadata["key"] == "key"
    assert stored.metadata["resources"] == {"registers": 3}
    assert stored.metadata["created"].endswith("+00:00")
    second.put("key", b"", {})
    assert second.get("key") == b"" == DiskCache(folder).get("key"), "replaced"


def test_listing_and_clearing(folder: Path) -> None:
    stored = DiskCache(folder)
    stored.put("b", b"12345", {"stem": "tiny"})
    stored.put("a", b"123", {})
    stored.write_source("b", "source")
    strangers = [folder / "notes.txt", folder / "sources" / "notes.txt", folder / "x.tconvx"]
    leftover = folder / ".b.tconv.0123.tconv-temporary"
    for path in (*strangers, leftover):
        path.write_text("x")
    (folder / "damaged.tconv").write_text("short")
    entries = stored.entries()
    assert [(entry.key, entry.damaged) for entry in entries] == [
        ("a", False),
        ("b", False),
        ("damaged", True),
    ]
    assert entries[1].metadata["stem"] == "tiny"
    assert stored.size() == sum(entry.nbytes for entry in entries)
    assert stored.size() == sum(path.stat().st_size for path in folder.glob("*.tconv"))
    assert stored.clear() == 3
    assert sorted(path for path in folder.rglob("*") if path.is_file()) == sorted(strangers)
    assert stored.get("b") is None


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
    "format changed": (flip(8 - cache._FOOTER.size), "its format is 17"),
    "folder": (become_folder, "a folder is in its place"),
    "another key": (lambda path: reseal(path, key="other"), "belongs to the key 'other'"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_entries_are_made_again(
    folder: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    path = DiskCache(folder).put("key", PAYLOAD, {"stem": "tiny"})
    assert path is not None
    do, reason = DAMAGES[damage]
    do(path)
    again = DiskCache(folder)
    with caplog.at_level(logging.WARNING, logger="tconv"):
        assert again.get("key") is None
    (record,) = caplog.records
    assert "key.tconv is damaged and will be made again" in record.getMessage()
    assert reason in record.getMessage()
    assert not path.exists()
    stored, built = again.get_or_build("key", lambda: (PAYLOAD, {}))
    assert built and stored.payload == PAYLOAD == DiskCache(folder).get("key")
    assert len(caplog.records) == 1


def test_every_single_bit_counts(folder: Path) -> None:
    path = DiskCache(folder).put("key", b"payload", {})
    assert path is not None
    good = path.read_bytes()
    for position in range(len(good)):
        for bit in (0x01, 0x80):
            bad = bytearray(good)
            bad[position] ^= bit
            path.write_bytes(bad)
            assert DiskCache(folder).get("key") is None, (position, bit)
    path.write_bytes(good)
    assert DiskCache(folder).get("key") == b"payload"


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
        for key in ("one", "two"):
            assert unusable.put(key, PAYLOAD) is None
            assert unusable.get(key) == PAYLOAD
            assert unusable.path(key) is None
        assert unusable.put("large", bytes(2 << 20)) is None
        assert unusable.get("large") == bytes(2 << 20), "the only copy is kept whatever its size"
    (record,) = caplog.records
    assert "cannot be written" in record.getMessage()
    assert "TCONV_CACHE_DIR" in record.getMessage()
    assert unusable.entries() == []
    if trouble == "full":
        assert list(folder.iterdir()) == [], "no temporary file is left"


def test_an_entry_that_cannot_be_read(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = DiskCache(folder).put("key", PAYLOAD)
    assert path is not None

    def denied(_: Path) -> bytes:
        raise PermissionError(errno.EACCES, "denied")

    monkeypatch.setattr(Path, "read_bytes", denied)
    assert DiskCache(folder).get("key") is None
    assert DiskCache(folder).get("key") is None
    (record,) = caplog.records
    assert "cannot be read" in record.getMessage()
    assert path.exists(), "it is somebody else's, not damaged"


def test_memory_only() -> None:
    memory = DiskCache(None)
    assert memory.put("key", PAYLOAD) is None
    assert memory.get("key") == PAYLOAD
    assert memory.path("key") is None and memory.entries() == [] and memory.size() == 0
    assert memory.clear() == 0 and memory.get("key") is None


def test_large_payloads_stay_on_disk_alone(folder: Path) -> None:
    stored = DiskCache(folder)
    path = stored.put("large", bytes(2 << 20))
    assert path is not None
    assert stored.get("large") == bytes(2 << 20)
    path.unlink()
    assert stored.get("large") is None


def test_path_writes_again_what_memory_still_has(folder: Path) -> None:
    stored = DiskCache(folder)
    stored.put("key", PAYLOAD)
    shutil.rmtree(folder)
    path = stored.path("key")
    assert path is not None and DiskCache(folder).get("key") == PAYLOAD


@pytest.mark.parametrize("key", ["", "a/b", "../a", ".hidden", "a b", "x" * 201])
def test_keys_are_file_names(folder: Path, key: str) -> None:
    with pytest.raises(ValueError, match="a cache key has"):
        DiskCache(folder).put(key, b"")


def test_threads_build_a_key_once(folder: Path) -> None:
    stored = DiskCache(folder)
    builds: list[int] = []
    results: list[tuple[cache.Stored, bool]] = []
    start = threading.Barrier(8)

    def build() -> tuple[bytes, dict[str, Any]]:
        builds.append(1)
        time.sleep(0.05)
        return PAYLOAD, {}

    def work() -> None:
        start.wait()
        results.append(stored.get_or_build("key", build))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1
    assert sorted(built for _, built in results) == [False] * 7 + [True]
    assert all(result.payload == PAYLOAD for result, _ in results)
    assert stored._building == {}, "no lock is left"


def test_a_failed_build_is_not_kept(folder: Path) -> None:
    stored = DiskCache(folder)

    def fail() -> tuple[bytes, dict[str, Any]]:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        stored.get_or_build("key", fail)
    assert stored._building == {} and not folder.exists()
    assert stored.get_or_build("key", lambda: (b"yes", {}))[0].payload == b"yes"


def test_a_payload_can_be_opened_in_place(folder: Path, tmp_path: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    (tmp_path / "seven.cpp").write_text('extern "C" int seven() { return 7; }')
    library = tmp_path / "seven.so"
    subprocess.run(
        [*compiler.split(), "-shared", "-fPIC", "-o", library, tmp_path / "seven.cpp"], check=True
    )
    path = DiskCache(folder).put("seven", library.read_bytes(), {"kind": "library"})
    assert ctypes.CDLL(str(path)).seven() == 7


def test_the_default_cache_follows_the_settings(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert default_cache().folder == folder
    assert default_cache() is default_cache()
    monkeypatch.setenv("TCONV_CACHE", "0")
    assert default_cache().folder is None


def test_write_source(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert DiskCache(folder).write_source("tiny", "text") == folder / "sources" / "tiny.cu"
    assert (folder / "sources" / "tiny.cu").read_text() == "text"
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = DiskCache(None).write_source("tiny", "text")
    assert path is not None and path.read_text() == "text" and tmp_path in path.parents
    monkeypatch.setattr(os, "replace", no_space)
    assert DiskCache(folder).write_source("tiny", "text") is None


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
    path = DiskCache(folder).put("key", PAYLOAD, {"stem": "tiny"})
    assert path is not None
    text = path.read_bytes()[len(PAYLOAD) : -cache._FOOTER.size]
    assert json.loads(text)["stem"] == "tiny"
