# SPDX-License-Identifier: Apache-2.0
"""A jaxpr split into stages: what each computes, reads and sends."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.errors import PipelineFormError
from tessera.graph.pipelining.split_stages import (
    StagedProgram,
    split_stages,
    stage_end_p,
)
from tessera.jax_compat import jaxprs


def end(stage: int, *values: Any) -> Any:
    """What a stage's results become while its pipeline is traced."""
    found = stage_end_p.bind(*values, stage=stage)
    return found[0] if len(found) == 1 else found


def cut_of(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    weights: Sequence[Any] = (),
    names: Sequence[str] = "ab",
) -> StagedProgram:
    program = jax.make_jaxpr(function)(*inputs, *weights)
    return split_stages(jaxprs.lift_constants(program)[0], len(inputs), names)


def run(staged: StagedProgram, inputs: Sequence[Any], weights: Sequence[Any]) -> Any:
    """All pieces, one after the other, each given what the one before handed on."""
    arrived: list[Any] = []
    for stage, piece in enumerate(staged.jaxprs):
        own = [weights[number] for number in piece.weights]
        arrived = staged.run(stage, inputs, own, arrived)
    return arrived


X, V, W = np.float32([[1, 2], [3, 4]]), np.float32([5, 6]), np.float32([7, 8])


def names_of(staged: StagedProgram) -> list[list[str]]:
    return [[e.primitive.name for e in piece.equations] for piece in staged.jaxprs]


def test_a_piece_computes_what_is_between_two_marks():
    def model(x: Any, v: Any, w: Any) -> Any:
        h = end(0, jnp.sin(x * v))
        return jnp.exp(end(1, jnp.cos(h + w)))

    staged = cut_of(model, [X], [V, W])
    names = [
        [n for n in part if n in ("sin", "cos", "exp")] for part in names_of(staged)
    ]
    assert names == [["sin"], ["cos", "exp"]]
    assert [piece.weights for piece in staged.jaxprs] == [(0,), (1,)]
    assert [len(piece.received) for piece in staged.jaxprs] == [0, 1]
    (found,) = run(staged, [X], [V, W])
    np.testing.assert_allclose(found, np.exp(np.cos(np.sin(X * V) + W)), rtol=1e-6)


def test_what_depends_on_inputs_alone_is_computed_where_it_is_read_and_not_sent():
    def model(x: Any, v: Any) -> Any:
        mask = jnp.tanh(x)
        h = end(0, v * mask)
        return end(1, h * mask) + mask

    staged = cut_of(model, [X], [V])
    assert [part.count("tanh") for part in names_of(staged)] == [1, 1]
    assert [len(piece.received) for piece in staged.jaxprs] == [0, 1]
    (found,) = run(staged, [X], [V])
    np.testing.assert_allclose(found, V * np.tanh(X) ** 2 + np.tanh(X), rtol=1e-6)


def test_what_a_later_stage_reads_goes_through_the_ones_between():
    def model(x: Any) -> Any:
        early, h = end(0, jnp.sin(x), jnp.cos(x))
        h = end(1, jnp.exp(h))
        return end(2, h * early)

    staged = cut_of(model, [X], names="abc")
    assert [len(piece.received) for piece in staged.jaxprs] == [0, 2, 2]
    np.testing.assert_allclose(
        run(staged, [X], [])[0], np.exp(np.cos(X)) * np.sin(X), rtol=1e-6
    )


def test_a_weight_is_of_every_stage_that_reads_it():
    def model(x: Any, v: Any, w: Any) -> Any:
        return end(1, end(0, x @ jnp.diag(v)) + v - w)

    staged = cut_of(model, [X], [V, W])
    assert [piece.weights for piece in staged.jaxprs] == [(0,), (0, 1)]


def test_marks_are_found_in_jitted_functions():
    stage = jax.jit(lambda x: end(0, jnp.sin(x)))
    staged = cut_of(lambda x: end(1, 2.0 * stage(x)), [X])
    np.testing.assert_allclose(run(staged, [X], [])[0], 2 * np.sin(X), rtol=1e-6)


def test_what_nobody_reads_is_left_out_unless_it_acts():
    def model(x: Any) -> Any:
        h = end(0, jnp.sin(x))
        jnp.cos(h)
        jax.debug.print("{}", h)
        return end(1, 2.0 * h)

    names = names_of(cut_of(model, [X]))
    assert "cos" not in names[1]
    assert any("callback" in name or "print" in name for name in names[1])
    assert len(names[0]) == 2


@pytest.mark.parametrize(
    ("order", "ran"),
    [((1, 0), "'b', 'a'"), ((0,), "'a'"), ((0, 0, 1), "'a', 'a', 'b'")],
)
def test_each_stage_ends_once_and_in_order(order, ran):
    def model(x: Any) -> Any:
        for stage in order:
            x = end(stage, jnp.sin(x))
        return x

    with pytest.raises(PipelineFormError) as caught:
        cut_of(model, [X])
    assert f"got: it ran {ran}; stages: 'a', 'b'\n" in str(caught.value)


def test_integers_are_not_handed_on():
    with pytest.raises(PipelineFormError) as caught:
        cut_of(lambda x: end(1, 2.0 * end(0, jnp.argmax(x, -1)).astype("f4")), [X])
    assert str(caught.value) == (
        "[T312] stage 'a' sends an array that is not floating point\n"
        "  got: int32[2]\n"
        "  fix: pass it to the pipelined function as an argument: every stage can read "
        "those\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T312.html"
    )
