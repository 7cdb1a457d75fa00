# SPDX-License-Identifier: Apache-2.0
"""When a program last needs its arrays: what XLA stores, and what it computes anew."""

import jax
import jax.numpy as jnp

from tessera.graph.lifetimes import Lifetimes
from tessera.jax_compat import jaxprs

X = jax.ShapeDtypeStruct((2, 3), jnp.float32)


def program_of(function, count=1):
    return jax.make_jaxpr(function)(*[X] * count)


def times(program, *args, **options):
    """When a variable is made, and when it is last needed."""
    lifetimes = Lifetimes(program, *args, **options)
    return (
        lambda atom: lifetimes.made(lifetimes.key(atom)),
        lambda atom: lifetimes.needed(lifetimes.key(atom)),
    )


def results(program, name):
    """The results of the primitives of a name, in order."""
    equations = jaxprs.equations(program)
    return [e.outvars[0] for e in equations if e.primitive.name == name]


def test_a_value_is_needed_until_it_is_read_last():
    program = program_of(lambda x, y: jnp.sin(x) @ y.T + jnp.sin(x) @ x.T, 2)
    made, needed = times(program)
    first, second = results(program, "dot_general")
    sin = results(program, "sin")[0]
    assert made(sin) < made(first)
    assert needed(sin) >= made(first)
    assert needed(second) == made(results(program, "add")[0])


def test_inputs_are_made_before_the_program_and_outputs_are_needed_after_it():
    program = program_of(jnp.sin)
    (x,), (y,) = jaxprs.inputs(program), jaxprs.outputs(program)
    made, needed = times(program)
    assert made(x) == -1
    assert needed(y) == 1
    assert times(program, holds_inputs=True)[1](x) == 1


def test_reading_a_view_needs_the_array():
    program = program_of(lambda x, y: (y @ x.T, x.reshape(6) + 1.0), 2)
    x, _ = jaxprs.inputs(program)
    made, needed = times(program)
    (view,) = results(program, "reshape")
    assert made(view) == made(x) == -1
    assert needed(view) == needed(x)


def test_what_is_computed_of_one_array_alone_needs_it_when_read():
    def function(x, y):
        h = jnp.tanh(x @ y)
        slope = 1.0 - h * h
        return (h @ y) * slope

    square = jax.ShapeDtypeStruct((3, 3), jnp.float32)
    program = jax.make_jaxpr(function)(square, square)
    made, needed = times(program)
    (h,) = results(program, "tanh")
    assert needed(h) == made(results(program, "mul")[-1])


def test_what_is_computed_of_two_arrays_is_stored_by_itself():
    def function(x, y):
        z = x @ y + x
        return (z @ y) * z

    square = jax.ShapeDtypeStruct((3, 3), jnp.float32)
    program = jax.make_jaxpr(function)(square, square)
    (stored,) = results(program, "add")
    made, needed = times(program)
    assert needed(jaxprs.inputs(program)[0]) == made(stored)


def test_reads_may_be_left_out():
    program = program_of(lambda x, y: x @ y.T, 2)
    (dot,) = (e for e in jaxprs.equations(program) if e.primitive.name == "dot_general")
    x = jaxprs.inputs(program)[0]
    assert times(program)[1](x) >= 0
    assert times(program, {(id(dot), 0)})[1](x) == -1


def test_equations_of_nested_calls_count_in_their_place():
    def function(x, y):
        h = jax.jit(jnp.tanh)(x + y)
        return jax.jit(lambda h: jnp.cumsum(h * h))(h)

    program = program_of(function, 2)
    calls = [e for e in jaxprs.equations(program) if e.primitive.name == "jit"]
    made, needed = times(program)
    (h,) = calls[0].outvars
    assert needed(h) > made(h)
    assert needed(h) == made(calls[1].outvars[0])
