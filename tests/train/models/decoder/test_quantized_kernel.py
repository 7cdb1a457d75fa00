# SPDX-License-Identifier: Apache-2.0
"""NF4 and int8: blocks of weights against NumPy, and a decoder that multiplies by them.

The table of NF4 is computed again from the quantiles that the paper defines.
"""

import dataclasses
import math
import statistics
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tessera.errors import (
    ModelShapeError,
    SettingValueError,
    TesseraError,
)
from tessera.foundations.tree import named_leaves, nest
from tessera.mesh import Mesh
from tessera.train.models import DecoderConfig, DecoderModel
from tessera.train.models.decoder.quantized_kernel import NF4, dequantize, quantize
from tessera.train.models.frozen_parameters import freeze
from tessera.train.models.pipeline_stages import StageSplit
from tests.small_model import SMALL
from tests.train.models.decoder.lora_reference import (
    random_batch,
    with_lora,
)

# Two blocks of inputs in each matmul; a block is two heads of the output's.
SIZES = dataclasses.replace(SMALL, d_model=128, head_dim=32, mlp_dim=256)
EXPERTS = dataclasses.replace(SIZES, num_experts=4)
KINDS = ["nf4", "int8"]
KEY = jax.random.key(0)
QUANTIZE = jax.jit(quantize, static_argnums=1)


def quantized(kind: str = "nf4", config: DecoderConfig = SIZES) -> DecoderModel:
    return DecoderModel(with_lora(config, rank=2, alpha=3.0, quantize_base=kind))


def dequantized(model: DecoderModel, params: Any) -> tuple[DecoderModel, Any]:
    """The model of plain LoRA on the weights that codes and scales stand for."""
    plain, leaves = model.dequantized(), dict(named_leaves(params))
    shapes = {name: leaf.shape for name, leaf in named_leaves(plain.abstract()).items()}
    for name in sorted(model.quantized):
        if name.endswith("/codes"):
            module = name.removesuffix("/codes")
            parts = leaves.pop(name), leaves.pop(f"{module}/scales")
            kernel = f"{module}/kernel"
            leaves[kernel] = jax.vmap(dequantize)(*parts).reshape(shapes[kernel])
    return plain, nest(leaves)


# --- blocks


