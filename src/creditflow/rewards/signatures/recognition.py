"""Recognise the library that a reward function was written for, by its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence

from creditflow.errors import RewardError, did_you_mean
from creditflow.rewards.signatures.base import FORMATS, Format, Signature, is_required
from creditflow.rewards.signatures.libraries import SIGNATURES

_NATIVE = frozenset({"step", "trajectory"})
_GROUP = frozenset({"states", "infos"})
"""Parameters of a group function of verifiers, which compares several rollouts."""


def recognised(
    choice: str | None, parameters: Sequence[inspect.Parameter], args: Collection[str], key: str
) -> Signature | None:
    """The signature of a function; None if it has none of these and may be one of creditflow.

    `choice`: the entry's `signature`. `args`: names in the entry's `args`. Raises RewardError for an unknown or
    ambiguous signature, and for parameters that do not fit it.
    """
    names = [parameter.name for parameter in parameters]
    takes = f"it takes ({', '.join(names)})"
    if choice is not None:
        if choice not in SIGNATURES:
            hint = did_you_mean(choice, SIGNATURES)
            raise RewardError(f"{key}.signature: expected {', '.join(SIGNATURES)}, got {choice!r}{hint}")
        signature = SIGNATURES[choice]
    else:
        fitting = [candidate for candidate in SIGNATURES.values() if candidate.marks.intersection(names)]
        required = {parameter.name for parameter in parameters if is_required(parameter)}
        if not fitting or (required & _NATIVE and not any(candidate.marks & required for candidate in fitting)):
            return None
        if group := _GROUP.intersection(names):
            raise RewardError(
                f"{key}: expected a function of one text, got one of several: {sorted(group)[0]!r} is a parameter of "
                f"group functions of verifiers; set signature: trl if it is a column of the data set; {takes}"
            )
        if len(fitting) > 1 or _NATIVE.intersection(names):
            options = [candidate.name for candidate in fitting]
            native = ", or decorate it with @reward or @outcome" if _NATIVE.intersection(names) else ""
            raise RewardError(f"{key}: ambiguous parameters: set signature: {' or '.join(options)}{native}; {takes}")
        (signature,) = fitting
    _expect_fit(signature, parameters, args, key, takes)
    return signature


def checked_format(choice: str | None, signature: Signature | None, key: str) -> Format | None:
    """The entry's `format`. Raises RewardError if it is unknown, or if the signature has no formats."""
    if choice is None:
        return None
    if signature is None or signature.offered is not None:
        having = ", ".join(candidate.name for candidate in SIGNATURES.values() if candidate.offered is None)
        raise RewardError(f"{key}.format: expected it of functions with signature {having} only, got {choice!r}")
    if choice not in FORMATS:
        raise RewardError(
            f"{key}.format: expected {' or '.join(FORMATS)}, got {choice!r}{did_you_mean(choice, FORMATS)}"
        )
    return choice


def _expect_fit(
    signature: Signature, parameters: Sequence[inspect.Parameter], args: Collection[str], key: str, takes: str
) -> None:
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    nameless = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and is_required(p)]
    if nameless:
        raise RewardError(f"{key}: {signature.name} passes arguments by name, and {nameless[0]!r} has none; {takes}")
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not takes_all and signature.offered is not None and not signature.offered.intersection(names):
        raise RewardError(
            f"{key}: expected the parameters of {signature.name}, {signature.form}, {takes}; rename its parameters, or "
            "wrap it in a function that has them"
        )
    if unknown := [name for name in args if name not in names and not takes_all]:
        raise RewardError(f"{key}: unknown argument {unknown[0]!r}{did_you_mean(unknown[0], names)}; {takes}")
    if signature.offered is None:
        return
    missing = [p.name for p in parameters if is_required(p) and p.name not in signature.offered | {*args}]
    if missing:
        raise RewardError(
            f"{key}: {signature.name} passes {signature.form}, but not {missing[0]!r}: set it in `args`; {takes}"
        )
