# SPDX-License-Identifier: Apache-2.0
"""A stage in parts: the same gradients, the same matmuls, few and small residuals."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tessera.analysis import flops
from tessera.graph.pipelining.stage_gradient import stage_gradient
from tessera.jax_compat import jaxprs
from tests.graph.pipelines import cases
from tests.graph.pipelining.stages import (
    ACTIVATIONS,
    BATCH,
    DIM,
    HIDDEN,
    LAYERS,
    MLP,
    SEQ,
    STACKED,
    STAGES,
    WIDE,
    block,
    mlp,
    normal,
    scanned,
)

every_stage = pytest.mark.parametrize(
    "name",
    cases(STAGES, "mlp", "weights that all layers share", "a branch", "an embedding"),
)


class SplitOf:
    """A stage that returns nothing beside its output, with its backward in two parts.

    The forward and the gradient of the input are as one here: that they may be apart is
    below.
    """

    def __init__(self, stage, weights, h, _, *more):
        def with_nothing(*args):
            return stage(*args), None

        self.whole = stage_gradient(
            with_nothing, weights, h, *more, splits_backward=True
        )
        self.residuals = self.whole.weight_residuals
        self.weight_gradients = self.whole.weight_gradients

    def input_gradients(self, weights, h, cotangent, *more):
        _, aux, residuals = self.whole.forward(weights, h, *more)
        dh, kept = self.whole.backward(residuals, weights, cotangent, *more)
        return dh, kept, aux


split_of = SplitOf


@cache
def pieces(name):
    stage, weights, h, *more = STAGES[name]
    out = jax.eval_shape(stage, weights, h, *more)
    cotangent = jax.random.normal(jax.random.key(9), out.shape, out.dtype)

    def whole(weights, h, cotangent, *more):
        _, pull = jax.vjp(lambda w, x: stage(w, x, *more), weights, h)
        return pull(cotangent)

    split = split_of(stage, weights, h, cotangent, *more)
    return whole, split, weights, h, cotangent, more


def programs_of(split, weights, h, cotangent, more):
    """The known and the unknown program."""
    args = (weights, h, cotangent, *more)
    first = jax.make_jaxpr(split.input_gradients)(*args)
    second = jax.make_jaxpr(split.weight_gradients)(
        list(split.residuals), weights, *more
    )
    return first, second


def equations_of(program):
    """The equations of a program and of those in it."""
    for equation in jaxprs.equations(program):
        yield equation
        for _, inner in jaxprs.nested(equation):
            yield from equations_of(inner)


@every_stage
def test_both_programs_compute_the_gradients_of_the_whole(name):
    whole, split, weights, h, cotangent, more = pieces(name)
    dw, dh = jax.jit(whole)(weights, h, cotangent, *more)
    first, residuals, _ = jax.jit(split.input_gradients)(weights, h, cotangent, *more)
    second = jax.jit(split.weight_gradients)(residuals, weights, *more)
    assert jax.tree.structure((second, first)) == jax.tree.structure((dw, dh))
    jax.tree.map(np.testing.assert_array_equal, (second, first), (dw, dh))


@every_stage
def test_the_residuals_are_as_announced(name):
    _, split, weights, h, cotangent, more = pieces(name)
    _, residuals, _ = jax.eval_shape(
        split.input_gradients, weights, h, cotangent, *more
    )
    found = [(r.shape, r.dtype) for r in residuals]
    assert found == [(r.shape, r.dtype) for r in split.residuals]


@every_stage
def test_every_matmul_is_in_one_of_the_programs(name):
    whole, split, weights, h, cotangent, more = pieces(name)
    both = programs_of(split, weights, h, cotangent, more)
    all_at_once = jax.make_jaxpr(whole)(weights, h, cotangent, *more)
    counted = sum(flops.count(program).matmul for program in both)
    assert counted == flops.count(all_at_once).matmul


def test_the_unknown_program_has_the_matmuls_of_the_weights_and_no_other():
    _, split, weights, h, cotangent, more = pieces("transformer")
    first, second = programs_of(split, weights, h, cotangent, more)
    tokens = BATCH * SEQ
    of_weights = sum(2 * tokens * w.size for n, w in weights.items() if "norm" not in n)
    of_scores = 2 * LAYERS * 2 * tokens * SEQ * DIM
    assert flops.count(second).matmul == of_weights
    # The forward, then the gradient of each of its products' activations.
    assert flops.count(first).matmul == 2 * of_weights + 3 * of_scores


@pytest.mark.parametrize("name", ["transformer", "transformer, rematerialized"])
def test_the_residuals_of_a_layer_are_the_operands_of_its_weight_gradients(name):
    _, split, *_ = pieces(name)
    tokens = LAYERS * BATCH * SEQ
    found = sorted(r.size for r in split.residuals)
    hidden = [tokens * HIDDEN] * 2  # gelu's result and the gradient of its operand
    # Both norms' results, attention's; gradients of q, k, v and of what is added to x.
    narrow = [tokens * DIM] * 8
    scales = [LAYERS * DIM] * 2  # the gradients themselves
    assert found == scales + narrow + hidden


def test_what_the_unknown_program_can_recompute_is_no_residual():
    def stage(weights, h, key):
        kept = jax.random.bernoulli(key, 0.7, h.shape)
        scale = jnp.exp(weights["scale"])
        dropped = jnp.where(kept, h, jnp.zeros_like(h))
        return h @ weights["w"] + (dropped * scale) @ weights["v"]

    weights = {"scale": normal(DIM), "w": normal(DIM, DIM), "v": normal(DIM, DIM)}
    split = split_of(stage, weights, ACTIVATIONS, ACTIVATIONS, jax.random.key(0))
    # The gradient of the scale; the input and the cotangent. No mask, nothing dropped.
    wide = (BATCH, SEQ, DIM)
    assert sorted(r.shape for r in split.residuals) == [wide, wide, (DIM,)]


def test_a_loop_is_left_out_of_a_program_that_reads_none_of_its_results():
    _, split, weights, h, cotangent, more = pieces("transformer")
    _, second = programs_of(split, weights, h, cotangent, more)
    loops = [e for e in equations_of(second) if e.primitive.name == "scan"]
    assert [loop.params["reverse"] for loop in loops] == [True]
    assert jaxprs.scan_sizes(loops[0]) == (0, 0)


def test_the_gradients_of_scales_alone_are_computed_early():
    stage = scanned(lambda scale, h: jnp.sin(h) * scale)
    scales = normal(LAYERS, DIM)
    split = split_of(stage, scales, ACTIVATIONS, ACTIVATIONS)
    assert [r.shape for r in split.residuals] == [(LAYERS, DIM)]
    first, _ = programs_of(split, scales, ACTIVATIONS, ACTIVATIONS, ())
    forward = next(e for e in equations_of(first) if e.primitive.name == "scan")
    # The last layer's output; of each layer the sine and its operand.
    assert len(forward.outvars) == 3


def test_what_a_nested_region_computes_from_weights_alone_is_no_residual(cube_mesh):
    def gathered(w):
        return jax.shard_map(
            lambda block: lax.all_gather(block, "tp", tiled=True),
            mesh=jax.sharding.get_abstract_mesh(),
            in_specs=P("tp"),
            out_specs=P(),
            axis_names={"dp", "tp"},
            check_vma=False,
        )(w)

    def layer(w, h):
        whole = gathered(w)
        return jnp.tanh(h @ whole) @ whole.T

    def stage(w, h):
        return layer(w[1], layer(w[0], h))

    def on_each(w, h):
        split = split_of(stage, w, h, h)
        wide = (BATCH, SEQ, DIM)
        assert [r.shape for r in split.residuals] == [wide] * 8
        dh, residuals, _ = split.input_gradients(w, h, h)
        expected = jax.vjp(stage, w, h)[1](h)
        return (split.weight_gradients(residuals, w), dh), expected

    mapped = jax.shard_map(
        on_each,
        mesh=cube_mesh.jax,
        in_specs=P(),
        out_specs=P(),
        axis_names={"pp"},
        check_vma=False,
    )
    found, expected = jax.jit(mapped)(WIDE[:2], ACTIVATIONS)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), found, expected)


def test_each_equation_keeps_its_line_and_its_scopes():
    def layer(w, x):
        with jax.named_scope("layer"):
            return jnp.tanh(x @ w)

    stage = scanned(jax.checkpoint(layer))

    def whole(weights, h, cotangent):
        with jax.named_scope("stage"):
            return jax.vjp(stage, weights, h)[1](cotangent)

    def both(weights, h, cotangent):
        with jax.named_scope("stage"):
            split = split_of(stage, weights, h, cotangent)
            dh, residuals, _ = split.input_gradients(weights, h, cotangent)
            return split.weight_gradients(residuals, weights), dh

    def places(function):
        program = jax.make_jaxpr(function)(WIDE, ACTIVATIONS, ACTIVATIONS)
        return {
            (e.primitive.name, jaxprs.source_line(e), jaxprs.name_scopes(e))
            for e in equations_of(program)
            if e.primitive.name in ("dot_general", "tanh", "scan")
        }

    assert places(both) == places(whole)


def test_other_results_of_a_stage_come_with_its_forward():
    def stage(weights, h, tokens):
        out = mlp(weights, h)
        return out, {"loss": jnp.sum(out * out), "of": tokens}

    @jax.jit
    def whole(weights, h, cotangent, tokens):
        def of_inputs(weights, h):
            return stage(weights, h, tokens)

        _, pull, beside = jax.vjp(of_inputs, weights, h, has_aux=True)
        return pull(cotangent), beside

    given = MLP, ACTIVATIONS, ACTIVATIONS, jnp.arange(3)
    gradient = stage_gradient(
        stage, MLP, ACTIVATIONS, jnp.arange(3), splits_backward=False
    )
    _, beside, residuals = jax.jit(gradient.forward)(MLP, ACTIVATIONS, jnp.arange(3))
    dh, dw = jax.jit(gradient.backward)(residuals, MLP, ACTIVATIONS, jnp.arange(3))
    found = (dw, dh), beside
    jax.tree.map(np.testing.assert_array_equal, found, whole(*given))


def test_a_stage_may_close_over_arrays_and_tracers():
    table = np.arange(DIM, dtype=np.float32)

    @jax.jit
    def both(scale, w, h):
        def stage(w, h):
            return jnp.sin(h @ w * scale) * table

        split = split_of(stage, w, h, h)
        dh, residuals, _ = split.input_gradients(w, h, h)
        return (split.weight_gradients(residuals, w), dh), jax.vjp(stage, w, h)[1](h)

    found, expected = both(jnp.float32(0.3), normal(DIM, DIM), ACTIVATIONS)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_what_is_rematerialized_is_not_what_the_forward_had():
    _, split, weights, h, cotangent, more = pieces("transformer, rematerialized")
    first, _ = programs_of(split, weights, h, cotangent, more)
    forward, backward = (e for e in equations_of(first) if e.primitive.name == "scan")
    assert len(forward.outvars) == 2  # the last layer's output; each layer's input
    names = [e.primitive.name for e in equations_of(backward.params["jaxpr"])]
    # One for the layer's weights, which the unknown program has, too; one for others.
    assert names.count("optimization_barrier") == 2


def test_an_effect_happens_once():
    seen = []

    def layer(w, x):
        jax.debug.callback(lambda total: seen.append(float(total)), x.sum())
        return jnp.tanh(x @ w)

    split = split_of(scanned(layer), WIDE, ACTIVATIONS, ACTIVATIONS)
    _, residuals, _ = split.input_gradients(WIDE, ACTIVATIONS, ACTIVATIONS)
    jax.effects_barrier()
    assert len(seen) == LAYERS
    split.weight_gradients(residuals, WIDE)
    jax.effects_barrier()
    assert len(seen) == LAYERS


@pytest.mark.full
@pytest.mark.parametrize("remat", [False, True], ids=["plain", "rematerialized"])
def test_a_region_that_is_manual_over_the_pipeline_alone(cube_mesh, remat):
    def constrain(x, *axes):
        return lax.with_sharding_constraint(x, P(*axes))

    layer = partial(block, constrain=constrain)
    stage = scanned(jax.checkpoint(layer) if remat else layer)
    weights = jax.tree.map(lambda w: jnp.stack([w, -w]), STACKED)
    h = jnp.stack([ACTIVATIONS, 0.5 * ACTIVATIONS])

    def on_each(weights, h):
        weights, h = jax.tree.map(lambda x: x[0], (weights, h))
        split = split_of(stage, weights, h, h)
        dh, residuals, _ = split.input_gradients(weights, h, h)
        dw = lax.cond(
            lax.axis_index("pp") < 2,
            lambda residuals: split.weight_gradients(residuals, weights),
            lambda _: weights,
            residuals,
        )
        return jax.tree.map(lambda x: x[None], (dw, dh))

    mapped = jax.shard_map(
        on_each,
        mesh=cube_mesh.jax,
        in_specs=P("pp"),
        out_specs=P("pp"),
        axis_names={"pp"},
        check_vma=False,
    )
    spread = NamedSharding(cube_mesh.jax, P("pp"))
    found = jax.jit(mapped)(*jax.device_put((weights, h), spread))

    @jax.vmap
    def alone(weights, h):
        return jax.vjp(scanned(block), weights, h)[1](h)

    expected = jax.jit(alone)(weights, h)
    close = partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6)
    jax.tree.map(close, found, expected)


# --- a forward and its backward apart


def gradient_of(name, *, splits_backward=False):
    """A stage's parts, and results, gradients and residuals of all of them."""
    stage, weights, h, *more = STAGES[name]
    return stage_gradient(
        lambda *args: (stage(*args), None),
        weights,
        h,
        *more,
        splits_backward=splits_backward,
    )


