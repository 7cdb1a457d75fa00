# SPDX-License-Identifier: Apache-2.0
"""Where a function has its annotations: behind wrappers, in strings, of jaxtyping."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Dict, Optional  # noqa: UP035

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

import tessera as ts
from tessera.annotations import annotations_of
from tessera.errors import AnnotationError, TesseraWarning

if TYPE_CHECKING:
    from nowhere import Tensor as Unknown  # pyrefly: ignore

# ruff: noqa: UP006, UP037, UP045, F821 - old forms of annotations are read, too


def read(function):
    return {name: str(found) for name, found in annotations_of(function).items()}


def linear(
    model: callable,
    x: ts.Tensor["B", "D", ts.f32],
    bias: ts.Tensor["D", ts.f32] = None,
    config: Dict[str, Any] = {},  # noqa: B006
    heads: int = 2,
    weights: Dict[str, ts.Tensor] = {},  # noqa: B006
) -> ts.Tensor[ts.f32]:
    return x


EXPECTED = {
    "x": 'Tensor["B", "D", f32]',
    "bias": 'Tensor["D", f32]',
    "return": "Tensor[f32]",
}


def test_arguments_that_are_arrays_have_annotations_and_the_result():
    assert read(linear) == EXPECTED


def test_an_argument_that_may_be_none_has_the_annotation_of_its_array():
    def f(
        a: ts.Tensor["B"],
        b: ts.Tensor["B"] | None,
        c: Optional[ts.Tensor["B"]],
        d: ts.Tensor["B"] = None,
        e: "ts.Tensor['B']" = None,
    ): ...

    assert [str(found) for found in annotations_of(f).values()] == ['Tensor["B"]'] * 5


class Holder:
    def method(self, x: ts.Tensor["B"]): ...

    @ts.function
    def step(self, x: ts.Tensor["B"]): ...

    def __call__(self, x: ts.Tensor["B"]): ...


def wrapped():
    @functools.wraps(linear)
    def wrapper(*args, **kwargs):
        return linear(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize(
    "function",
    [
        functools.partial(linear, len),
        wrapped(),
        ts.function(linear),
        ts.graph.stage("part")(linear),
        ts.graph.training_step(linear),
    ],
    ids=["partial", "wraps", "function", "stage", "step"],
)
def test_whoever_calls_a_function_has_its_annotations(function):
    assert read(function) == EXPECTED


@pytest.mark.parametrize("function", [Holder().method, Holder(), Holder().step])
def test_methods_and_objects_have_annotations(function):
    assert read(function) == {"x": 'Tensor["B"]'}


@pytest.mark.parametrize("transform", [jax.vmap, jax.jit, jax.grad, jax.checkpoint])
def test_what_jax_makes_of_a_function_takes_other_arrays(transform):
    assert read(transform(linear)) == {}


def test_an_object_around_a_function_takes_what_it_says_itself():
    class Vectorized:
        def __init__(self, function):
            functools.update_wrapper(self, function)

        def __call__(self, *args): ...

    assert read(Vectorized(linear)) == {}


@pytest.mark.parametrize(
    "function",
    [jnp.sin, len, print, dict, object()],
    ids=lambda one: type(one).__name__,
)
def test_what_has_no_annotations_of_arrays_has_none(function):
    assert read(function) == {}


def test_annotations_may_speak_of_what_a_function_closes_over():
    Local = ts.Tensor["B", 3]

    def f(x: Local):
        return Local

    assert read(f) == {"x": 'Tensor["B", 3]'}


def test_an_annotation_for_checkers_of_types_alone_is_left_out():
    def f(x: Unknown["B"], y: ts.Tensor["B"]): ...

    def g(z: Tensor["B"], y: ts.Tensor["B"]): ...

    assert read(f) == {"y": 'Tensor["B"]'}
    with pytest.warns(TesseraWarning, match="'z' is not checked.*'Tensor'"):
        assert read(g) == {"y": 'Tensor["B"]'}


def test_an_annotation_that_is_not_well_formed_is_an_error_though_a_string():
    def f(x: ts.Tensor["B", "f32"]): ...

    with pytest.raises(AnnotationError, match="it names a dtype"):
        annotations_of(f)


# --- jaxtyping


def test_annotations_of_jaxtyping_are_read():
    def f(
        x: jaxtyping.Float[jax.Array, "*batch S 3*D"],
        i: jaxtyping.Int32[jax.Array, "S"] = None,
        s: jaxtyping.Shaped[jax.Array, ""] = None,
        odd: jaxtyping.Float[jax.Array, "#B"] = None,
    ): ...

    found = annotations_of(f)
    assert list(found) == ["x", "i", "s"]
    assert [dim.text for dim in found["x"].dims] == ["*batch", "S", "3*D"]
    assert [found["x"].allows_dtype(d) for d in (ts.bf16, ts.f32, ts.i32)] == [1, 1, 0]
    assert [found["i"].allows_dtype(d) for d in (ts.i32, ts.i8)] == [True, False]
    assert found["s"].dims == ()
    assert found["s"].allows_dtype(ts.bool_)
