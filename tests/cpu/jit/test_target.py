from __future__ import annotations

import dataclasses

import pytest

from tconv.jit.target import Target, default_arch, parse_arch


def test_named_targets() -> None:
    assert Target.names() == ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
    for name in Target.names():
        target = Target.named(name)
        assert target.arch == name
        assert default_arch(target.major, target.minor) == name
        assert target.arch_specific == (target.capability >= (9, 0))
        assert target.multiprocessors >= 40
        assert 64 << 10 <= target.shared_per_block <= 227 << 10
        assert target.l2_bytes >= 4 << 20


def test_the_target_that_was_measured() -> None:
    assert Target.named("sm_90a") == Target("sm_90a", 132, 232448, 62914560)
    assert dataclasses.replace(Target.named("sm_90a"), arch="sm_90") == Target.named("sm_90")
    assert not Target.named("sm_90").arch_specific


@pytest.mark.parametrize(
    ("arch", "parsed"),
    [
        ("sm_75", (7, 5, "")),
        ("sm_90a", (9, 0, "a")),
        ("sm_100f", (10, 0, "f")),
        ("sm_121a", (12, 1, "a")),
    ],
)
def test_parse_arch(arch: str, parsed: tuple[int, int, str]) -> None:
    assert parse_arch(arch) == parsed


@pytest.mark.parametrize(
    "arch", ["90a", "sm90", "sm_9", "compute_90", "sm_80a", "sm_90f", "sm_90b"]
)
def test_no_architecture(arch: str) -> None:
    with pytest.raises(ValueError, match=f"got '{arch}'"):
        Target.named(arch)


def test_an_architecture_without_typical_values() -> None:
    with pytest.raises(ValueError, match=r"sm_75, .*sm_120a, got 'sm_87'"):
        Target.named("sm_87")