@every_stage
def test_a_forward_and_its_backward_compute_what_the_whole_does(name):
    whole, _, weights, h, cotangent, more = pieces(name)
    stage, gradient = STAGES[name][0], gradient_of(name)
    out, _, residuals = jax.jit(gradient.forward)(weights, h, *more)
    dh, dw = jax.jit(gradient.backward)(residuals, weights, cotangent, *more)
    expected = stage(weights, h, *more), *whole(weights, h, cotangent, *more)
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    if name == "narrow activations":
        close = partial(np.testing.assert_allclose, rtol=0.05, atol=0.05)
    jax.tree.map(close, (out, dw, dh), expected)
    found = [(r.shape, r.dtype) for r in residuals]
    assert found == [(r.shape, r.dtype) for r in gradient.residuals]


def matmuls_of(gradient, name):
    """Floating-point operations of the matmuls of the forward and of the backward."""
    stage, weights, h, *more = STAGES[name]
    cotangent = jax.eval_shape(stage, weights, h, *more)
    first = jax.make_jaxpr(gradient.forward)(weights, h, *more)
    second = jax.make_jaxpr(gradient.backward)(
        list(gradient.residuals), weights, cotangent, *more
    )
    return [flops.count(program).matmul for program in (first, second)]


def test_a_backward_computes_again_what_the_stage_rematerializes_and_no_more():
    forward, backward = matmuls_of(gradient_of("transformer"), "transformer")
    assert backward == 2 * forward
    name = "transformer, matmuls saved"
    assert matmuls_of(gradient_of(name), name) == [forward, backward]
    name = "transformer, rematerialized"
    again = matmuls_of(gradient_of(name), name)[1] - backward
    # Not the product that makes the layer's output, which no gradient reads.
    last = LAYERS * 2 * BATCH * SEQ * DIM * HIDDEN
    assert again == forward - last


