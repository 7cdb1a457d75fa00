# SPDX-License-Identifier: Apache-2.0
"""Each family computes what Hugging Face Transformers computes with the same weights.

The file ``golden/golden.json`` has logits, losses, and two numbers for the gradient of
each tensor. The weights go through a folder, so that ``config.json`` and the names of
tensors are tested too.
"""

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tessera.errors import ModelFolderError
from tessera.foundations.labels import IGNORE_INDEX
from tessera.foundations.tree import named_leaves
from tessera.graph.jit import function
from tessera.mesh import Mesh
from tessera.train.loop.pipelined_model import PipelinedModel, schedule_of
from tessera.train.models import DecoderModel, from_pretrained
from tessera.train.models.families.family import StoredTensor
from tessera.train.models.families.registry import family_for, family_of
from tessera.train.models.partition_rules import NO_MESH
from tessera.train.models.pipeline_stages import split_of
from tessera.train.models.weights import import_weights
from tests.train.models.golden.golden_cases import CASES, summary, tokens, weight

GOLDEN = json.loads((Path(__file__).parent / "golden" / "golden.json").read_text())
EXACT = 1e-5  # of the largest number
FSDP_TP = Mesh(["fsdp", "tp"], devices=range(4), shape=(2, 2))
CP_TP = Mesh(["cp", "tp"], devices=range(4), shape=(2, 2))
PP_TP = Mesh(["pp", "tp"], devices=range(4), shape=(2, 2))
PP_CP = Mesh(["pp", "cp"], devices=range(4), shape=(2, 2))
EXPERTS = Mesh(["ep", "tp"], devices=range(4), shape=(2, 2))
QUICK = {"xla_backend_optimization_level": 0}  # half the time to compile


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of each case."""

    @cache
    def make(name):
        path = tmp_path_factory.mktemp(name)
        (path / "config.json").write_text(json.dumps(CASES[name]))
        family = family_of(CASES[name])
        model = DecoderModel(family.config(CASES[name]))
        leaves = named_leaves(model.abstract())
        shapes = {key.replace("/", "."): leaf.shape for key, leaf in leaves.items()}
        tensors = {
            part: weight(name, part, stored.shape)
            for part, stored in StoredTensor.all_of(family.rows(shapes), shapes).items()
        }
        assert tensors.keys() == GOLDEN["cases"][name]["gradients"].keys()
        safetensors.numpy.save_file(tensors, path / "model.safetensors")
        return path

    return make


def batch_of():
    ids = tokens().astype(np.int32)
    targets = np.pad(ids[:, 1:], ((0, 0), (0, 1)), constant_values=IGNORE_INDEX)
    rows, length = ids.shape
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), ids.shape)
    return {
        "tokens": ids,
        "targets": targets,
        "segment_ids": np.ones((rows, length), np.int32),
        "positions": positions,
    }


def computed(model, params, mesh):
    """Loss, gradients and logits of the batch."""
    batch, place = batch_of(), NO_MESH if mesh is None else model.place(mesh)
    if mesh is not None:
        spec = P(place.axes("batch") or None)
        batch = jax.device_put(batch, NamedSharding(mesh.jax, spec))

    def loss(params: Any, batch: Any) -> Any:
        batch = {name: place.arranged(array) for name, array in batch.items()}
        _, sums = model.loss(params, batch, place, chunk="none")
        return sums["loss"]

    def both(params: Any, batch: Any) -> Any:
        logits = model.apply(params, batch["tokens"], mesh=mesh)
        return *jax.value_and_grad(loss)(params, batch), logits

    return jax.jit(both, compiler_options=QUICK)(params, batch)


def near(found, wanted, what):
    wanted = np.asarray(wanted)
    bound = EXACT * np.abs(wanted).max()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=bound, err_msg=what)


def summaries(name, model, gradients):
    """The two numbers of each tensor's gradient, in the folder's names."""
    leaves = {k.replace("/", "."): np.asarray(v) for k, v in gradients.items()}
    rows = family_of(CASES[name]).rows(leaves)
    tensors = StoredTensor.all_of(rows, {path: x.shape for path, x in leaves.items()})
    return {
        part: summary(part, stored.joined(leaves.__getitem__))
        for part, stored in tensors.items()
    }


def assert_golden(name, model, loss, gradients):
    golden = GOLDEN["cases"][name]
    near(loss, golden["loss"], "loss")
    found = summaries(name, model, named_leaves(gradients))
    assert found.keys() == golden["gradients"].keys()
    for part, wanted in golden["gradients"].items():
        near(found[part], wanted, part)


# Families that differ in what a mesh splits: norms of heads, biases, soft caps, rotary
# embeddings by kind of layer and a head of its own, experts. The constants of all
# families are compared on one device.
ON_MESHES = {
    "gemma3": FSDP_TP,
    "llama_linear": FSDP_TP,
    "gemma2": CP_TP,
    "mistral_yarn": CP_TP,
    "qwen3_moe": EXPERTS,
    "phi3": FSDP_TP,
    "olmo2": FSDP_TP,
    "olmo3": CP_TP,
    "gpt_oss": EXPERTS,
}


def cases():
    for name in CASES:
        is_fast = name in ("gemma3", "qwen3_moe")
        marks = () if is_fast else pytest.mark.full
        yield pytest.param(name, None, id=f"{name}-one device", marks=marks)
    for name, mesh in ON_MESHES.items():
        label = f"{name}-{mesh.topology}"
        yield pytest.param(name, mesh, id=label, marks=pytest.mark.full)


@pytest.mark.slow(reason="each family is compared with Transformers once")
@pytest.mark.parametrize(("name", "mesh"), [*cases()])
def test_logits_loss_and_gradients_are_those_of_transformers(folder, name, mesh):
    model, params = from_pretrained(folder(name), mesh)
    loss, gradients, logits = computed(model, params, mesh)
    near(np.asarray(logits)[:, ::3], GOLDEN["cases"][name]["logits"], "logits")
    assert_golden(name, model, loss, gradients)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "mesh", "method"),
    [
        ("gemma3", PP_TP, "ring"),
        ("gemma2", PP_CP, "all_to_all"),
        ("olmo3", PP_TP, "ring"),
        ("gpt_oss", PP_TP, "ring"),
    ],
    ids=str,
)
def test_a_pipeline_has_the_loss_and_gradients_of_transformers(
    folder, name, mesh, method
):
    config = family_of(CASES[name]).config(CASES[name])
    routers = {"router_balance_weight": 0.0, "router_z_weight": 0.0}
    config = dataclasses.replace(config, **routers)  # no losses of their own
    split = split_of(mesh, config, 1)
    model = DecoderModel(config, context_parallel=method, split=split)
    params, place = import_weights(folder(name), model, mesh), model.place(mesh)
    schedule = schedule_of(mesh, "1f1b", 1, len(tokens()))
    assert schedule is not None
    pipeline = PipelinedModel(model, mesh, schedule)
    micros = {name: array[:, None] for name, array in batch_of().items()}

    @function(mesh=mesh, in_specs={"micros": P()})
    def step(params: Any, micros: Any) -> Any:
        arranged = {name: place.arranged(array) for name, array in micros.items()}
        return pipeline.gradients(params, arranged, jnp.float32(1))

    sums, gradients = step(params, micros)
    plain = model.plain(jax.tree.map(np.asarray, gradients))
    assert_golden(name, model, sums["loss"], plain)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gemma3", {"window": 6}),
        ("gemma3", {"rope_scale_global": 1.0}),
        ("gemma3", {"global_every": 5}),
        ("llama3", {"rope_kind": "linear"}),
        ("llama3", {"norm_unit_offset": True}),
        ("llama_yarn", {"rope_attention_factor": 1.0}),
        ("llama_yarn", {"rope_truncate": False}),
        ("gemma3_soft_cap", {"logit_soft_cap": None}),
        ("gemma3_soft_cap", {"layer_types": ("local", "global", "local")}),
        ("gemma2", {"attention_soft_cap": None}),
        ("gemma2", {"logit_soft_cap": None}),
        ("gemma2", {"global_every": 3}),
        ("mistral", {"window": 8}),
        ("mistral_yarn", {"window": 8}),
        ("mistral_yarn", {"rope_attention_factor": None}),
        ("mistral_yarn", {"rope_base_local": 400.0}),
        ("qwen3_windows", {"window": 8}),
        ("qwen3_windows", {"rope_scale_local": 1.0}),
        ("qwen3_windows", {"layer_types": ("local", "global", "local")}),
        ("qwen3", {"activation": "gelu_tanh"}),
        ("phi3", {"window": 8}),
        ("phi3", {"norm_epsilon": 1e-3}),
        ("phi3_longrope", {"rope_short_factors": (1.5, 2.4)}),
        ("phi3_longrope", {"rope_attention_factor": None}),
        ("olmo3", {"window": 8}),
        ("olmo3", {"rope_base_local": 500.0}),
        ("olmo3", {"global_every": 3}),
        ("gpt_oss", {"window": 8}),
        ("gpt_oss", {"activation": "silu"}),
        ("qwen3_moe", {"renormalize_experts": False}),
    ],
    ids=str,
)
@pytest.mark.full
def test_the_comparison_notices_a_wrong_constant(folder, name, change):
    model, params = from_pretrained(folder(name))
    defaults = {"rope_original_length": None, "rope_low_rotations": 1.0}
    if change.get("rope_kind") == "linear":
        change = change | defaults | {"rope_high_rotations": 32.0}
    wrong = DecoderModel(dataclasses.replace(model.config, **change))
    logits = jax.jit(wrong.apply, compiler_options=QUICK)(params, jnp.asarray(tokens()))
    wanted = np.array(GOLDEN["cases"][name]["logits"])
    off = np.abs(np.asarray(logits)[:, ::3] - wanted).max() / np.abs(wanted).max()
    assert off > 100 * EXACT


@pytest.mark.parametrize("name", CASES)
def test_the_configuration_is_written_as_it_was_read(name):
    family = family_of(CASES[name])
    config = family.config(CASES[name])
    assert family.config(family.values(config)) == config
    assert family_for(config, CASES[name]["model_type"]) is family


def test_a_mistral_with_biases_is_refused_as_transformers_would_leave_them_out():
    with pytest.raises(ModelFolderError, match="attention_bias = True: only False"):
        family_of(CASES["mistral"]).config({**CASES["mistral"], "attention_bias": True})
    config = family_of(CASES["mistral"]).config(CASES["mistral"])
    biased = dataclasses.replace(config, qkv_bias=True, output_bias=True)
    with pytest.raises(ModelFolderError, match="no family"):
        family_for(biased)
