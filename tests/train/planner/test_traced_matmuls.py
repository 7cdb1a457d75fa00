# SPDX-License-Identifier: Apache-2.0
"""What a traced loss multiplies by its parameters."""

import jax
import jax.numpy as jnp
import numpy as np

from tessera.ops.attention import splash
from tessera.ops.attention.dispatch import Operands, Options
from tessera.tracing.scope import FALLBACK
from tessera.train.planner.matmuls import TracedCosts, Weight
from tessera.train.planner.traced_matmuls import find_products

F32 = jnp.float32


def found(function, weights, *others) -> TracedCosts:
    """The products of a function of some parameters, given by shape and names."""
    structs = [jax.ShapeDtypeStruct(shape, F32) for shape, _ in weights.values()]
    inputs = [Weight(path, names) for path, (_, names) in weights.items()]
    program = jax.make_jaxpr(function)(*structs, *others)
    return find_products(program, [*inputs, *([None] * len(others))])


def test_a_matmul_is_known_by_its_parameter_and_the_names_of_its_dims():
    x = jax.ShapeDtypeStruct((4, 8), F32)
    (product,) = found(
        lambda w, x: x @ w, {"up": ((8, 16), ("embed", "mlp"))}, x
    ).products
    assert (product.path, product.rows, product.inner, product.outer) == (
        "up",
        4,
        8,
        16,
    )
    assert (product.inner_names, product.outer_names) == (("embed",), ("mlp",))
    assert product.flops == 2 * 4 * 8 * 16


def test_a_parameter_is_followed_through_casts_transposes_and_calls():
    @jax.jit
    def inside(w, x):
        return jnp.einsum("mk,bk->bm", w.astype(jnp.bfloat16).T, x)

    x = jax.ShapeDtypeStruct((4, 8), jnp.bfloat16)
    (product,) = found(inside, {"up": ((8, 16), ("embed", "mlp"))}, x).products
    assert (product.inner_names, product.outer_names) == (("embed",), ("mlp",))


def test_names_of_merged_dims_are_those_of_the_first_with_a_name():
    def project(w, x):
        return x @ w.reshape(8, 32)

    x = jax.ShapeDtypeStruct((4, 8), F32)
    names = ("embed", "heads", "head_dim")
    (product,) = found(project, {"q": ((8, 4, 8), names)}, x).products
    assert (product.inner_names, product.outer_names) == (("embed",), ("heads",))


def test_a_layer_of_a_scan_counts_once_for_each_step():
    def layers(w, x):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0]

    x = jax.ShapeDtypeStruct((4, 8), F32)
    weights = {"w": ((5, 8, 8), ("layers", "embed", "mlp"))}
    (product,) = found(layers, weights, x).products
    assert (product.times, product.inner_names) == (5, ("embed",))


def test_products_of_activations_are_counted_apart():
    def attention(w, x):
        q = x @ w
        return jax.nn.softmax(q @ x.T) @ x

    x = jax.ShapeDtypeStruct((4, 8), F32)
    result = found(attention, {"q": ((8, 8), ("embed", "heads"))}, x)
    assert [product.flops for product in result.products] == [2 * 4 * 8 * 8]
    assert result.inner_flops == 2 * (2 * 4 * 4 * 8)
    assert result.total_flops == result.inner_flops + 2 * 4 * 8 * 8


def test_products_that_share_an_input_have_one_source():
    def gated(gate, up, down, x):
        return (jax.nn.silu(x @ gate) * (x @ up)) @ down

    up, down = ((8, 16), ("embed", "mlp")), ((16, 8), ("mlp", "embed"))
    x = jax.ShapeDtypeStruct((4, 8), F32)
    gate, other, last = found(gated, {"gate": up, "up": up, "down": down}, x).products
    assert gate.source == other.source != last.source