def test_policies_say_what_a_forward_leaves():
    tokens = LAYERS * BATCH * SEQ
    (inputs,) = gradient_of("transformer, rematerialized").residuals
    assert inputs.size == tokens * DIM
    saved = gradient_of("transformer, matmuls saved").residuals
    # Each layer's input; q, k, v, scores, what they weigh, and three products.
    scores = tokens * SEQ * 2
    assert sorted(r.size for r in saved) == sorted(
        [tokens * DIM] * 6 + [scores, tokens * HIDDEN]
    )


def test_a_weight_that_a_branch_casts_or_gathers_is_no_residual():
    """Padding layers are skipped by a branch, whose results are the residuals."""

    def layer(weights, h):
        weight, exists = weights

        def run(h):
            return jnp.tanh(h @ weight.astype(jnp.bfloat16).astype(jnp.float32))

        return lax.cond(exists, run, lambda h: h, h)

    gradient = stage_gradient(
        lambda w, h, exists: (scanned(layer)((w, exists), h), None),
        WIDE,
        ACTIVATIONS,
        jnp.arange(LAYERS) < 3,
        splits_backward=False,
    )
    weight = (LAYERS, DIM, DIM)
    assert all(r.shape != weight for r in gradient.residuals)
    exists = jnp.arange(LAYERS) < 3
    out, _, residuals = gradient.forward(WIDE, ACTIVATIONS, exists)
    dh, dw = gradient.backward(residuals, WIDE, ACTIVATIONS, exists)
    expected = jax.vjp(lambda w, h: scanned(layer)((w, exists), h), WIDE, ACTIVATIONS)
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, (out, (dw, dh)), (expected[0], expected[1](ACTIVATIONS)))
