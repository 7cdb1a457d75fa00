# SPDX-License-Identifier: Apache-2.0
"""Completions and their log-probabilities, beside the whole sequence for each token."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.errors import OperandError, ParameterTreeError
from tessera.mesh import Mesh
from tessera.train.models import DecoderConfig, DecoderModel, paged_cache
from tessera.train.models.decoder import cached_decoding
from tessera.train.models.decoder.config import LoraConfig
from tessera.train.models.pipeline_stages import StageSplit
from tessera.train.rollouts import Completion, Sampler, generate
from tessera.train.rollouts.batch_part import BatchPart
from tessera.train.rollouts.programs import decode, fill

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
# Longer than the window, as long, and shorter; four of a group, of which three
# neighbors are equal; one is longer than four blocks.
PROMPTS = [[1, 2, 3, 7, 8], [4, 5, 9], [6], *3 * [[1, 2, 3, 7, 8]], 2 * [*range(9)]]
KEY = jax.random.key(1)
SIZES: Any = {"num_tokens": 11, "max_length": 32, "block": 4, "dispatch_tokens": 5}


@pytest.fixture(autouse=True, scope="module")
def few_slots_are_read_as_many() -> Iterator[None]:
    """From copies of the cache; tests of whole runs read few from the cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cached_decoding, "ITEMS", 1)
        yield


@cache
def drawn(model: DecoderModel) -> Any:
    """Parameters, of which none is zero or one."""
    draw = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(draw.normal(size=leaf.shape), jnp.float32),
        model.abstract(),
    )


PARAMS = drawn(MODEL)


@cache
def _plain(model: DecoderModel) -> Any:
    return jax.jit(model.apply)


def plain_log_probs(
    model: DecoderModel, params: Any, row: Sequence[int], temperature: float = 1.0
) -> np.ndarray:
    """Log-probabilities of the token after each one: ``[length, vocab]``."""
    tokens = np.zeros((1, SIZES["max_length"]), np.int32)
    tokens[0, : len(row)] = row
    return np.asarray(
        jax.nn.log_softmax(_plain(model)(params, tokens)[0] / temperature)
    )


def check(
    completions: Sequence[Completion],
    prompts: Sequence[Sequence[int]] = PROMPTS,
    model: DecoderModel = MODEL,
    params: Any = PARAMS,
    *,
    temperature: float = 1.0,
    atol: float = 3e-5,
) -> None:
    """Compare log-probabilities, and greedy tokens, with the whole sequence."""
    for prompt, made in zip(prompts, completions, strict=True):
        expected = plain_log_probs(
            model, params, [*prompt, *made.tokens], temperature or 1.0
        )[len(prompt) - 1 :][: len(made.tokens)]
        own = expected[np.arange(len(made.tokens)), made.tokens]
        np.testing.assert_allclose(made.log_probs, own, atol=atol, rtol=0)
        if temperature == 0:
            np.testing.assert_allclose(own, expected.max(axis=-1), atol=atol, rtol=0)


def tokens_of(completions: Sequence[Completion]) -> list[list[int]]:
    return [made.tokens.tolist() for made in completions]


@pytest.mark.slow(reason="it compiles the programs that others use")
def test_log_probs_are_those_of_the_whole_sequence() -> None:
    for temperature in (1.0, 0.0, 0.5):
        sampler = Sampler(MODEL, slots=3, temperature=temperature, **SIZES)
        made = sampler.complete(PARAMS, PROMPTS, KEY)
        check(made, temperature=temperature)
        assert all(len(each.tokens) == 11 and not each.ended for each in made)
        assert {each.tokens.dtype for each in made} == {np.dtype("int32")}
        assert {each.log_probs.dtype for each in made} == {np.dtype("float32")}