def test_a_branch_that_constants_choose_counts_as_often_as_it_is_taken():
    def layers(w, x):
        is_global = (jnp.arange(6) + 1) % 3 == 0

        def body(x, layer):
            w, is_global = layer
            return jax.lax.cond(is_global, lambda: x @ w, lambda: x + (x @ x.T) @ x), 0

        return jax.lax.scan(body, x, (w, is_global))[0]

    x = jax.ShapeDtypeStruct((8, 8), F32)
    result = found(layers, {"w": ((6, 8, 8), ("layers", "embed", None))}, x)
    (product,) = result.products
    assert product.times == 2
    assert result.inner_flops == 4 * 2 * (2 * 8**3)


def test_a_branch_that_data_have_to_demand_does_not_count():
    def step(w, x, flag):
        def fallback():
            with jax.named_scope(FALLBACK):
                return (x @ x) @ w

        return jax.lax.cond(flag, lambda: x @ w, fallback)

    x, flag = jax.ShapeDtypeStruct((8, 8), F32), jax.ShapeDtypeStruct((), jnp.bool_)
    result = found(step, {"w": ((8, 8), ("embed", None))}, x, flag)
    (product,) = result.products
    assert (product.times, result.inner_flops) == (1.0, 0.0)


def test_attention_kernels_of_tpus_count_the_blocks_that_they_visit():
    q = jax.ShapeDtypeStruct((1, 2, 256, 16), jnp.float32)

    def flops(causal):
        def attend(q):
            options = Options(causal=causal, scale=1.0)
            operands = Operands(q, q, q)
            return splash.attend_with(operands, options, 128, interpret=True)

        def loss(q):
            return (attend(q) ** 2).sum()

        program = jax.make_jaxpr(jax.grad(loss))(q)
        return find_products(program, [None]).inner_flops

    # Two products over the scores forward, seven backward, and the output times its
    # gradient. Of two times two blocks, that of early queries and late keys is empty.
    scores, once = 9 * 2 * 2 * 256 * 256 * 16, 2 * 2 * 256 * 16
    assert flops(causal=False) == scores + once
    assert flops(causal=True) == scores * 3 / 4 + once


def test_branches_that_data_choose_count_equally():
    def step(w, x, flag):
        return jax.lax.cond(flag, lambda: x @ w, lambda: x)

    x, flag = jax.ShapeDtypeStruct((8, 8), F32), jax.ShapeDtypeStruct((), jnp.bool_)
    (product,) = found(step, {"w": ((8, 8), ("embed", None))}, x, flag).products
    assert product.times == 0.5


def test_rows_that_tokens_choose_are_a_lookup():
    def embed(table, tokens):
        return table[tokens]

    tokens = jax.ShapeDtypeStruct((3, 4), jnp.int32)
    weights = {"table": ((32, 8), ("vocab", "table"))}
    (row,) = found(embed, weights, tokens).lookups
    assert (row.path, row.names) == ("table", ("vocab", "table"))
    assert row.nbytes == 3 * 4 * 8 * 4


def test_experts_keep_the_name_of_their_dim():
    def experts(w, x, sizes):
        return jax.lax.ragged_dot(x, w, sizes)

    x = jax.ShapeDtypeStruct((12, 8), F32)
    sizes = jax.ShapeDtypeStruct((4,), np.int32)
    weights = {"up": ((4, 8, 16), ("experts", "embed", "mlp"))}
    (product,) = found(experts, weights, x, sizes).products
    assert (product.rows, product.inner, product.outer) == (12, 8, 16)
    assert product.outer_names == ("experts", "mlp")
    assert product.groups == 4


def test_experts_of_as_many_rows_each_are_no_groups():
    x = jax.ShapeDtypeStruct((4, 3, 8), F32)
    weights = {"up": ((4, 8, 16), ("experts", "embed", "mlp"))}
    (product,) = found(lambda w, x: x @ w, weights, x).products
    assert (product.rows, product.outer, product.groups) == (12, 16, 1)
