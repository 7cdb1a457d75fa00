# SPDX-License-Identifier: Apache-2.0
"""``setting``: a dataclass field that declares its default and its limits.

Below ``run_config.py`` and ``optimizers.py``, whose dataclasses are made of settings.
What a setting means stands in the ``Attributes:`` section of its class, from where
``--help`` and ``docs/reference/configuration.md`` take it.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import c_float
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from inspect import getdoc
from types import UnionType
from typing import Any, Final, NamedTuple, TypedDict, Unpack, get_type_hints

from tessera.errors import SettingConflictError, SettingValueError, TesseraError

MOST_COUNT: Final = 2**31 - 1
"""What the 32-bit counters of a step hold; the bound of what has no nearer one."""


class Limits(TypedDict, total=False):
    """What a setting may be, and the error that says that it is not.

    Attributes:
      least: The lowest number.
      most: The highest number.
      above: A number that it has to exceed.
      below: A number that it has to stay below.
      choices: The texts that it may be; with numbers beside them, if those have limits.
      test: What else holds of a value.
      legal: What passes ``test``, in words.
      error: The class of the error; ``SettingValueError`` without one.
    """

    least: float
    most: float
    above: float
    below: float
    choices: Sequence[str]
    test: Callable[[Any], object]
    legal: str
    error: type[TesseraError]


def setting(default: Any, **limits: Unpack[Limits]) -> Any:
    """A dataclass field with limits, outside which ``problems_of`` finds an error.

    A float has to keep to them as a float32, too, which is what a step computes with.

    Example:
      >>> @dataclass(frozen=True)
      ... class Oven:
      ...     celsius: int = setting(180, least=0, most=300)
      >>> [str(e.fix) for e in problems_of(Oven(celsius=999), "oven")]
      ['use a number from 0 to 300']
    """
    return field(default=default, metadata=limits)


def problems_of(config: Any, group: str) -> list[TesseraError]:
    """Every setting of a dataclass that is outside its limits, as its own error.

    Args:
      config: An instance of a dataclass whose fields are made by ``setting``.
      group: How the group is called on the command line: ``training``.
    """
    errors: list[TesseraError] = []
    for one in fields(config):
        value, limits = getattr(config, one.name), one.metadata
        if _within(value, limits):
            continue
        name = f"{group}.{one.name}".lstrip(".")
        got = f"{name}={as_yaml(value)}"
        is_rounded = isinstance(value, float) and as_f32(value) != value
        if is_rounded and _keeps_to(value, limits):
            got += f", which is {as_f32(value):g} as a float32"
        errors.append(
            limits.get("error", SettingValueError)(
                f"{name} does not take this value", got=got, fix=_legal(value, limits)
            )
        )
    return errors


class Conflict(NamedTuple):
    """A row of a table of settings that others exclude, or that nothing reads.

    A condition is ``name=value``, ``name!=value``, or ``name`` alone, which holds where
    a setting has not its default; ``a|b`` are two values.

    Attributes:
      when: Conditions with spaces between them, all of which hold; or none.
      settings: Conditions of which none may hold then.
      why: What the values of these settings do not say.
    """

    when: str
    settings: str
    why: str = ""


def broken(
    rules: Iterable[Conflict],
    config: Any,
    group: str = "",
    what: str = "has no effect in this run",
) -> Iterator[TesseraError]:
    """T507 for each rule that a configuration breaks.

    Args:
      rules: About settings of ``config``.
      config: A dataclass of settings, or one of such.
      group: How it is called on the command line, if it is a group.
      what: What the message says of a setting.

    Example:
      >>> @dataclass(frozen=True)
      ... class Oven:
      ...     is_on: bool = setting(False)
      ...     celsius: int = setting(180)
      >>> oven = Oven(celsius=200)
      >>> [e.got for e in broken([Conflict("is_on=false", "celsius")], oven, "oven")]
      ['oven.celsius=200; oven.is_on=false']
    """

    def shown(conditions: Iterable[str]) -> dict[str, str]:
        names = [re.split("!?=", condition)[0] for condition in conditions]
        prefix = group and f"{group}."
        return {f"{prefix}{name}": as_yaml(find(config, name)[0]) for name in names}

    for when, settings, why in rules:
        given = [each for each in settings.split() if _holds(config, each)]
        if not given or not all(_holds(config, each) for each in when.split()):
            continue
        wrong, reasons = shown(given), shown(when.split())
        several, others = len(wrong) > 1, " or ".join(reasons)
        texts = (", ".join(map("=".join, each.items())) for each in (wrong, reasons))
        yield SettingConflictError(
            f"{' and '.join(wrong)} {what.replace('has', 'have') if several else what}",
            got="; ".join(texts) + why,
            fix=f"leave {'them' if several else 'it'} out"
            + (others and f", or change {others}"),
        )


def _holds(config: Any, condition: str) -> bool:
    """Whether a condition of a ``Conflict`` holds."""
    name, equals, values = condition.partition("=")
    value, default = find(config, name.removesuffix("!"))
    if not equals:
        return value != default
    # In Python, a float may be written as an int.
    texts = {as_yaml(value), f"{as_yaml(value)}.0"}
    return texts.isdisjoint(values.split("|")) == name.endswith("!")


def find(config: Any, name: str) -> tuple[Any, Any]:
    """A setting by its dotted name, and its default; twice None if it has none.

    Of the group ``model``, the model's sizes are one level down.
    """
    *groups, last = name.split(".")
    for group in groups:
        config = getattr(config, group)
        if not hasattr(config, last) and hasattr(config, "config"):
            config = config.config
    if not hasattr(config, last):
        return None, None
    return getattr(config, last), default_of(type(config).__dataclass_fields__[last])


def default_of(one: Field[Any]) -> Any:
    """The default of a dataclass's field; ``MISSING`` where it has none."""
    made = one.default_factory
    return one.default if made is MISSING else made()


