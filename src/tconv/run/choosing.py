"""Choosing: who runs a call, our kernels or PyTorch's operator."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from tconv import choice, private, settings, tuning
from tconv.choice import Race, Reason
from tconv.counts import Counter, counter
from tconv.plan import Candidate
from tconv.run.binding import Call, Way
from tconv.tuning import PYTORCH

logger = logging.getLogger("tconv")


def known(call: Call, mode: int) -> Way | None:
    """Who runs a call, as far as that is known without timing."""
    way = call.ways.get(mode)
    if way is None and mode == tuning.DEFAULT:
        way = _by_rule(call) or _by_class(call)
        if way is not None:
            call.ways[mode] = way
    return way


def choose(call: Call, launch: tuning.Launch) -> Way:
    """Who runs a call. It is timed now where nothing else tells.

    Args:
        call: the call.
        launch: runs it once with a candidate, which may be `PYTORCH`, on the call's own tensors.

    Raises:
        CompileError, LaunchError, MissingDependencyError: a candidate of ours cannot be compiled or
            run.
        ValueError: an environment variable has a value that is not allowed.
    """
    mode = tuning.mode()
    way = known(call, mode)
    if way is not None:
        return way
    settings.timing()  # an error, if its value is none
    problem, device = call.problem, call.device
    if mode == tuning.FORCED:
        candidate = tuning.forced(problem)
        if candidate is not None:
            return _way(call, candidate, "own kernels")
        return known(call, tuning.DEFAULT) or _way(call, None, "own kernels")
    if mode != tuning.DEFAULT:
        flags = None if call.settings.own else call.settings.of_pytorch
        candidate = tuning.choose(problem, device, launch, flags)
        if candidate is not None:
            call.forget_tried(candidate)
            way = _way(call, candidate, "tuned")
            call.ways[mode] = way
            return way
        if call.settings.own:
            return _way(call, None, "own kernels")
        return known(call, tuning.DEFAULT) or _way(call, PYTORCH, "not timed")
    assert device is not None
    chosen = call.planned
    own = Candidate(chosen.stem, chosen.tile, None, chosen.cost, chosen.problem.like)
    race = tuning.race(problem, device, own, call.settings.of_pytorch, launch)
    if race is None:
        way = _way(call, PYTORCH, "not timed")
        if settings.timing():  # a later call may be timed
            return way
    else:
        call.forget_tried(None)
        way = _raced(call, race)
    call.ways[mode] = way
    return way


def leave_to_pytorch(
    call: Call,
    gradients: Callable[[], tuple[Call, Call]] | None,
    wanted: tuple[bool, bool],
    waited: bool = False,
    cast: bool = False,
) -> tuple[Counter | None, bool]:
    """The counter of a forward call that PyTorch runs together with its gradients, if it does.

    Its own function runs then, with its own backward, which nobody sees. So the counter counts the
    gradients too.

    Args:
        call: the forward call.
        gradients: makes the calls of its gradients; None where none is asked for.
        wanted: which of the gradients autograd records.
        waited: whether to wait no longer for gradients that nobody has timed.
        cast: whether autocast casts the call's tensors.

    Returns:
        The counter, and whether all calls like this one go the same way. If not, a call that
        PyTorch runs is to be watched.
    """
    mode = tuning.mode()
    way = known(call, mode)
    if way is None:
        return None, False
    if gradients is None:
        race = way.race
        if cast and race is not None and not choice.ours_is_faster(race, "forward", cast):
            way = _way(call, PYTORCH, "timed", race)
        return (way.served if way.candidate is PYTORCH else None), True
    asked = [of for of, is_wanted in zip(gradients(), wanted, strict=True) if is_wanted]
    ways = [way, *(known(of, mode) for of in asked)]
    if None in ways and not waited:  # it is timed within our node
        return None, False
    races = [(way.race, way.candidate is not PYTORCH) for way in ways if way and way.race]
    if any(way and way.race is None and way.candidate is not PYTORCH for way in ways):
        return None, True
    is_ours = choice.step_is_ours(races, lambda: _is_ahead(call, wanted)) if races else False
    if is_ours:
        # What a graph that is captured does says nothing of other calls.
        return None, not is_capturing(call)
    rows = []
    for of, found in zip((call, *asked), ways, strict=True):
        reason: Reason = "not timed" if found is None else found.reason
        if found is not None and found.candidate is not PYTORCH:
            reason = "step" if is_ours is False else "watched"
        rows.append((of.problem.direction, PYTORCH.stem, reason))
    return counter(*rows[0], *rows[1:]), is_ours is False


def is_capturing(call: Call) -> bool:
    """Whether a CUDA graph is captured where a call would run."""
    return call.device is not None and private.is_capturing(call.device)


def is_being_watched(call: Call, wanted: tuple[bool, bool]) -> bool:
    """Whether PyTorch's function runs such a call, to see whether the program waits for it.

    Args:
        call: the forward call.
        wanted: which of its gradients autograd records.
    """
    return _is_ahead(call, wanted) is None


def _is_ahead(call: Call, wanted: tuple[bool, bool]) -> bool | None:
    """Whether the host is ahead of the device where the program makes such calls, or None.

    Nobody waits for the host while a graph is captured.
    """
    if not settings.timing():
        return False
    return True if is_capturing(call) else call.watch(wanted).is_ahead


def _by_class(call: Call) -> Way | None:
    """By the times that another call of its class took; None without them."""
    device = call.device
    assert device is not None  # else a rule says who runs it
    flags = call.settings.of_pytorch
    race = tuning.raced(call.problem, device, call.planned.stem, flags)
    return None if race is None else _raced(call, race)


def _raced(call: Call, race: Race) -> Way:
    ours = choice.ours_is_faster(race, call.problem.direction)
    return _way(call, None if ours else PYTORCH, "timed", race)


def _by_rule(call: Call) -> Way | None:
    """By the rules of `tconv.choice`; None where both have to be timed.

    Raises:
        ValueError: TCONV_TIMING has a value that is not allowed, whether this call reads it or not.
    """
    settings.timing()
    if call.settings.own or call.device is None:
        return _way(call, None, "own kernels")
    name = torch.cuda.get_device_name(call.device)
    verdict = choice.verdict(call.planned, name)
    if verdict.runs == "timed":
        return None
    return _way(call, PYTORCH if verdict.runs == "pytorch" else None, verdict.reason)


def _way(call: Call, candidate: Candidate | None, reason: Reason, race: Race | None = None) -> Way:
    if candidate is not None:
        stem = candidate.stem
    else:
        stem = call.planned.stem
    logger.debug("%s runs %s: %s", stem, call.problem, choice.SENTENCES[reason])
    return Way(candidate, reason, counter(call.problem.direction, stem, reason), race)
