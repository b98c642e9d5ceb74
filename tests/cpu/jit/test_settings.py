from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from tconv import settings
from tconv.errors import CompileError, TconvError

ACCESSORS: dict[str, Callable[[], object]] = {
    "TCONV_CACHE": settings.cache_enabled,
    "TCONV_CACHE_DIR": settings.cache_dir,
    "TCONV_CACHE_LIMIT": settings.cache_limit,
    "TCONV_DEBUG": settings.debug,
    "TCONV_EMULATE": settings.emulate,
    "TCONV_EMULATE_ARCH": settings.emulate_arch,
    "TCONV_KERNEL": settings.kernel,
    "TCONV_SANITIZE": settings.sanitize,
    "TCONV_STRICT": settings.strict,
    "TCONV_TIMING": settings.timing,
}


def test_the_table_lists_every_variable_in_order() -> None:
    assert [variable.name for variable in settings.VARIABLES] == sorted(ACCESSORS)
    assert all(variable.meaning and variable.allowed for variable in settings.VARIABLES)


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TCONV_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    expected = {
        "TCONV_CACHE": True,
        "TCONV_CACHE_DIR": Path.home() / ".cache" / "tconv",
        "TCONV_CACHE_LIMIT": 1 << 30,
        "TCONV_DEBUG": 0,
        "TCONV_EMULATE": False,
        "TCONV_EMULATE_ARCH": "sm_90a",
        "TCONV_KERNEL": None,
        "TCONV_SANITIZE": False,
        "TCONV_STRICT": False,
        "TCONV_TIMING": True,
    }
    assert {name: read() for name, read in ACCESSORS.items()} == expected
    for name in ACCESSORS:
        monkeypatch.setenv(name, "")
    assert {name: read() for name, read in ACCESSORS.items()} == expected, "empty is unset"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("TCONV_CACHE", "0", False),
        ("TCONV_CACHE_DIR", "/somewhere/else", Path("/somewhere/else")),
        ("TCONV_CACHE_DIR", "~/kernels", Path.home() / "kernels"),
        ("TCONV_CACHE_LIMIT", "1", 1),
        ("TCONV_CACHE_LIMIT", "12345", 12345),
        ("TCONV_CACHE_LIMIT", "3K", 3 << 10),
        ("TCONV_CACHE_LIMIT", "512M", 512 << 20),
        ("TCONV_CACHE_LIMIT", "20G", 20 << 30),
        ("TCONV_DEBUG", "3", 3),
        ("TCONV_EMULATE", "1", True),
        ("TCONV_EMULATE_ARCH", "sm_75", "sm_75"),
        ("TCONV_KERNEL", "sm90_tf32_forward", "sm90_tf32_forward"),
        ("TCONV_SANITIZE", "1", True),
        ("TCONV_STRICT", "1", True),
        ("TCONV_TIMING", "0", False),
    ],
)
def test_values(monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: object) -> None:
    before = ACCESSORS[name]()
    monkeypatch.setenv(name, text)
    assert ACCESSORS[name]() == value
    assert ACCESSORS[name]() == value, "read again, without parsing"
    monkeypatch.delenv(name)
    if name != "TCONV_CACHE_DIR":
        assert ACCESSORS[name]() == before, "read at every call"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("TCONV_CACHE", "yes"),
        ("TCONV_CACHE", " 1"),
        ("TCONV_CACHE_DIR", "relative/folder"),
        ("TCONV_CACHE_LIMIT", "0"),
        ("TCONV_CACHE_LIMIT", "-1"),
        ("TCONV_CACHE_LIMIT", "1.5G"),
        ("TCONV_CACHE_LIMIT", "1GB"),
        ("TCONV_CACHE_LIMIT", "1g"),
        ("TCONV_CACHE_LIMIT", "M"),
        ("TCONV_DEBUG", "4"),
        ("TCONV_DEBUG", "-1"),
        ("TCONV_EMULATE", "true"),
        ("TCONV_EMULATE_ARCH", "90"),
        ("TCONV_EMULATE_ARCH", "sm_90b"),
        ("TCONV_KERNEL", "General-Forward"),
        ("TCONV_SANITIZE", "2"),
        ("TCONV_STRICT", "on"),
        ("TCONV_TIMING", "never"),
    ],
)
def test_bad_values(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.setenv(name, text)
    allowed = next(v.allowed for v in settings.VARIABLES if v.name == name)
    for read in (ACCESSORS[name], ACCESSORS[name], settings.check):
        with pytest.raises(ValueError) as raised:
            read()
        assert str(raised.value) == f"{name} must be {allowed}, got {name}={text!r}"
    assert settings.current()[name] == text


def test_xdg_cache_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TCONV_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert settings.cache_dir() == Path("/caches/tconv")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert settings.cache_dir() == Path.home() / ".cache" / "tconv"


def test_a_compile_error_says_all() -> None:
    log = "\n".join(
        ["note: nothing", *(f"tiny.cu({line}): error: bad {line}" for line in range(20))]
    )
    error = CompileError(
        "tiny did not compile", log, ["-a", "-b"], "/sources/tiny.cu", None, "text"
    )
    error.plan = "Plan(tiny)"
    shown = str(error)
    assert shown.startswith("tiny did not compile\n  tiny.cu(0): error: bad 0\n")
    assert "bad 7" in shown and "bad 8" not in shown and "note" not in shown
    assert shown.endswith("options: -a -b\nsource: /sources/tiny.cu\nplan: Plan(tiny)")
    assert isinstance(error, TconvError)
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == shown
    assert (copy.log, copy.options, copy.source_text) == (log, ("-a", "-b"), "text")
    assert str(CompileError("only this")) == "only this"