@contextmanager
def collected(errors: list[TesseraError]) -> Iterator[None]:
    """Keep the mistake that a block raises, and go on after the block."""
    try:
        yield
    except TesseraError as error:
        errors.append(error)


def raise_all(errors: Sequence[TesseraError]) -> None:
    """Raise all mistakes of a configuration, if there are any, as one error."""
    if errors:
        raise joined(errors)


def joined(errors: Sequence[TesseraError]) -> TesseraError:
    """All mistakes as one error with the code of the first; a single one as it is."""
    first, *others = errors
    if not others:
        return first
    got: list[str] = []
    fix: list[str] = []
    for number, error in enumerate(errors, 1):
        lines = "; ".join(error.got.splitlines())
        got.append(f"{number}. [{error.code}] {error.what}" + (lines and f": {lines}"))
        fix.extend(f"{number}. {line}" for line in error.fix.splitlines())
    return type(first)(
        f"{len(errors)} things in the configuration cannot be used",
        got="\n".join(got),
        fix="\n".join(fix),
    )


@dataclass(frozen=True)
class Description:
    """One setting, as ``--help`` and the documentation show it.

    Attributes:
      name: Its name within its group; ``synthetic.noise`` for one of a nested class.
      type: ``int``, ``float or null``, …
      default: As YAML, or ``""`` where every configuration file has to give it.
      meaning: What it does.
    """

    name: str
    type: str
    default: str
    meaning: str


def describe(cls: type) -> Iterator[Description]:
    """Every setting of a configuration class, nested classes included, in order."""
    hints, meanings = get_type_hints(cls), _meanings(cls)
    for one in fields(cls):
        hint = hints[one.name]
        if is_dataclass(hint) and isinstance(hint, type):
            for inner in describe(hint):
                yield replace(inner, name=f"{one.name}.{inner.name}")
            continue
        default = default_of(one)
        shown = "" if default is MISSING else as_yaml(default)
        limits = one.metadata
        kind = _type_name(hint)
        if "choices" in limits:
            kind = " or ".join(limits["choices"])
            if "least" in limits:
                kind = f"int or {kind}"
        yield Description(one.name, kind, shown, meanings.get(one.name, ""))