def by_numpy(rows: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """The nearest code of each number, and the scales, by the definitions."""
    table = NF4.astype(np.float64) if kind == "nf4" else np.arange(-127, 128) / 127
    blocks = rows.reshape(-1, 64, *rows.shape[1:]).astype(np.float64)
    scales = np.abs(blocks).max(axis=1)
    distance = np.abs((blocks / scales[:, None])[..., None] - table)
    return distance.argmin(axis=-1), scales


def test_the_table_is_of_quantiles_of_a_normal_distribution() -> None:
    quantile, edge = statistics.NormalDist().inv_cdf, 0.9677083
    above = [quantile(p) for p in np.linspace(edge, 0.5, 9)[:-1]]
    below = [-quantile(p) for p in np.linspace(edge, 0.5, 8)[:-1]]
    table = np.sort([*above, 0.0, *below]) / above[0]
    np.testing.assert_allclose(NF4, table, atol=1e-6)


@pytest.mark.parametrize("shape", [(128, 3), (192, 2, 5)])
def test_codes_are_the_nearest_and_two_are_a_byte(shape: tuple[int, ...]) -> None:
    rows = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    expected, largest = by_numpy(rows, "nf4")
    codes, scales = QUANTIZE(rows, "nf4")
    assert codes.dtype == jnp.uint8
    assert codes.shape == (shape[0] // 64, 32, *shape[1:])
    np.testing.assert_array_equal(codes >> 4, expected[:, :32])
    np.testing.assert_array_equal(codes & 15, expected[:, 32:])
    np.testing.assert_array_equal(scales, largest.astype(np.float32))
    values = NF4[expected] * np.asarray(scales)[:, None]
    np.testing.assert_array_equal(dequantize(codes, scales), values.reshape(shape))
    codes, scales = QUANTIZE(rows, "int8")
    np.testing.assert_array_equal(codes, by_numpy(rows, "int8")[0] - 127)


def test_errors_are_those_that_are_known() -> None:
    rows = np.random.default_rng(1).normal(size=(64 * 500, 1)).astype(np.float32)
    errors = {
        kind: float(np.abs(dequantize(*QUANTIZE(rows, kind)) - rows).mean())
        for kind in KINDS
    }
    # bitsandbytes' own tests have 0.0728 for blocks of 64.
    assert errors["nf4"] == pytest.approx(0.0728, abs=5e-4)
    assert errors["int8"] < 0.0055


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_zeros_stay_and_nan_is_seen(kind: str) -> None:
    rows = np.zeros((128, 2), np.float32)
    rows[3, 1] = np.nan
    values = np.asarray(dequantize(*QUANTIZE(rows, kind)))
    np.testing.assert_array_equal(values[:, 0], 0)
    assert np.isnan(values[:64, 1]).all()
    np.testing.assert_array_equal(values[64:], 0)


@pytest.mark.parametrize("kind", KINDS)
def test_values_on_the_grid_come_back(kind: str) -> None:
    table = NF4 if kind == "nf4" else np.arange(-127, 128, dtype=np.float32) / 127
    rows = np.random.default_rng(2).choice(table, (64, 4)) * np.float32(0.5)
    rows[0] = -0.5
    values = dequantize(*QUANTIZE(rows, kind))
    np.testing.assert_allclose(values, rows, rtol=3e-7)


# --- the decoder


def with_noise(model: DecoderModel) -> Any:
    """Parameters whose adapters are not zero."""
    draw, params = np.random.default_rng(0), named_leaves(model.init(KEY))
    for name in sorted(model.adapters):
        noise = draw.normal(size=params[name].shape) / 4
        params[name] = jnp.asarray(noise, jnp.float32)
    return nest(params)


def results(model: DecoderModel, params: Any, mesh: Mesh | None = None) -> Any:
    """Logits, loss, and gradients of the adapters, by name."""
    model, batch = freeze(model, None, ()), random_batch(64, 0)
    place = model.place(mesh)
    if mesh is not None:
        put = partial(NamedSharding, mesh.jax)
        params = jax.device_put(params, jax.tree.map(put, model.layouts(mesh)))
        batch = jax.device_put(batch, put(P(place.axes("batch") or None)))

    @jax.jit
    def both(params: Any, batch: Any) -> Any:
        def loss(trained: Any) -> Any:
            whole = model.with_frozen(trained, params)
            return model.loss(whole, batch, place, chunk="none")[0]

        logits = model.apply(params, batch["tokens"], mesh=mesh)
        return logits, *jax.value_and_grad(loss)(model.trained(params))

    logits, loss, found = jax.device_get(both(params, batch))
    return {"logits": logits, "loss": loss, **named_leaves(found)}


def assert_same_as_lora(kind: str, sizes: tuple[int, int] | None) -> None:
    config, mesh = SIZES, None
    if sizes is not None:
        mesh = Mesh(["fsdp", "tp"], devices=range(4), shape=sizes)
        config = dataclasses.replace(SIZES, d_model=64 * max(sizes[0], 2))
    model = quantized(kind, config)
    params = with_noise(model)
    ours, theirs = results(model, params, mesh), results(*dequantized(model, params))
    assert {*ours} == {"logits", "loss", *model.adapters}
    for name, value in ours.items():
        largest = np.abs(theirs[name]).max()
        assert largest > 0
        np.testing.assert_allclose(value, theirs[name], rtol=0, atol=5e-5 * largest)


@pytest.mark.slow(reason="it compiles two models and their gradients")
def test_logits_and_gradients_are_those_of_lora_on_the_same_weights() -> None:
    assert_same_as_lora("nf4", None)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [("int8", None), ("nf4", (4, 1)), ("nf4", (2, 2)), ("int8", (2, 2))],
)
def test_a_mesh_computes_the_same(kind: str, sizes: Any) -> None:
    assert_same_as_lora(kind, sizes)


@pytest.mark.slow(reason="it initializes two models")
def test_weights_are_those_of_the_model_without_and_counted_so() -> None:
    model = quantized()
    plain = named_leaves(model.dequantized().init(KEY))
    params = named_leaves(model.init(KEY))
    assert model.num_params == model.dequantized().num_params
    for name, value in params.items():
        if name in model.quantized:
            module, _, part = name.rpartition("/")
            assert value.dtype == {"codes": "uint8", "scales": "float32"}[part]
            rows = plain[f"{module}/kernel"].reshape(
                2, -1, *value.shape[2 + (part == "codes") :]
            )
            expected = [QUANTIZE(layer, "nf4")[part == "scales"] for layer in rows]
            # Programs round the last bit of random numbers in other ways.
            differs = ~np.isclose(value, np.stack(expected), rtol=1e-6)
            assert differs.mean() < 1e-3, name
        else:
            np.testing.assert_array_equal(value, plain[name], name)
    kernels = {n.replace("codes", "kernel") for n in params if n.endswith("/codes")}
    assert kernels == {n for n in plain if n.endswith("/kernel")}


@pytest.mark.parametrize(
    ("config", "lora", "got"),
    [
        (SIZES, {"quantize_base": "fp4"}, "lora.quantize_base = 'fp4'"),
        (SIZES, {"rank": 0}, "lora.quantize_base = 'nf4', lora.rank = 0"),
        (SMALL, {}, "takes blocks of 64 inputs, q_proj has 32"),
        (EXPERTS, {}, "experts are not quantized"),
    ],
)
def test_what_cannot_be_quantized_is_refused(config: Any, lora: Any, got: str) -> None:
    with pytest.raises(ModelShapeError) as caught:
        with_lora(config, **{"rank": 2, "quantize_base": "nf4", **lora})
    assert got in str(caught.value)


@pytest.mark.parametrize(
    ("change", "sizes", "code", "got"),
    [
        ({"fp8": True}, (1, 1), "T507", "neither pipelines nor 8-bit"),
        (
            {"split": StageSplit.of(SIZES, 2)},
            (1, 1),
            "T507",
            "neither pipelines nor 8-bit",
        ),
        ({}, (4, 1), "T201", "embed of 128: 2 blocks, 4 devices"),
        ({}, (1, 4), "T201", "heads of 128: 2 blocks, 4 devices"),
    ],
)
def test_a_run_that_would_cut_blocks_or_stages_is_refused(
    change: Any, sizes: Any, code: str, got: str
) -> None:
    config = dataclasses.replace(SIZES, num_kv_heads=4)
    model = dataclasses.replace(quantized(config=config), **change)
    mesh = Mesh(["fsdp", "tp"], devices=range(math.prod(sizes)), shape=sizes)
    with pytest.raises(TesseraError) as caught:
        model.check(mesh)
    assert caught.value.code == code
    assert got in str(caught.value)


@pytest.mark.parametrize("patterns", [["*"], ["*lora*", "*/up/scales"]])
def test_quantized_weights_are_not_trained(patterns: list[str]) -> None:
    with pytest.raises(SettingValueError, match="quantized weights are not trained"):
        freeze(quantized(), patterns, ())
    assert not quantized().quantized - freeze(quantized(), ["*lora*"], ()).frozen
