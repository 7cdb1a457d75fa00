# SPDX-License-Identifier: Apache-2.0
"""Packages whose names are imported when they are first used.

Importing JAX takes seconds, so Tessera reports mistakes in settings and starts the
launcher before it. The stub beside a package's ``__init__.py`` says where each of its
names comes from, to type checkers and at run time.

Source: Scientific Python SPEC 1, "Lazy Loading of Submodules and Functions".
"""

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any


def lazy_names(
    package: str, instead: Mapping[str, str] = MappingProxyType({})
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package, from its stub.

    The stub contains only ``from module import name as name``, or ``import *`` of a
    module with an ``__all__``.

    Args:
      package: The package.
      instead: What to write in place of some names that it lacks.

    Example:
      >>> get, _, names = lazy_names("tessera.train.models")
      >>> "DecoderConfig" in names, get("DecoderConfig").__module__
      (True, 'tessera.train.models.decoder.config')
    """
    module = sys.modules[package]
    origins = dict(_origins(_parsed(str(module.__file__) + "i")))

    def get(name: str) -> Any:
        if name not in origins:
            raise no_attribute(package, name, instead)
        source, original = origins[name]
        if source == package:  # it would ask itself
            value = import_module(f"{source}.{original}")
        else:
            value = getattr(__import__(source, fromlist=[original]), original)
        setattr(module, name, value)
        return value

    return get, lambda: sorted({*vars(module), *origins}), list(origins)


def no_attribute(package: str, name: str, instead: Mapping[str, str]) -> AttributeError:
    """The error for a name that a module lacks; JAX may have one like it."""
    own = [
        f"{module}.{name}"
        for module in ("jax", "jax.lax", "jax.nn", "jax.numpy")
        if not name.startswith("_") and name in vars(sys.modules.get(module, object))
    ]
    use = instead.get(name, own[0] if own else None)
    hint = f"; use {use}" if use else ""
    return AttributeError(f"module {package!r} has no attribute {name!r}{hint}")


def _origins(stub: ast.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    """Where each name of a stub comes from: a module, and the name there."""
    for node in stub.body:
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        for alias in node.names:
            names = _all_of(node.module) if alias.name == "*" else [alias.name]
            for name in names:
                yield alias.asname or name, (node.module, name)


def _all_of(module: str) -> list[str]:
    """``__all__`` of a module, read from its source without importing it."""
    spec = find_spec(module)
    assert spec is not None, module
    for node in _parsed(str(spec.origin)).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{module} lists no names")


def _parsed(file: str) -> ast.Module:
    return ast.parse(Path(file).read_text(encoding="utf-8"))
