# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.errors import OperandError, ParameterTreeError
from tessera.mesh import Mesh
from tessera.train.models import DecoderConfig, DecoderModel, Sampler, generate
from tessera.train.models.generation import _step
from tessera.train.models.pipeline_stages import StageSplit

CONFIG = DecoderConfig(
    vocab_size=12,
    d_model=8,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_dim=8,
    window=3,
    query_pre_attn_scalar=4,
    global_every=2,
)
MODEL = DecoderModel(CONFIG)
# Longer than the window, as long, and shorter: each row has other padding.
PROMPTS = [[1, 2, 3, 7, 8], [4, 5, 9], [6]]
KEY = jax.random.key(1)
STEPS = 7


def drawn(model: DecoderModel) -> Any:
    draw = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(draw.normal(size=leaf.shape), jnp.float32),
        model.abstract(),
    )


PARAMS = drawn(MODEL)


def uncached(
    model: DecoderModel, params: Any, prompt: list[int], steps: int
) -> list[int]:
    """The reference: the whole sequence again for each token."""
    apply, row = jax.jit(model.apply), [*prompt]
    for _ in range(steps):
        tokens = np.zeros((1, len(prompt) + steps), np.int32)
        tokens[0, : len(row)] = row
        row.append(int(apply(params, tokens)[0, len(row) - 1].argmax()))
    return row


def written(rows: np.ndarray) -> list[list[int]]:
    return [[token for token in row if token >= 0] for row in rows.tolist()]


@pytest.mark.slow(reason="it compiles a program for each prompt")
def test_a_batch_of_unequal_prompts_gives_what_each_prompt_gives_alone() -> None:
    rows = generate(MODEL, PARAMS, PROMPTS, STEPS, KEY, temperature=0.0)
    assert rows.shape == (3, 5 + STEPS)
    assert rows.dtype == np.int32
    expected = [uncached(MODEL, PARAMS, prompt, STEPS) for prompt in PROMPTS]
    assert written(rows) == expected


@pytest.mark.full
def test_a_sampled_row_depends_on_its_own_prompt_and_key_alone() -> None:
    options: Any = {"temperature": 2.0, "top_k": 9, "top_p": 0.95}
    together = generate(MODEL, PARAMS, PROMPTS, STEPS, KEY, **options)
    key = jax.random.fold_in(KEY, 1)[None]
    alone = generate(MODEL, PARAMS, [PROMPTS[1]], STEPS, key, **options)
    assert written(alone)[0] == written(together)[1]


@pytest.mark.full
def test_samples_are_those_of_the_logits_of_the_whole_sequence() -> None:
    row = generate(MODEL, PARAMS, [PROMPTS[0]], STEPS, KEY, temperature=0.5)
    logits = MODEL.apply(PARAMS, jnp.asarray(row))[0]
    key = jax.random.fold_in(KEY, 0)
    for number in range(STEPS):
        scores = logits[5 + number - 1] / 0.5
        token = jax.random.categorical(jax.random.fold_in(key, number), scores)
        assert row[0, 5 + number] == token


@pytest.mark.full
def test_dropless_experts_route_each_token_by_itself() -> None:
    config = replace(CONFIG, num_experts=4, experts_per_token=2)
    model = DecoderModel(config)
    params = drawn(model)
    expected = [uncached(model, params, prompt, 4) for prompt in PROMPTS[:2]]
    rows = generate(model, params, PROMPTS[:2], 4, KEY, temperature=0.0)
    assert written(rows) == expected


@pytest.mark.full
@pytest.mark.parametrize(
    ("sizes", "kv_heads"),
    [((1, 4), 2), ((2, 2), 2)],
)
def test_a_mesh_gives_the_same_tokens(sizes: tuple[int, int], kv_heads: int) -> None:
    # Three rows over two devices of fsdp; with 4 of tp, key/value heads are repeated.
    model = DecoderModel(replace(CONFIG, num_kv_heads=kv_heads))
    params = drawn(model)
    mesh = Mesh(("fsdp", "tp"), devices=range(4), shape=sizes)
    shardings = jax.tree.map(
        lambda spec: jax.NamedSharding(mesh.jax, spec), model.layouts(mesh)
    )
    sharded = jax.device_put(params, shardings)
    for temperature in (0.0, 1.0):
        options: Any = {"temperature": temperature}
        expected = generate(model, params, PROMPTS, STEPS, KEY, **options)
        rows = generate(model, sharded, PROMPTS, STEPS, KEY, mesh=mesh, **options)
        np.testing.assert_array_equal(rows, expected)


@pytest.mark.full
def test_the_cache_is_sharded_over_the_mesh_and_as_short_as_the_window() -> None:
    mesh = Mesh(("fsdp", "tp"), devices=range(4), shape=(2, 2))
    sampler = Sampler(MODEL, PARAMS, mesh, cache_dtype="bf16")
    logits, cache = jax.jit(sampler._decoding.prefill, static_argnums=3)(
        sampler._weights, jnp.ones((2, 5), jnp.int32), None, 11
    )
    shapes = [k.sharding.shard_shape(k.shape) for k, _ in cache]
    # Local, global, local.
    assert shapes == [(1, 1, 3, 4), (1, 1, 11, 4), (1, 1, 3, 4)]
    assert {array.dtype for pair in cache for array in pair} == {jnp.bfloat16.dtype}
    assert logits.sharding.shard_shape(logits.shape) == (1, 6)


