# SPDX-License-Identifier: Apache-2.0
"""``jax_compat`` is the only door to JAX's internals and its primitives' parameters."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_architecture import PROGRAMS, SOURCES, name_of, parsed


def internal_names(path: Path) -> Iterator[str]:
    """Where a file reaches past JAX's public interface, by import or by attribute."""
    internal = re.compile(r"jax\._src|jax\.interpreters|jaxlib")
    for node in ast.walk(parsed(path)):
        match node:
            case ast.Import(names=aliases):
                reached = [alias.name for alias in aliases]
            case ast.ImportFrom(module=str(module), names=aliases):
                reached = [f"{module}.{alias.name}" for alias in aliases]
            case ast.Attribute():
                reached = [ast.unparse(node)]
            case _:
                continue
        for name in reached:
            if internal.match(name):
                yield f"{name_of(path)}:{node.lineno} {name}"


@pytest.mark.slow(reason="it reads every module")
def test_one_room_alone_knows_the_internals_of_jax():
    doors = [p for p in SOURCES if p.parent.name == "jax_compat"]
    doors = [p for p in doors if p.name != "__init__.py"]
    through = {door.stem for door in doors if list(internal_names(door))}
    assert through >= {"jaxprs", "traces"}, "the search finds nothing where it is"
    others = [path for path in PROGRAMS if path not in doors]
    found = [name for path in others for name in internal_names(path)]
    assert not found, "\n".join(found)


# Parameters of Tessera's own primitives.
OWN_PARAMETERS = {"allow_unused", "call", "hint", "names", "stage"}
# Names of what has trees of weights, not an equation's parameters.
HAVE_WEIGHTS = {"self", "owner", "state", "abstract_state", "zero", "specs", "shapes"}
HAVE_WEIGHTS |= {"rngs", "data"}


def foreign_parameters(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Where a program reads parameters of JAX's equations by their private names."""
    own = set[ast.AST]()
    for node in ast.walk(tree):
        match node:
            case (
                ast.Subscript(value=params, slice=ast.Constant(value=key))
                | ast.Call(
                    func=ast.Attribute(value=params, attr="get"),
                    args=[ast.Constant(value=key), *_],
                )
                | ast.Compare(left=ast.Constant(value=key), comparators=[params])
            ) if key in OWN_PARAMETERS:
                own.add(params)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "params":
            base = ast.unparse(node.value).rpartition(".")[2]
            if node not in own and base not in HAVE_WEIGHTS:
                yield node


def test_a_foreign_parameter_is_found_however_it_is_read():
    for text in (
        "equation.params['length']",
        "equation.params.get('sharding')",
        "dict(equation.params, y=2)",
        "self.equation.params",
    ):
        assert list(foreign_parameters(ast.parse(text))), text
    assert not list(foreign_parameters(ast.parse("equation.params['call']")))


@pytest.mark.slow(reason="it reads every module")
def test_one_room_alone_reads_the_parameters_of_jax_s_primitives():
    others = [path for path in SOURCES if path.parent.name != "jax_compat"]
    found = [
        f"{name_of(path)}:{node.lineno} {ast.unparse(node)}"
        for path in others
        for node in foreign_parameters(parsed(path))
    ]
    assert not found, "\n".join(found)
