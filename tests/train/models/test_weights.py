# SPDX-License-Identifier: Apache-2.0
"""Parameters to a file and back, on any mesh; what does not fit is listed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import AxisType

from tessera.errors import WeightFileError
from tessera.mesh import Mesh
from tessera.train.models import DecoderConfig, DecoderModel
from tessera.train.models.decoder.quantized_kernel import quantize
from tessera.train.models.families.family import Tensor
from tessera.train.models.parameter_slices import QuantizedSlices
from tessera.train.models.pipeline_stages import StageSplit
from tessera.train.models.safetensors import SafetensorsFile, write_file
from tessera.train.models.weights import export_weights, import_weights
from tessera.train.rollouts import generate

CONFIG = DecoderConfig(
    vocab_size=64,
    d_model=16,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_dim=32,
    window=8,
    query_pre_attn_scalar=4,
    global_every=2,
)
MODEL = DecoderModel(CONFIG)
KEY = jax.random.key(0)
STAGED = DecoderModel(CONFIG, split=StageSplit.of(CONFIG, 2))


@pytest.fixture(scope="module")
def params():
    return MODEL.init(jax.random.key(0))


@pytest.fixture(scope="module")
def file(params, tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "weights.safetensors"
    export_weights(params, path, metadata={"format": "tessera"})
    return path


def assert_same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_names_are_paths_with_dots(file):
    arrays = safetensors.numpy.load_file(file)
    assert arrays["decoder.mlp.up.kernel"].shape == (3, 16, 32)
    assert {"embedding", "final_norm.scale"} <= arrays.keys()


@pytest.mark.parametrize(
    ("axes", "sizes"), [("", ()), ("fsdp", (4,)), ("fsdp tp", (2, 2))]
)
def test_parameters_come_back_on_any_mesh(file, params, axes, sizes):
    mesh = Mesh(axes.split(), range(4), sizes) if axes else None
    got = import_weights(file, MODEL, mesh)
    assert_same(got, params)
    if mesh is not None:
        wanted = MODEL.layouts(mesh)
        assert jax.tree.map(lambda leaf: leaf.sharding.spec, got) == wanted


@pytest.mark.parametrize("part", [0, 1])
def test_quantized_slices_are_of_whole_blocks(part, tmp_path):
    """A block of 64 is a head of 48 and a third of the next one."""
    shape = (2, 4, 48, 6)
    weight = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    write_file(tmp_path / "w", {"w": (weight.dtype, shape)}, lambda _: weight)
    source, row = SafetensorsFile(tmp_path / "w"), Tensor("w", "w")
    slices = QuantizedSlices(
        source, row, shape, np.dtype(np.float32), None, "nf4", part
    )
    whole = np.stack([quantize(x.reshape(192, 6), "nf4")[part] for x in weight])
    for blocks in (slice(None), slice(1, 2), slice(1, 3)):
        index = (slice(1, 2), blocks, *[slice(3, 20)] * (1 - part), slice(2, 5))
        np.testing.assert_array_equal(slices.read(index), whole[index])


def test_a_mesh_may_be_one_of_jax(file):
    mesh = jax.make_mesh(
        (2, 2), ("fsdp", "tp"), (AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    own, given = import_weights(file, MODEL, Mesh.of(mesh)), MODEL.init(KEY, mesh)
    for params in (import_weights(file, MODEL, mesh), given):
        shardings = [jax.tree.map(lambda x: x.sharding, p) for p in (own, params)]
        assert shardings[0] == shardings[1]
    tokens = np.arange(16).reshape(2, 8)
    found = [
        generate(MODEL, given, tokens, 2, KEY, mesh=m, temperature=0.0)
        for m in (mesh, Mesh.of(mesh))
    ]
    np.testing.assert_array_equal(*found)


@pytest.mark.full
def test_stages_are_no_part_of_the_file(file, params, tmp_path):
    mesh = Mesh(["pp", "fsdp"], range(4), (2, 2))
    staged = import_weights(file, STAGED, mesh)
    assert_same(staged, STAGED.stored(params))
    path = tmp_path / "staged.safetensors"
    export_weights(staged, path, model=STAGED, metadata={"format": "tessera"})
    assert path.read_bytes() == file.read_bytes()


def test_bf16_is_rounded_once_and_widened_exactly(params, tmp_path):
    path = tmp_path / "half.safetensors"
    export_weights(params, path, dtype="bf16")
    assert {dtype for dtype, _ in SafetensorsFile(path).arrays.values()} == {"BF16"}
    got = import_weights(path, MODEL)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), params)
    assert_same(got, rounded)


def test_what_does_not_fit_is_listed_whole(file):
    other = DecoderModel(dataclasses.replace(CONFIG, mlp_dim=48, num_experts=2))
    with pytest.raises(WeightFileError) as caught:
        import_weights(file, other)
    said = str(caught.value)
    assert f"{file} does not hold the parameters of this model" in said
    assert "decoder.mlp.up.kernel: the file has F32[3, 16, 32], the model " in said
    assert "the file has nothing, the model F32[" in said


def test_integers_are_no_parameters(params, tmp_path):
    arrays = {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    arrays["embedding"] = arrays["embedding"].astype(np.int32)
    safetensors.numpy.save_file(arrays, tmp_path / "a")
    with pytest.raises(WeightFileError) as caught:
        import_weights(tmp_path / "a", MODEL)
    assert caught.value.got == (
        "embedding: the file has I32[64, 16], the model F32[64, 16]"
    )
