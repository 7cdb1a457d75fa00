# SPDX-License-Identifier: Apache-2.0
"""Autocast and casts of parameters, as name scopes of the operations inside."""

import jax
import jax.numpy as jnp
import pytest

import tessera as ts
from tessera.errors import OutsideTraceError, TensorFormError
from tessera.jax_compat import jaxprs
from tessera.tracing import casts


def scopes_of(function, *args):
    """The name scopes of a function's equations."""
    program = jax.make_jaxpr(function)(*args)
    return [jaxprs.name_scopes(equation) for equation in jaxprs.equations(program)]


def test_the_innermost_autocast_is_current():
    assert casts.current_autocast() is None
    with ts.autocast("bf16"):
        with ts.autocast("f16"):
            assert casts.current_autocast() == "float16"
        with ts.autocast("bf16", enabled=False):
            assert casts.current_autocast() == "off"
        assert casts.current_autocast() == "bfloat16"
    assert casts.current_autocast() is None


def test_an_autocast_ends_when_its_block_raises():
    with pytest.raises(RuntimeError), ts.autocast("bf16"):
        raise RuntimeError
    assert casts.current_autocast() is None


@pytest.mark.parametrize(
    ("dtype", "enabled", "mark"),
    [
        ("bf16", True, "autocast_bfloat16"),
        (jnp.float16, True, "autocast_float16"),
        ("f32", True, "autocast_off"),
        ("bf16", False, "autocast_off"),
    ],
)
def test_operations_inside_an_autocast_are_marked(dtype, enabled, mark):
    def marked(x):
        with ts.autocast(dtype, enabled=enabled):
            return jnp.sin(x)

    assert scopes_of(marked, 1.0) == [mark]


def test_autocast_takes_floating_point_dtypes_that_matmuls_are_done_in():
    with pytest.raises(TensorFormError) as caught, ts.autocast("i32"):
        pass
    assert str(caught.value) == (
        "[T207] matmuls cannot be autocast to int32\n"
        "  fix: use bf16, f16 or f32\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T207.html"
    )


def test_autocast_says_which_dtype_was_meant():
    with (
        pytest.raises(TensorFormError, match="did you mean 'bf16'"),
        ts.autocast("b16"),
    ):
        pass


def test_an_autocast_that_no_step_is_in_is_an_error_at_its_end():
    x = jnp.ones(2)
    with pytest.raises(OutsideTraceError, match=r"use @ts\.function"):  # noqa: SIM117
        with ts.autocast("bf16"):
            x = x * 2
    step = ts.function(lambda x: x * 2)
    with ts.autocast("bf16"):
        step(x)
        with ts.autocast("f16"):
            step.trace(x)
    with ts.autocast("bf16", enabled=False):
        x * 2