def as_yaml(value: Any) -> str:
    """A value as one would write it on the command line.

    Example:
      >>> as_yaml(None), as_yaml(True), as_yaml([[4, 1], ["fsdp", "tp"]]), as_yaml("")
      ('null', 'true', '[[4,1],[fsdp,tp]]', "''")
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{','.join(as_yaml(item) for item in value)}]"
    if isinstance(value, str):
        return value if re.fullmatch(r"[\w.${}-]+", value) else repr(value)
    return str(value)


def walk(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of nested dicts, with its dotted path."""
    if not isinstance(values, dict):
        yield path, values
        return
    for key, value in values.items():
        yield from walk(value, f"{path}.{key}" if path else str(key))


def as_f32(value: float) -> float:
    """A number as a device holds it: rounded, infinite or zero beyond what it can.

    Example:
      >>> as_f32(1e39), as_f32(1e-39), as_f32(1 - 1e-9)
      (inf, 0.0, 1.0)
    """
    rounded = c_float(value).value
    # Devices take what is below the least normal number for zero.
    return rounded if abs(rounded) >= 2.0**-126 else 0.0


def _within(value: Any, limits: Mapping[str, Any]) -> bool:
    """Whether a value keeps to its limits; null has to pass a test alone."""
    if value is None:
        return "test" not in limits or bool(limits["test"](value))
    if value in limits.get("choices", ()):
        return True
    is_number = type(value) in (int, float)
    if is_number and ("least" in limits or "choices" not in limits):
        forms = (value, as_f32(value)) if isinstance(value, float) else (value,)
        if not all(_keeps_to(form, limits) for form in forms):
            return False
    elif "choices" in limits:
        return False
    return "test" not in limits or bool(limits["test"](value))


def _keeps_to(value: float, limits: Mapping[str, Any]) -> bool:
    """Whether a number keeps to its limits. NaN and infinity do not."""
    return (
        abs(value) < float("inf")
        and value >= limits.get("least", value)
        and value <= limits.get("most", value)
        and value > limits.get("above", float("-inf"))
        and value < limits.get("below", float("inf"))
    )


def _legal(value: Any, limits: Mapping[str, Any]) -> str:
    """What to write instead of a value."""
    options = [*limits.get("choices", ())]
    close = get_close_matches(str(value), options, n=1)
    if "least" in limits and "most" in limits:
        kind = limits.get("legal", "a number")
        options.insert(0, f"{kind} from {limits['least']} to {limits['most']}")
    elif "legal" in limits:
        options.insert(0, limits["legal"])
    if options:
        *others, last = options
        text = " or ".join(filter(None, (", ".join(others), last)))
        return (f"did you mean {close[0]!r}? " if close else "") + f"use {text}"
    words = {"least": "at least", "above": "above", "most": "at most", "below": "below"}
    ranges = [f"{words[name]} {limits[name]}" for name in words if name in limits]
    if isinstance(value, float) and _keeps_to(value, limits):
        ranges.append("that a float32 holds")
    return f"use a number {' and '.join(ranges)}" if ranges else "use a finite number"


def _type_name(hint: Any) -> str:
    """A type as users of YAML call it."""
    names = {
        "str": "text",
        "bool": "true or false",
        "NoneType": "null",
        "tuple": "list",
        "Any": "text or list or dict",
    }
    options = getattr(hint, "__args__", ()) if not isinstance(hint, type) else ()
    if type(None) in options or isinstance(hint, UnionType):
        return " or ".join(_type_name(option) for option in options)
    name = getattr(hint, "__name__", str(hint))
    return names.get(name, name.lower())


def _meanings(cls: type) -> dict[str, str]:
    """The entries of the ``Attributes:`` section of a class and of its bases."""
    meanings: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        text = getdoc(base) or ""
        _, _, section = text.partition("Attributes:\n")
        section = re.split(r"\n\n(?=\S)", section)[0]
        for entry in re.split(r"\n?^  (?=\w+:)", section, flags=re.MULTILINE)[1:]:
            name, _, meaning = entry.partition(":")
            meanings[name] = " ".join(meaning.split())
    return meanings
