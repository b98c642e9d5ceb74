"""The cache against other users, other processes, and its own growth."""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cpu.jit.conftest import KEY, named
from tconv.jit import cache, files
from tconv.jit.cache import DiskCache

PAYLOAD = b"compiled" * 100
OTHER_USER = 12345

GiveAway = Callable[[Path], None]


@pytest.fixture
def folder(cache_folder: Path) -> Path:
    return cache_folder


@pytest.fixture
def give_away(monkeypatch: pytest.MonkeyPatch) -> Iterator[GiveAway]:
    """Makes another user a file's or folder's owner.

    Root, as which containers run tests, can do so. Everybody else is shown it: `os.lstat` and
    `os.fstat`, by which the owner is asked for, then say so of this one.
    """
    if os.geteuid() == 0:
        yield lambda path: os.chown(path, OTHER_USER, -1)
        return
    given: set[tuple[int, int]] = set()

    def shown(status: os.stat_result) -> os.stat_result:
        if (status.st_dev, status.st_ino) not in given:
            return status
        fields = list(status)
        fields[stat.ST_UID] = OTHER_USER
        return os.stat_result(fields)

    lstat, fstat = os.lstat, os.fstat
    monkeypatch.setattr(os, "lstat", lambda *given, **more: shown(lstat(*given, **more)))
    monkeypatch.setattr(os, "fstat", lambda descriptor: shown(fstat(descriptor)))

    def give(path: Path) -> None:
        held.append(os.open(path, os.O_RDONLY))  # so that no new file gets its number
        status = lstat(path)
        given.add((status.st_dev, status.st_ino))

    held: list[int] = []
    yield give
    for descriptor in held:
        os.close(descriptor)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_what_is_made_is_for_its_owner_alone(folder: Path, umask: int) -> None:
    deep = folder / "two" / "levels"
    before = os.umask(umask)
    try:
        path = DiskCache(deep).put(KEY, PAYLOAD)
        source = DiskCache(deep).write_source(f"{KEY}.cu", "text")
    finally:
        os.umask(before)
    assert path is not None and source is not None
    for made in (folder, folder / "two", deep, source.parent):
        assert mode(made) == 0o700, made
    assert mode(path) == mode(source) == 0o600
    assert DiskCache(deep).get(KEY) == PAYLOAD