@pytest.mark.full
@pytest.mark.parametrize(
    "sizes",
    [
        {"slots": 7},
        {"slots": 1},
        {"slots": 4, "block": 2, "dispatch_tokens": 1},
        {"slots": 4, "block": 1, "dispatch_tokens": 7},
        {"slots": 2, "block": 32, "dispatch_tokens": 32},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_slots_blocks_and_dispatches(sizes: Any) -> None:
    expected = Sampler(MODEL, slots=3, **SIZES).complete(PARAMS, PROMPTS, KEY)
    made = Sampler(MODEL, **{**SIZES, **sizes}).complete(PARAMS, PROMPTS, KEY)
    check(made)
    assert tokens_of(made) == tokens_of(expected)


@pytest.mark.full
def test_rows_that_wait_again_get_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = Counter[int]()
    put_back = BatchPart._put_back

    def counted(part: BatchPart, row: Any) -> None:
        counts[row.number] += 1
        put_back(part, row)

    monkeypatch.setattr(BatchPart, "_put_back", counted)
    expected = Sampler(MODEL, slots=7, **SIZES).complete(PARAMS, PROMPTS, KEY)
    assert not counts
    sampler = Sampler(MODEL, slots=7, cache_tokens=44, **SIZES)
    made = sampler.complete(PARAMS, PROMPTS, KEY)
    assert counts
    check(made)
    assert tokens_of(made) == tokens_of(expected)


@pytest.mark.full
def test_a_row_depends_on_its_own_prompt_and_key_alone() -> None:
    options: Any = {"temperature": 2.0, "top_k": 9, "top_p": 0.95, **SIZES}
    keys = jax.random.split(KEY, len(PROMPTS))
    together = Sampler(MODEL, slots=3, **options).complete(PARAMS, PROMPTS, keys)
    for number in (1, 4):
        (alone,) = Sampler(MODEL, slots=3, **options).complete(
            PARAMS, [PROMPTS[number]], keys[number : number + 1]
        )
        assert alone.tokens.tolist() == together[number].tokens.tolist()
        np.testing.assert_allclose(
            alone.log_probs, together[number].log_probs, atol=1e-5
        )
    first = Sampler(MODEL, slots=3, **SIZES).complete(PARAMS, PROMPTS, KEY)
    folded = jax.vmap(jax.random.fold_in, (None, 0))(KEY, np.arange(len(PROMPTS)))
    again = Sampler(MODEL, slots=3, **SIZES).complete(PARAMS, PROMPTS, folded)
    assert tokens_of(first) == tokens_of(again)
    # Those of a group differ by their keys.
    assert len({made.tokens.tobytes() for made in (first[0], *first[3:6])}) > 1


@pytest.mark.full
def test_tokens_are_drawn_by_their_probabilities() -> None:
    prompt, count = PROMPTS[0], 4096
    sampler = Sampler(
        MODEL, slots=512, num_tokens=1, max_length=8, block=4, temperature=3.0
    )
    made = sampler.complete(PARAMS, [prompt] * count, KEY)
    found = np.bincount([each.tokens[0] for each in made], minlength=12) / count
    expected = np.exp(plain_log_probs(MODEL, PARAMS, prompt, 3.0)[len(prompt) - 1])
    assert np.abs(found - expected).max() < 4 * np.sqrt(0.25 / count)


@pytest.mark.full
def test_top_k_of_one_and_a_small_top_p_are_the_likeliest_at_any_heat() -> None:
    options: Any = {"slots": 3, **SIZES}
    cold = Sampler(MODEL, temperature=0.0, **options).complete(PARAMS, PROMPTS, KEY)
    for few in ({"top_k": 1}, {"top_p": 1e-6}):
        hot = Sampler(MODEL, temperature=9.0, **few, **options)
        made = hot.complete(PARAMS, PROMPTS, KEY)
        assert tokens_of(made) == tokens_of(cold)
        check(made, temperature=9.0)  # among all tokens


@pytest.mark.full
def test_top_p_draws_from_the_smallest_set_that_has_the_probability() -> None:
    shares = np.exp(plain_log_probs(MODEL, PARAMS, PROMPTS[0], 4.0)[4])
    ordered = np.sort(shares)[::-1]
    for top_p in (0.3, 0.6, 0.9):
        sampler = Sampler(
            MODEL, slots=512, num_tokens=1, max_length=8, temperature=4.0, top_p=top_p
        )
        made = sampler.complete(PARAMS, [PROMPTS[0]] * 512, KEY)
        few = int((ordered.cumsum() < top_p).sum()) + 1
        most = np.argsort(shares)[::-1][:few]
        assert {each.tokens[0] for each in made} == {*most.tolist()}


@pytest.mark.full
def test_a_completion_ends_with_its_stop_token() -> None:
    free = Sampler(MODEL, slots=3, **SIZES).complete(PARAMS, PROMPTS, KEY)
    for stops in ([3], [0, 5, 11]):
        sampler = Sampler(MODEL, slots=3, stop_tokens=stops, **SIZES)
        made = sampler.complete(PARAMS, PROMPTS, KEY)
        for whole, each in zip(tokens_of(free), made, strict=True):
            ends = [i for i, token in enumerate(whole) if token in stops]
            assert each.tokens.tolist() == whole[: ends[0] + 1 if ends else 11]
            assert each.ended == bool(ends)
            assert len(each.log_probs) == len(each.tokens)
        assert {each.ended for each in made} == {True, False} or stops != [3]


@pytest.mark.full
def test_a_stream_has_the_same_tokens_and_ends_what_its_reader_ends() -> None:
    sampler = Sampler(MODEL, slots=3, **SIZES)
    expected = tokens_of(sampler.complete(PARAMS, PROMPTS, KEY))
    found: list[list[int]] = [[] for _ in PROMPTS]
    for row, token in sampler.stream(PARAMS, PROMPTS, KEY):
        found[row].append(token)
    assert found == expected
    counts = Counter(
        row
        for row, _ in sampler.stream(PARAMS, PROMPTS, KEY, is_ended=lambda row: row < 4)
    )
    assert [counts[row] for row in range(7)] == [5, 5, 5, 5, 11, 11, 11]


@pytest.mark.full
def test_other_parameters_and_prompts_compile_nothing() -> None:
    sampler = Sampler(MODEL, slots=3, **SIZES)
    sampler.complete(PARAMS, PROMPTS, KEY)
    compiled = fill.alone._cache_size(), decode.alone._cache_size()
    other = jax.tree.map(lambda x: x / 2, PARAMS)
    again = Sampler(DecoderModel(CONFIG), slots=3, temperature=0.3, **SIZES)
    for params in (PARAMS, other):
        made = again.complete(params, [[3, 1], *PROMPTS], jax.random.key(2))
        check(made, [[3, 1], *PROMPTS], params=params, temperature=0.3)
    assert (fill.alone._cache_size(), decode.alone._cache_size()) == compiled


@pytest.mark.full
@pytest.mark.parametrize(
    "change",
    [
        {"num_experts": 4, "experts_per_token": 2},
        {"attention_sinks": True, "attention_soft_cap": 1.0, "logit_soft_cap": 2.0},
        {"qkv_bias": True, "lora": LoraConfig(2)},
        {"window": None, "global_every": 1, "num_kv_heads": 1},
        {"global_every": None, "window": 2, "qk_norm_joint": True},
        {
            "d_model": 128,
            "mlp_dim": 256,
            "num_heads": 64,
            "lora": LoraConfig(2, quantize_base="nf4"),
        },
    ],
    ids=lambda change: ",".join(change),
)
@pytest.mark.parametrize("sizes", [None, (2, 2), (1, 4)], ids=str)
def test_every_kind_of_layer_on_a_mesh(
    change: Any, sizes: tuple[int, int] | None
) -> None:
    model = DecoderModel(replace(CONFIG, **change))
    params = model.init(KEY) if model.quantized else drawn(model)
    mesh, given = None, params
    if sizes is not None:
        mesh = Mesh(("fsdp", "tp"), devices=range(4), shape=sizes)
        shardings = jax.tree.map(
            lambda spec: jax.NamedSharding(mesh.jax, spec), model.layouts(mesh)
        )
        given = jax.device_put(params, shardings)
    for cache_tokens in (None, 44):
        sampler = Sampler(model, mesh, slots=4, cache_tokens=cache_tokens, **SIZES)
        made = sampler.complete(given, PROMPTS, KEY)
        check(made, PROMPTS, model, params, atol=2e-4)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_fixed_parts_have_the_same_bits_on_every_mesh(dtype: str | None) -> None:
    model = replace(MODEL, dtype=dtype)
    found = list[list[tuple[bytes, bytes]]]()
    for axes, sizes in {
        (): (),
        ("fsdp", "tp"): (2, 2),
        ("dp", "cp"): (4, 2),
    }.items():
        mesh, given = None, PARAMS
        if axes:
            mesh = Mesh(axes, devices=range(int(np.prod(sizes))), shape=sizes)
            shardings = jax.tree.map(
                lambda spec, mesh=mesh: jax.NamedSharding(mesh.jax, spec),
                model.layouts(mesh),
            )
            given = jax.device_put(PARAMS, shardings)
        sampler = Sampler(model, mesh, slots=8, parts=4, cache_tokens=60, **SIZES)
        made = sampler.complete(given, PROMPTS, KEY)
        check(made, atol=3e-5 if dtype is None else 0.5)
        found.append([(x.tokens.tobytes(), x.log_probs.tobytes()) for x in made])
    assert all(each == found[0] for each in found)


@pytest.mark.full
def test_parameters_of_pipeline_stages_give_the_same_tokens() -> None:
    split = StageSplit(2, (range(0, 2), range(2, 3)))
    staged = replace(MODEL, split=split)
    sampler = Sampler(staged, slots=3, **SIZES)
    made = sampler.complete(staged.stored(PARAMS), PROMPTS, KEY)
    expected = Sampler(MODEL, slots=3, **SIZES).complete(PARAMS, PROMPTS, KEY)
    assert tokens_of(made) == tokens_of(expected)


@pytest.mark.full
def test_a_narrow_model_and_a_narrow_cache_are_near() -> None:
    model = replace(MODEL, dtype="bfloat16")
    params = jax.tree.map(lambda x: x / 2, PARAMS)
    made = Sampler(model, slots=3, **SIZES).complete(params, PROMPTS, KEY)
    check(made, params=params, atol=0.2)
    sampler = Sampler(MODEL, slots=3, cache_dtype="bf16", **SIZES)
    check(sampler.complete(params, PROMPTS, KEY), params=params, atol=0.1)


@pytest.mark.full
def test_a_local_layer_caches_its_window_alone() -> None:
    sampler = Sampler(MODEL, slots=4, num_tokens=50, max_length=200, block=4)
    local, whole = (
        sampler._pools[sampler._decoding.windows.index(window)] for window in (3, None)
    )
    # One row of 200 tokens, which fills all of its prompt; four of these, and a block.
    assert (local, whole) == (1 + 50 + 10, 1 + 4 * 51)
    prompt = [*np.random.default_rng(0).integers(0, 12, 150)]
    made = sampler.complete(PARAMS, [prompt] * 3, KEY)
    row = np.array([[*prompt, *made[2].tokens]], np.int32)
    expected = jax.nn.log_softmax(jax.jit(MODEL.apply)(PARAMS, row)[0])
    own = expected[np.arange(149, 199), made[2].tokens]
    np.testing.assert_allclose(made[2].log_probs, own, atol=1e-4)


@pytest.mark.full
def test_chunks_without_room_for_a_copy_are_read_from_the_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paged_cache, "CHUNK", 4)
    monkeypatch.setattr(paged_cache, "ITEMS", 2)
    model = DecoderModel(replace(CONFIG, window=13, logit_soft_cap=3.0))
    copied, counts = paged_cache.copied, set[tuple[int, int]]()

    def counted(chunks: Any, pool: Any) -> Any:
        made = copied(chunks, pool)
        copies = sum(keys.shape[1] for keys, _ in made.copies)
        counts.add((copies, chunks.slots.shape[1]))
        return made

    monkeypatch.setattr(cached_decoding, "copied", counted)
    # The pool has room for 16 rows, as they share their prompt.
    sizes: Any = {"num_tokens": 3, "max_length": 32, "block": 4, "cache_tokens": 160}
    prompts = [[*range(12), *range(12), 5, 4, 3, 2, 1]] * 16
    sampler = Sampler(model, slots=16, dispatch_tokens=2, **sizes)
    made = sampler.complete(drawn(model), prompts, KEY)
    check(made, prompts, model, drawn(model))
    assert counts == {(64, 128), (64, 80)}


@pytest.mark.full
def test_generate_pads_prompts_on_the_left_and_what_ended_on_the_right() -> None:
    rows = generate(MODEL, PARAMS, PROMPTS, 4, KEY, temperature=0.0)
    assert rows.shape == (7, 22)
    assert rows.dtype == np.int32
    assert rows[2, :18].tolist() == [-1] * 17 + [6]
    stop = rows[2, 19]
    ended = generate(
        MODEL, PARAMS, PROMPTS, 4, KEY, temperature=0.0, stop_tokens=[int(stop)]
    )
    first = rows[2, 18:].tolist().index(stop)
    assert ended[2, 18:].tolist() == [*rows[2, 18 : 19 + first], *[-1] * (3 - first)]


def test_no_prompts_have_no_completions() -> None:
    assert Sampler(MODEL, **SIZES).complete(PARAMS, [], KEY) == []


def test_every_setting_out_of_range_is_named() -> None:
    with pytest.raises(OperandError) as caught:
        Sampler(
            MODEL,
            slots=0,
            num_tokens=0,
            max_length=8,
            temperature=-1.0,
            top_k=13,
            top_p=0.0,
            stop_tokens=[3, 99],
        )
    assert str(caught.value) == (
        "[T401] these prompts cannot be completed\n"
        "  got: num_tokens = 0\n"
        "  got: slots = 0\n"
        "  got: temperature = -1.0\n"
        "  got: top_k = 13\n"
        "  got: top_p = 0.0\n"
        "  got: stop_tokens = [99]\n"
        "  fix: num_tokens 1 or more\n"
        "  fix: slots 1 or more\n"
        "  fix: temperature 0 or more\n"
        "  fix: top_k from 1 to 12, or None\n"
        "  fix: top_p above 0 and up to 1, or None\n"
        "  fix: stop tokens from 0 to 11\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T401.html"
    )


def test_every_prompt_that_cannot_be_completed_is_named() -> None:
    sampler = Sampler(MODEL, **SIZES)
    with pytest.raises(OperandError) as caught:
        sampler.complete(PARAMS, [[1, 12], [], [1] * 22], jax.random.split(KEY, 2))
    assert str(caught.value) == (
        "[T401] these prompts cannot be completed\n"
        "  got: prompts of lengths [2, 0, 22]\n"
        "  got: a prompt of 22 tokens, max_length less num_tokens = 21\n"
        "  got: token [12] in a prompt\n"
        "  got: keys of shape (2,) for 3 prompts\n"
        "  fix: prompts of one token or more\n"
        "  fix: prompts of 21 tokens or less, or another max_length\n"
        "  fix: tokens from 0 to 11\n"
        "  fix: one key, or one for each prompt\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T401.html"
    )


def test_parameters_of_another_model_are_refused() -> None:
    with pytest.raises(ParameterTreeError, match="T306"):
        Sampler(MODEL, **SIZES).complete({}, PROMPTS, KEY)