@pytest.mark.full
def test_parameters_of_pipeline_stages_give_the_same_tokens() -> None:
    split = StageSplit(2, (range(0, 2), range(2, 3)))
    staged = replace(MODEL, split=split)
    rows = generate(staged, staged.stored(PARAMS), PROMPTS, STEPS, KEY, temperature=0.0)
    expected = generate(MODEL, PARAMS, PROMPTS, STEPS, KEY, temperature=0.0)
    np.testing.assert_array_equal(rows, expected)


@pytest.mark.full
def test_top_k_of_one_and_a_small_top_p_are_the_likeliest_at_any_heat() -> None:
    cold = generate(MODEL, PARAMS, PROMPTS, STEPS, KEY, temperature=0.0)
    for options in ({"top_k": 1}, {"top_p": 1e-6}):
        hot = generate(MODEL, PARAMS, PROMPTS, STEPS, KEY, temperature=9.0, **options)
        np.testing.assert_array_equal(hot, cold)


@pytest.mark.full
def test_top_p_draws_from_the_smallest_set_that_has_the_probability() -> None:
    sampler = Sampler(MODEL, PARAMS)
    logits = MODEL.apply(PARAMS, jnp.asarray([PROMPTS[0]]))[0, -1] / 4.0
    shares = np.sort(jax.nn.softmax(logits))[::-1]
    for top_p in (0.3, 0.6, 0.9):
        rows = [PROMPTS[0]] * 512
        (drawn,) = sampler.stream(rows, 1, KEY, temperature=4.0, top_p=top_p)
        most = np.argsort(logits)[::-1][: int((shares.cumsum() < top_p).sum()) + 1]
        assert {*drawn.tolist()} == {*most.tolist()}


@pytest.mark.full
def test_a_row_ends_with_its_stop_token_and_the_iterator_with_the_last_row() -> None:
    free = written(generate(MODEL, PARAMS, PROMPTS, STEPS, KEY, temperature=0.0))
    stop, first = free[0][5 + 3], free[0][5:].index(free[0][5 + 3])
    assert 0 < first < STEPS - 1
    rows = generate(
        MODEL, PARAMS, PROMPTS, STEPS, KEY, temperature=0.0, stop_tokens=[stop]
    )
    for prompt, row, whole in zip(PROMPTS, written(rows), free, strict=True):
        new = whole[len(prompt) :]
        end = new.index(stop) + 1 if stop in new else STEPS
        assert row == prompt + new[:end]
    sampler = Sampler(MODEL, PARAMS)
    steps = sampler.stream(PROMPTS[:1], STEPS, KEY, temperature=0.0, stop_tokens=[stop])
    assert [step.tolist() for step in steps] == [[t] for t in free[0][5 : 6 + first]]


@pytest.mark.full
def test_a_step_is_compiled_once_whatever_key_and_heat() -> None:
    generate(MODEL, PARAMS, PROMPTS, STEPS, KEY)
    compiled = _step.alone._cache_size()
    model = DecoderModel(CONFIG)
    generate(model, PARAMS, PROMPTS, STEPS, jax.random.key(2), temperature=0.3)
    assert _step.alone._cache_size() == compiled


def test_every_argument_out_of_range_is_named() -> None:
    with pytest.raises(OperandError) as caught:
        generate(
            MODEL,
            PARAMS,
            [[1, 12], []],
            0,
            jax.random.split(KEY, 3),
            temperature=-1.0,
            top_k=13,
            top_p=0.0,
            stop_tokens=[3, 99],
        )
    assert str(caught.value) == (
        "[T401] generate cannot sample with these arguments\n"
        "  got: prompts of lengths [2, 0]\n"
        "  got: token [12] in a prompt\n"
        "  got: num_tokens = 0\n"
        "  got: temperature = -1.0\n"
        "  got: top_k = 13\n"
        "  got: top_p = 0.0\n"
        "  got: stop_tokens = [99]\n"
        "  got: keys of shape (3,) for 2 prompts\n"
        "  fix: prompts of one token or more\n"
        "  fix: tokens from 0 to 11\n"
        "  fix: num_tokens 1 or more\n"
        "  fix: temperature 0 or more\n"
        "  fix: top_k from 1 to 12, or None\n"
        "  fix: top_p above 0 and up to 1, or None\n"
        "  fix: stop tokens from 0 to 11\n"
        "  fix: one key, or one for each prompt\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T401.html"
    )


def test_parameters_of_another_model_are_refused() -> None:
    with pytest.raises(ParameterTreeError, match="T306"):
        Sampler(MODEL, {})