class TestUnsafeFolder:
    """An attacker put an entry there before, which is intact; or could."""

    @pytest.fixture
    def unsafe(
        self, request: pytest.FixtureRequest, tmp_path: Path, give_away: GiveAway
    ) -> tuple[Path, Path, str]:
        """The cache folder, what is wrong in its path, and what is to be said of that."""
        parent = tmp_path / "parent"
        folder = parent / "cache"
        if request.param.startswith("not made"):
            parent.mkdir(mode=0o700)
        else:
            DiskCache(folder).put(KEY, b"the attacker's")
        if "parent" in request.param:
            parent.chmod({"group": 0o770, "others": 0o703}.get(request.param.split()[-1], 0o700))
        if request.param == "given away":
            give_away(folder)
            return folder, folder, f"{folder} belongs to another user (uid {OTHER_USER})"
        if request.param.endswith("parent given away"):
            give_away(parent)
            return folder, parent, f"{parent} belongs to another user (uid {OTHER_USER})"
        if "parent" in request.param:
            shown = f"mode {mode(parent):04o}): run `chmod go-w {parent}`"
            return folder, parent, f"{parent} can be written by others ({shown}"
        folder.chmod(int(request.param, 8))
        shown = f"mode {mode(folder):04o}): run `chmod 700 {folder}`"
        return folder, folder, f"{folder} can be written by others ({shown}"

    KINDS = (
        "given away",
        "0770",
        "0702",
        "1777",
        "parent given away",
        "not made, parent given away",
        "parent of group",
        "parent of others",
        "not made, parent of others",
    )

    @pytest.mark.parametrize("unsafe", KINDS, indirect=True)
    def test_is_refused_with_one_warning(
        self,
        unsafe: tuple[Path, Path, str],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        folder, _, said = unsafe
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        before = sorted(folder.parent.rglob("*"))
        for process in range(2):
            refused = DiskCache(folder)
            assert refused.get(KEY) is None
            payload, built = refused.get_or_build(
                KEY, lambda: (PAYLOAD, {}), lambda stored: stored.payload
            )
            assert built and payload == PAYLOAD == refused.get(KEY), process
            assert refused.put(named("other"), PAYLOAD) is None
            assert refused.get(named("other")) == PAYLOAD
            assert refused.entries() == [] and refused.size() == 0 and refused.clear() == []
            assert said in (refused.why_not() or "")
        source = DiskCache(folder).write_source(f"{KEY}.cu", "text")
        assert source is not None and source.parent.parent == tmp_path
        assert sorted(folder.parent.rglob("*")) == before, "nothing was written or removed"
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert f"the cache folder {folder} is not used" in record.getMessage()
        assert said in record.getMessage()
        assert "TCONV_CACHE_DIR can name another folder" in record.getMessage()
        assert "in memory only" in record.getMessage()

    @pytest.mark.parametrize("unsafe", ["0770", "1777", "parent of group"], indirect=True)
    def test_is_used_once_repaired(
        self, unsafe: tuple[Path, Path, str], caplog: pytest.LogCaptureFixture
    ) -> None:
        folder, wrong, said = unsafe
        used = DiskCache(folder)
        assert used.get(KEY) is None
        os.system(said.partition("run `")[2].rstrip("`"))
        assert used.why_not() is None, mode(wrong)
        assert used.get(KEY) == b"the attacker's"
        assert len(caplog.records) == 1

    def test_appears_while_it_is_made(
        self,
        folder: Path,
        give_away: GiveAway,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        honest = Path.mkdir

        def quicker(path: Path, *arguments: object) -> None:
            honest(path, *arguments)  # type: ignore[arg-type]
            give_away(path)
            raise FileExistsError

        monkeypatch.setattr(Path, "mkdir", quicker)
        assert DiskCache(folder).put(KEY, PAYLOAD) is None
        assert list(folder.iterdir()) == []
        assert "belongs to another user" in caplog.text


def test_a_folder_below_a_sticky_one_is_safe(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared = tmp_path / "like tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    assert DiskCache(shared / "mine").put(KEY, PAYLOAD) is not None
    assert DiskCache(shared / "mine").get(KEY) == PAYLOAD
    assert caplog.records == []


def test_the_folder_that_a_link_leads_to_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A home's ~/.cache is often a link; where it leads to is looked at, and all above that."""
    real, link = tmp_path / "real", tmp_path / "link"
    link.symlink_to(real)
    assert DiskCache(link / "cache").put(KEY, PAYLOAD) == real / "cache" / f"{KEY}.tconv"
    assert DiskCache(link / "cache").get(KEY) == PAYLOAD
    real.chmod(0o777)
    assert DiskCache(link / "cache").get(KEY) is None
    assert f"{real} can be written by others" in caplog.text


def test_a_link_turned_after_the_check_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attacker owns the link, and turns it between the check and the load."""
    safe, theirs, link = tmp_path / "safe", tmp_path / "theirs", tmp_path / "link"
    DiskCache(safe).put(KEY, PAYLOAD)
    DiskCache(theirs).put(KEY, b"the attacker's")
    link.symlink_to(safe)
    honest = files.why_unsafe

    def then_turned(folder: Path) -> str | None:
        reason = honest(folder)
        link.unlink()
        link.symlink_to(theirs)
        return reason

    monkeypatch.setattr(files, "why_unsafe", then_turned)
    assert DiskCache(link).get(KEY) == PAYLOAD


class TestUnsafeEntry:
    @pytest.fixture(params=["given away", "0620", "0602"])
    def entry(self, request: pytest.FixtureRequest, folder: Path, give_away: GiveAway) -> Path:
        """An intact entry, in a folder of ours, that another user put there or could change."""
        path = DiskCache(folder).put(KEY, b"the attacker's")
        assert path is not None
        if request.param == "given away":
            give_away(path)
        else:
            path.chmod(int(request.param, 8))
        return path

    def test_is_refused_with_one_warning(
        self, entry: Path, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        before = entry.read_bytes()
        for _ in range(2):
            used = DiskCache(folder)
            assert used.get(KEY) is None
            payload, built = used.get_or_build(
                KEY, lambda: (PAYLOAD, {}), lambda stored: stored.payload
            )
            assert built and payload == PAYLOAD == used.get(KEY)
            assert used.put(named("other"), PAYLOAD) is not None, "the folder is used"
        assert entry.read_bytes() == before
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert f"the cache entry is not used: {entry} " in record.getMessage()
        assert f"remove it, by `rm {entry}`" in record.getMessage()
        assert [listed.damaged for listed in DiskCache(folder).entries()] == [True, False]

    def test_is_not_replaced_unseen(
        self, entry: Path, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        used = DiskCache(folder)
        assert used.put(KEY, PAYLOAD) is None and used.get(KEY) == PAYLOAD
        assert len(caplog.records) == 1

    def test_is_cleared(self, entry: Path, folder: Path) -> None:
        assert DiskCache(folder).clear() == []
        assert DiskCache(folder).put(KEY, PAYLOAD) == entry
        assert DiskCache(folder).get(KEY) == PAYLOAD


def test_a_file_changed_after_the_check_is_not_the_one_that_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was opened is what was looked at, whatever lies at the path by then."""
    path = DiskCache(folder).put(KEY, PAYLOAD)
    assert path is not None
    honest = files.check_safe

    def then_changed(checked: Path, status: os.stat_result) -> None:
        honest(checked, status)
        checked.unlink()
        checked.write_bytes(b"".join(cache._pack(cache.Stored(b"other", {"key": KEY}))))

    monkeypatch.setattr(files, "check_safe", then_changed)
    assert DiskCache(folder).get(KEY) == PAYLOAD


def test_listing_waits_for_no_pipe_and_follows_no_link(folder: Path, tmp_path: Path) -> None:
    used = DiskCache(folder)
    used.put(KEY, PAYLOAD)
    os.mkfifo(folder / f"{named('pipe')}.tconv")
    (folder / f"{named('link')}.tconv").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(files.NoFile):
        cache._read_description(folder / f"{named('pipe')}.tconv")
    assert [entry.key for entry in used.entries()] == [KEY]


def test_an_entry_over_the_bound_stays_in_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "MAX_ENTRY_BYTES", 1000)
    used = DiskCache(folder)
    assert used.put(KEY, bytes(1000)) is None and used.get(KEY) == bytes(1000)
    assert used.put(KEY, bytes(100)) is not None and DiskCache(folder).get(KEY) == bytes(100)


class TestLimit:
    NBYTES = 10_000

    @pytest.fixture(autouse=True)
    def limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Room for three entries."""
        monkeypatch.setenv("TCONV_CACHE_LIMIT", "31K")

    def put(self, folder: Path, name: str) -> None:
        assert DiskCache(folder).put(named(name), bytes(self.NBYTES)) is not None

    def kept(self, folder: Path) -> list[str]:
        return [entry.key.split("-")[0] for entry in DiskCache(folder).entries()]

    def age(self, folder: Path, name: str, seconds: float) -> None:
        then = time.time() - seconds
        os.utime(folder / f"{named(name)}.tconv", (then, then))

    def test_the_longest_unused_goes(self, folder: Path) -> None:
        for index, name in enumerate("abc"):
            self.put(folder, name)
            self.age(folder, name, 100 - index)
        assert DiskCache(folder).get(named("a")) is not None, "used, so no longer the oldest"
        self.put(folder, "d")
        assert self.kept(folder) == ["a", "c", "d"]
        assert DiskCache(folder).size() <= 31 << 10

    def test_one_process_stays_below_it(self, folder: Path) -> None:
        used = DiskCache(folder)
        for index in range(20):
            assert used.put(named(f"k{index}"), bytes(self.NBYTES)) is not None
            time.sleep(0.002)  # so that times differ
        assert self.kept(folder) == ["k17", "k18", "k19"]

    def test_it_is_not_counted_at_every_write(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        counts: list[int] = []
        honest = cache._trim
        monkeypatch.setattr(cache, "_trim", lambda *given: counts.append(1) or honest(*given))
        monkeypatch.setenv("TCONV_CACHE_LIMIT", "1M")
        used = DiskCache(folder)
        for index in range(100):
            used.put(named(f"k{index}"), bytes(self.NBYTES))
        assert len(counts) == 1 and used.get(named("k0")) is not None
        for index in range(10):
            used.put(named(f"l{index}"), bytes(self.NBYTES))
        assert 2 <= len(counts) <= 10 and used.size() <= 1 << 20

    def test_what_does_not_fit_at_all_removes_nothing(self, folder: Path) -> None:
        self.put(folder, "a")
        used = DiskCache(folder)
        assert used.put(named("large"), bytes(32 << 10)) is None
        assert used.get(named("large")) == bytes(32 << 10)
        assert self.kept(folder) == ["a"]

    def test_sources_count(self, folder: Path) -> None:
        used = DiskCache(folder)
        source = used.write_source(f"{named('old')}.cu", "x" * self.NBYTES)
        assert source is not None
        os.utime(source, (0, 0))
        for name in "abc":
            self.put(folder, name)
        assert not source.exists() and self.kept(folder) == ["a", "b", "c"]

    def test_strangers_neither_count_nor_go(self, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        strangers = [folder / "notes.tconv", folder / f"{named('x')}.cu"]
        for path in strangers:
            path.write_bytes(bytes(100_000))
            os.utime(path, (0, 0))
        for name in "abcd":
            self.put(folder, name)
            time.sleep(0.002)
        assert self.kept(folder) == ["b", "c", "d"] and all(path.exists() for path in strangers)

    def test_leftovers_of_killed_writers_go(self, folder: Path) -> None:
        (folder / "sources").mkdir(parents=True, mode=0o700)
        ends = ".0123456789abcdef.tconv-temporary"
        old = [folder / f".{KEY}.tconv"[:90], folder / "sources" / f".{KEY}.cu"[:90]]
        old = [path.with_name(path.name + ends) for path in old]
        young = folder / f".young{ends}"
        for path in (*old, young):
            path.write_text("x")
        for path in old:
            os.utime(path, (time.time() - 3700,) * 2)
        self.put(folder, "a")
        assert not any(path.exists() for path in old)
        assert young.exists(), "its writer may be at it"


def test_a_killed_writer_leaves_no_entry(
    folder: Path, run_many_alone: Callable[[str, int], list[str]]
) -> None:
    code = f"""
import os
from tconv.jit.cache import default_cache
os.replace = lambda *_: (print("killed", flush=True), os._exit(0))
default_cache().put({KEY!r}, b"half")
"""
    assert run_many_alone(code, 1) == ["killed\n"]
    assert DiskCache(folder).get(KEY) is None and DiskCache(folder).entries() == []
    (leftover,) = folder.iterdir()
    os.utime(leftover, (0, 0))
    path = DiskCache(folder).put(KEY, PAYLOAD)
    assert list(folder.iterdir()) == [path]


def test_processes_that_write_read_trim_and_clear_at_once(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run_many_alone: Callable[[str, int], list[str]],
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("TCONV_CACHE_LIMIT", "10K")
    code = f"""
import logging, os, random, sys
from tconv.jit.cache import DiskCache
from pathlib import Path
logging.basicConfig(stream=sys.stdout)
chance = random.Random(os.getpid())
for round in range(150):
    used, index = DiskCache(Path({str(folder)!r})), chance.randrange(6)
    key, payload = "k%d-%064x" % (index, 0), bytes([index]) * 3000
    found, _ = used.get_or_build(key, lambda: (payload, {{}}), lambda stored: stored.payload)
    assert found == payload
    used.write_source(key + ".cu", "text")
    used.entries()
    if chance.random() < 0.1:
        used.clear()
"""
    assert run_many_alone(code, 4) == [""] * 4, "no warning, no error"
    assert not list(folder.glob(".*"))
    assert DiskCache(folder).size() <= 10 << 10


def test_importing_writes_nothing(tmp_path: Path, run_alone: Callable[..., str]) -> None:
    code = """
import tconv.emulator.launch, tconv.jit.cache, tconv.jit.compile, tconv.jit.files, tconv.jit.runtime
"""
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    home.mkdir()
    temporary.mkdir()
    settings = {"HOME": str(home), "TMPDIR": str(temporary), "TCONV_CACHE_DIR": ""}
    assert run_alone(code, **settings, XDG_CACHE_HOME="", PYTHONDONTWRITEBYTECODE="1") == ""
    assert not [*home.iterdir(), *temporary.iterdir()]
