# SPDX-License-Identifier: Apache-2.0
"""Random programs under ``ts.function`` give what Python gives, or a coded error."""

import linecache
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tessera as ts
from tests.fuzz.programs import draw

INPUTS = ((3, 4), (-2, 1), (0, -5), (7, 2))


def state() -> dict[str, Any]:
    """The state that a program is given, and may change."""
    n, m, *rows, keep = (jnp.int32(each) for each in (1, 2, 3, 4, 9))
    return {"n": n, "opt": {"m": m}, "rows": rows, "keep": keep}


def plain(value: Any) -> Any:
    """A tree of arrays as Python numbers."""
    return jax.tree.map(int, value)


def loader(seed: int) -> Callable[[], Callable[..., Any]]:
    """A function that loads a drawn program into a fresh module, and gives it."""
    source, name = draw(seed), f"<program {seed}>"
    lines = source.splitlines(keepends=True)
    linecache.cache[name] = (len(source), None, lines, name)
    code = compile(source, name, "exec", dont_inherit=True)

    def load() -> Callable[..., Any]:
        module = types.ModuleType(f"drawn_{seed}")
        sys.modules[module.__name__] = module
        exec(code, module.__dict__)
        return module.program

    return load


def called(function: Callable[..., Any], x: int, y: int) -> Any:
    """A call's result and the state after it, or the exception that it raises."""
    before = state()
    try:
        result = function(jnp.int32(x), jnp.int32(y), before)
    except Exception as error:
        return error
    return plain(result), plain(before)


def outcome(seed: int) -> str:
    """``equal``, an error's code, ``raises`` where Python does, or what is wrong."""
    load = loader(seed)
    expected = [called(load(), *pair) for pair in INPUTS]
    function = ts.function(load())
    for pair, by_python in zip(INPUTS, expected, strict=True):
        found = called(function, *pair)
        if isinstance(found, ts.TesseraError):
            return found.code
        if isinstance(found, Exception):
            if all(isinstance(each, Exception) for each in expected):
                return "raises"
            return f"wrong for {pair}: {found!r} without a code"
        if isinstance(by_python, Exception) or repr(found) != repr(by_python):
            return f"wrong for {pair}: {found!r}, by Python {by_python!r}"
    return "equal"


@pytest.mark.fuzz(sample=50, whole=2000)
def test_a_program_gives_what_python_gives_or_a_coded_error(seed, monkeypatch):
    monkeypatch.setitem(sys.modules, f"drawn_{seed}", None)
    with jax.numpy_dtype_promotion("standard"):
        found = outcome(seed)
    assert found in ("equal", "raises", "T318", "T319", "T320"), draw(seed)
