# SPDX-License-Identifier: Apache-2.0
"""Imports reward functions, and calls them: what runs in a process of rewards.

A function takes what its signature names, as TRL's trainers call it: ``prompts``,
``completions``, and any column of the records; ``**kwargs`` takes all columns. It
returns a list with a number, or None, for each completion. It may be async.
"""

import faulthandler
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from inspect import Parameter, iscoroutine, signature
from operator import attrgetter
from typing import Any, Final, TypeAlias

from tessera.errors import RewardError, did_you_mean
from tessera.train.files.user_modules import described, import_user_module
from tessera.train.rewards import library
from tessera.train.rewards.reward_names import RewardName

_OWN: Final = ("prompts", "completions")
LARGEST: Final = 1e30
"""A weighted sum of such rewards is finite in float32."""
_NO_NUMBERS: Final = "did not return a list with a number for each completion"

_functions: Final[list[Callable[..., Any]]] = []


Arguments: TypeAlias = Mapping[str, Any]  # prompts, completions and all columns
# What went wrong is its kind with an example: ``raised KeyError ('x', rewards.py:3)``.
Outcome: TypeAlias = float | str | None
Outcomes: TypeAlias = list[Outcome] | str


class _UnusableError(ValueError):
    """What is wrong with a function."""


def load(names: Sequence[RewardName], columns: Sequence[str]) -> None:
    """Import the functions, and compare their signatures with the columns.

    Raises:
      RewardError: [T720] one of them cannot be used.
    """
    # What a module imports must leave the accelerators to the run.
    os.environ.update(JAX_PLATFORMS="cpu", CUDA_VISIBLE_DEVICES="")
    for name in names:
        try:
            _functions.append(_bound(name, columns))
        except RewardError:
            raise
        except BaseException as error:
            is_own = isinstance(error, _UnusableError)
            raise RewardError(
                f"the reward {name.text!r} cannot be used",
                got=str(error) if is_own else described(error),
                fix="write my_module:function, a function of prompts, completions and "
                "columns of the records, in the current folder or in PYTHONPATH",
            ) from error


def call(index: int, arguments: Arguments, seconds: float) -> Outcomes:
    """Call a function.

    Args:
      index: Of the function, among those that were loaded.
      arguments: ``prompts``, ``completions`` and all columns.
      seconds: The most that it may take; then this process ends.

    Returns:
      For each completion a reward, None where it is not judged, or what went wrong; or
      what went wrong with the call.
    """
    # Where the process that calls, which kills this one in time, has died itself: a
    # regular expression holds the interpreter, and no Python here runs beside it.
    faulthandler.dump_traceback_later(seconds + 1, exit=True, file=2)
    try:
        count, result = len(arguments["completions"]), _functions[index](arguments)
        # A set or a dict has no order of completions.
        is_list = isinstance(result, (list, tuple, Iterator))
        values = list(result) if is_list or getattr(result, "ndim", 0) == 1 else []
        if len(values) != count:
            return f"{_NO_NUMBERS} ({type(result).__name__}, {len(values)} of {count})"
        return [_outcome(value) for value in values]
    except BaseException as error:
        return f"raised {described(error)}"
    finally:
        faulthandler.cancel_dump_traceback_later()


def _bound(name: RewardName, columns: Sequence[str]) -> Callable[..., Any]:
    """A function of all arguments, which calls a reward with those that it takes.

    Raises:
      _UnusableError: There is no such function or column.
    """
    known, needed, settings = [*_OWN, *columns], list[str](), name.settings
    if name.module:
        module, top = import_user_module(name.module), name.function.partition(".")[0]
        if not hasattr(module, top):
            has = [each for each in vars(module) if callable(vars(module)[each])]
            raise _UnusableError(
                f"{name.module} has no {top}: {did_you_mean(top, has)}"
            )
        function = attrgetter(name.function)(module)
    elif name.function in library.NAMES:
        # It makes the function that is called: no column takes the place of a setting.
        make = getattr(library, name.function)
        bound = signature(make).bind(**settings)
        bound.apply_defaults()
        needed += filter(None, [bound.arguments.get("column")])
        function, settings = make(**settings), dict[str, Any]()
    elif os.path.isdir(name.text):
        raise _UnusableError(f"a folder has a slash: write ./{name.text} for the model")
    else:
        raise _UnusableError(did_you_mean(name.function, library.NAMES))
    parameters = signature(function).parameters.values()
    takes_all = any(each.kind is Parameter.VAR_KEYWORD for each in parameters)
    stars = Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL
    named = {each.name: each for each in parameters if each.kind not in stars}
    needed += [key for key, each in named.items() if each.default is Parameter.empty]
    if not takes_all and not {"completions", "completion_ids"} & named.keys():
        raise _UnusableError("it does not take the completions that it judges")
    if unknown := settings.keys() - named.keys():  # **kwargs would swallow it
        raise _UnusableError(f"it takes no {unknown.pop()!r}, but {', '.join(named)}")
    if missing := [key for key in needed if key not in (*known, *settings)]:
        raise _UnusableError(
            f"it takes {', '.join(needed)}, and the records have no {missing[0]!r}: "
            f"{did_you_mean(missing[0], known)}"
        )
    if shadowed := [each for each in _OWN if each in columns]:
        raise _UnusableError(f"the records have a column {shadowed[0]!r}: rename it")
    takes = [k for k in known if k not in settings and (takes_all or k in named)]

    def with_its_own(arguments: Arguments) -> Any:
        result = function(**{key: arguments[key] for key in takes}, **settings)
        if iscoroutine(result):
            import asyncio

            result = asyncio.run(result)
        return result

    return with_its_own


def _outcome(value: Any) -> Outcome:
    # Arrays of one element and texts of digits would be numbers, too.
    if not isinstance(value, str | bytes) and not getattr(value, "ndim", 0):
        with suppress(TypeError, ValueError, OverflowError, RuntimeError):
            if value is None or abs(float(value)) < LARGEST:
                return None if value is None else float(value)
    return f"{_NO_NUMBERS} ({value!r:.200})"
