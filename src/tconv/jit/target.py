"""`Target`: the properties of a GPU that plans depend on, from the driver or from a table."""

from __future__ import annotations

import dataclasses
import functools
import re
from dataclasses import dataclass

from tconv.jit import libraries

_ARCH = re.compile(r"sm_(?P<major>\d+)(?P<minor>\d)(?P<suffix>[af]?)")

# Typical values: architecture without its suffix -> multiprocessors, largest shared memory of a
# block (bytes, with the opt-in), L2 (bytes), the GPU.
_TYPICAL: dict[str, tuple[int, int, int, str]] = {
    "sm_75": (40, 64 << 10, 4 << 20, "T4"),
    "sm_80": (108, 163 << 10, 40 << 20, "A100"),
    "sm_86": (82, 99 << 10, 6 << 20, "RTX 3090"),
    "sm_89": (128, 99 << 10, 72 << 20, "RTX 4090"),
    "sm_90": (132, 227 << 10, 60 << 20, "H200"),
    "sm_100": (148, 227 << 10, 126 << 20, "B200"),
    "sm_120": (170, 99 << 10, 96 << 20, "RTX 5090"),
}


@functools.cache
def parse_arch(arch: str) -> tuple[int, int, str]:
    """Major number, minor number and suffix of an architecture: "sm_90a" -> (9, 0, "a").

    Raises:
        ValueError: `arch` does not name a real architecture.
    """
    match = _ARCH.fullmatch(arch)
    # NOTE: architecture-specific feature sets exist from 9.0 on, family ones from 10.0 on.
    least = {"": 0, "a": 9, "f": 10}
    if match is None or int(match["major"]) < least[match["suffix"]]:
        raise ValueError(
            f"an architecture is named like sm_80, or sm_90a from 9.0 on, got {arch!r}"
        )
    return int(match["major"]), int(match["minor"]), match["suffix"]


def default_arch(major: int, minor: int) -> str:
    """The architecture compiled for a device of capability major.minor.

    From 9.0 on it is the architecture-specific one ("sm_90a"). Only that has `wgmma` and
    `setmaxnreg`, and a cubin runs only on its own architecture in any case.
    """
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


@dataclass(frozen=True)
class Target:
    """One GPU as the planner sees it.

    Attributes:
        arch: real architecture, "sm_90a".
        multiprocessors: number of SMs.
        shared_per_block: most bytes of shared memory of a block, static and dynamic together,
            with the opt-in.
        l2_bytes: size of the L2 cache.
    """

    arch: str
    multiprocessors: int
    shared_per_block: int
    l2_bytes: int

    def __post_init__(self) -> None:
        parse_arch(self.arch)

    @property
    def major(self) -> int:
        """The compute capability's major number: 9 for sm_90a."""
        return parse_arch(self.arch)[0]

    @property
    def minor(self) -> int:
        """The compute capability's minor number: 0 for sm_90a."""
        return parse_arch(self.arch)[1]

    @property
    def capability(self) -> tuple[int, int]:
        """Major and minor number, for comparisons: `target.capability >= (8, 0)`."""
        major, minor, _ = parse_arch(self.arch)
        return major, minor

    @property
    def arch_specific(self) -> bool:
        """Whether kernels for it may use its architecture's own instructions, such as `wgmma`."""
        return parse_arch(self.arch)[2] == "a"

    @staticmethod
    def named(arch: str) -> Target:
        """The target that stands for an architecture, without any GPU.

        Raises:
            ValueError: the table has no such architecture.
        """
        major, minor, _ = parse_arch(arch)
        base = f"sm_{major}{minor}"
        if base not in _TYPICAL:
            raise ValueError(
                f"typical values are known for {', '.join(Target.names())}, got {arch!r}"
            )
        multiprocessors, shared_per_block, l2_bytes, _ = _TYPICAL[base]
        return Target(arch, multiprocessors, shared_per_block, l2_bytes)

    @staticmethod
    def parse(text: str) -> Target:
        """The target of a GPU that is not here: "sm_90a", or "sm_90a:114" with its multiprocessors.

        The architecture is what a device of that capability is compiled for, with its suffix or
        without: "sm_90" is "sm_90a".

        Raises:
            ValueError: the table has no such architecture, or that is no number.
        """
        arch, colon, multiprocessors = text.strip().partition(":")
        named = Target.named(arch)
        if colon and (not multiprocessors.isdecimal() or int(multiprocessors) < 1):
            raise ValueError(
                "an architecture's number of multiprocessors is a whole number above 0, as in "
                f"sm_90a:114, got {text!r}"
            )
        return dataclasses.replace(
            named,
            arch=default_arch(*named.capability),
            multiprocessors=int(multiprocessors) if colon else named.multiprocessors,
        )

    @staticmethod
    def names() -> tuple[str, ...]:
        """The architectures that `named` knows, oldest first, each with its default suffix."""
        return tuple(default_arch(*parse_arch(base)[:2]) for base in _TYPICAL)

    @staticmethod
    def for_device(ordinal: int) -> Target:
        """The target of a device, from the driver at the first call. Creates no context.

        Args:
            ordinal: the device's index, as in torch (CUDA_VISIBLE_DEVICES is in effect).

        Raises:
            MissingDependencyError: no cuda-bindings, no driver or no device.
            ValueError: there is no such device.
        """
        return _for_device(ordinal)


@functools.cache
def _for_device(ordinal: int) -> Target:
    driver = libraries.driver()
    count = libraries.check(driver, driver.cuDeviceGetCount(), "count the CUDA devices")
    if not 0 <= ordinal < count:
        raise ValueError(f"a device ordinal is 0 to {count - 1} here, got {ordinal}")
    device = libraries.check(driver, driver.cuDeviceGet(ordinal), f"open device {ordinal}")
    attributes = driver.CUdevice_attribute

    def attribute(name: str) -> int:
        which = getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}")
        answer = driver.cuDeviceGetAttribute(which, device)
        return int(libraries.check(driver, answer, f"read {name} of device {ordinal}"))

    return Target(
        arch=default_arch(
            attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")
        ),
        multiprocessors=attribute("MULTIPROCESSOR_COUNT"),
        shared_per_block=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        l2_bytes=attribute("L2_CACHE_SIZE"),
    )
