# SPDX-License-Identifier: Apache-2.0
"""``ts.Tensor[…]``: what stands in the brackets, and the class that they make."""

from typing import Optional, Union, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tessera as ts
from tessera.annotations import Annotation, Dim
from tessera.errors import AnnotationError


def texts(tensor):
    return [dim.text for dim in tensor.annotation.dims]


# --- dims


@pytest.mark.parametrize(
    ("text", "symbols", "product"),
    [
        ("B", ("B",), (1, ("B",))),
        ("3*D_head*H", ("D_head", "H"), (3, ("D_head", "H"))),
        ("D_head*H", ("D_head", "H"), (1, ("D_head", "H"))),
        ("H*2*3", ("H",), (6, ("H",))),
        ("D*D", ("D",), (1, ("D", "D"))),
        ("3*D*H*D", ("D", "H"), (3, ("D", "H", "D"))),
        ("S+1", ("S",), None),
        ("2*(S-1)", ("S",), None),
        ("D//2", ("D",), None),
        ("B*S+D", ("B", "S", "D"), None),
        ("8", (), None),
        ("_", (), None),
        ("...", (), None),
        ("*batch", (), None),
    ],
)
def test_a_dim_knows_its_symbols_and_what_it_is_a_product_of(text, symbols, product):
    dim = Dim(text)
    assert (dim.symbols, dim.product) == (symbols, product)
    assert dim.coefficient == (product[0] if product else 1)


def test_a_dim_of_numbers_has_a_size():
    assert [Dim(t).size for t in ("8", "2*4+1", "B", "_", "...")] == [8, 9] + [None] * 3


def test_an_expression_has_a_size_for_sizes_of_its_symbols():
    assert Dim("2*(S-1)+D//2").evaluate({"S": 5, "D": 7}) == 11


# --- brackets


def test_brackets_hold_dims_and_last_a_dtype():
    assert texts(ts.Tensor["B", "S", ts.int32]) == ["B", "S"]
    assert ts.Tensor["B", "S", ts.int32].annotation.dtype == ts.int32
    assert ts.Tensor["B", 8].annotation == Annotation((Dim("B"), Dim("8")))


def test_a_dtype_alone_is_a_scalar():
    assert ts.Tensor[ts.f32].annotation == Annotation((), ts.f32)


def test_no_brackets_are_any_array():
    assert ts.Tensor.annotation.is_bare
    assert not ts.Tensor[..., ts.f32].annotation.is_bare
    assert texts(ts.Tensor[()]) == []


@pytest.mark.parametrize("dtype", [jnp.float32, np.float32, np.dtype("float32")])
def test_a_dtype_is_that_of_jax_or_numpy_as_well(dtype):
    assert ts.Tensor["B", dtype] is ts.Tensor["B", ts.f32]


def test_one_string_may_hold_several_dims():
    assert texts(ts.Tensor["B S 3*D"]) == ["B", "S", "3*D"]
    assert texts(ts.Tensor["*batch S", 4]) == ["*batch", "S", "4"]


def test_an_expression_may_have_spaces():
    assert texts(ts.Tensor["B", "3 * D_head * H"]) == ["B", "3*D_head*H"]
    assert texts(ts.Tensor["S + 1"]) == ["S+1"]


def test_it_prints_as_it_is_written():
    tensor = ts.Tensor["B", ..., "3*D_head*H", 8, ts.bf16]
    assert repr(tensor) == 'ts.Tensor["B", ..., "3*D_head*H", 8, bf16]'
    assert repr(ts.Tensor) == "ts.Tensor"
    assert repr(ts.Tensor[ts.f32]) == "ts.Tensor[f32]"
    assert repr(ts.Tensor[()]) == "ts.Tensor[()]"


def test_the_same_brackets_are_the_same_class():
    assert ts.Tensor["B", ts.f32] is ts.Tensor["B", ts.f32]
    assert ts.Tensor["B"] is not ts.Tensor["B", ts.f32]


def test_it_stands_wherever_typing_takes_a_class():
    tensor = ts.Tensor["B", ts.f32]
    for union in (tensor | None, Optional[tensor], Union[None, tensor]):  # noqa: UP007, UP045
        assert set(get_args(union)) == {tensor, type(None)}
    assert get_args(dict[str, tensor]) == (str, tensor)


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ((3.5,), "it is neither a dim nor a dtype at the end"),
        ((ts.f32, "B"), "it is neither a dim nor a dtype at the end"),
        (("B", float), "it is neither a dim nor a dtype at the end"),
        (("B", None), "it is neither a dim nor a dtype at the end"),
        (("B", "f32"), "it names a dtype: write ts.f32"),
        (("B*",), "it is not an expression"),
        (("#B",), "it is not an expression"),
        (("B**2",), "only symbols, integers, + - * // are allowed"),
        (("len(B)",), "only symbols, integers, + - * // are allowed"),
        (("...", "*more"), "only one dim may be variadic"),
    ],
    ids=str,
)
def test_brackets_with_anything_else_are_refused(parts, problem):
    with pytest.raises(AnnotationError) as caught:
        ts.Tensor[parts]
    assert problem in str(caught.value)


def test_the_refusal_says_what_may_stand_there():
    with pytest.raises(AnnotationError) as caught:
        ts.Tensor["B", "f32"]
    assert str(caught.value) == (
        "[T315] 'f32' cannot stand in an annotation ts.Tensor[…]\n"
        "  got: it names a dtype: write ts.f32\n"
        '  fix: write dims, then a dtype: ts.Tensor["B", "2*D", 8, ts.f32]; a dim is a '
        'symbol, an expression of symbols, a size, "_", "*name" or ...\n'
        "  docs: https://tessera-spmd.github.io/tessera/errors/T315.html"
    )


def test_brackets_come_once_and_make_no_arrays():
    with pytest.raises(AnnotationError, match="already has dims and a dtype"):
        ts.Tensor["B"]["S"]
    with pytest.raises(AnnotationError, match="creates no arrays"):
        ts.Tensor([1, 2])


# --- what is one


@pytest.mark.parametrize(
    "value",
    [
        jnp.ones((2, 4)),
        np.ones((2, 4), np.float32),
        jax.ShapeDtypeStruct((2, 4), jnp.float32),
        ts.dist.tensor((2, 4)),
    ],
)
def test_an_array_is_one_by_its_rank_its_dtype_and_its_fixed_sizes(value):
    for like in (ts.Tensor, ts.Tensor["B", 4], ts.Tensor[..., ts.f32], ts.Tensor["*b"]):
        assert isinstance(value, like)
    for unlike in (ts.Tensor["B"], ts.Tensor["B", 5], ts.Tensor["B", "D", ts.bf16]):
        assert not isinstance(value, unlike)


def test_what_has_no_shape_is_none():
    assert not isinstance(2.0, ts.Tensor)
    assert not isinstance([1, 2], ts.Tensor["B"])


def test_dims_of_an_array_by_number():
    found = ts.Tensor["B", ..., "S", "D"].annotation
    assert [(i, d.text) for i, d in found.dims_of(5)] == [(0, "B"), (3, "S"), (4, "D")]
    assert found.dims_of(2) is None
    assert found.names(4) == ("B", "...", "S", "D")
    assert ts.Tensor["B"].annotation.dims_of(2) is None
