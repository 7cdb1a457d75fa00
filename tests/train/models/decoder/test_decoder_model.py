# SPDX-License-Identifier: Apache-2.0
"""A model on meshes: layouts, notes, errors, equal results, and its collectives."""

import dataclasses
import math
import re
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tessera.errors import (
    AbstractMeshError,
    HeadCountError,
    LogicalAxisError,
    ShardDivisibilityError,
)
from tessera.mesh import Mesh
from tessera.shard import ShardSpec
from tessera.train.models import (
    DecoderConfig,
    DecoderModel,
    Placement,
    config_of,
)

CONFIG = DecoderConfig(
    vocab_size=512,
    d_model=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_dim=16,
    window=3,
    query_pre_attn_scalar=4,
    global_every=2,
)
MODEL = DecoderModel(CONFIG)
# Half the time to compile; what XLA partitions is the same.
QUICK = {"xla_backend_optimization_level": 0}
TOKENS = np.random.default_rng(0).integers(0, 512, (8, 8)).astype(np.int32)


def mesh_of(**sizes: int) -> Mesh:
    """A mesh with these axes, of as many devices as they say."""
    devices = range(math.prod(sizes.values()))
    return Mesh(tuple(sizes), devices=devices, shape=tuple(sizes.values()))


def flat(tree: Any, leaf: type) -> dict[str, Any]:
    found = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda node: isinstance(node, leaf)
    )
    return {jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in found}


@pytest.fixture(scope="module")
def params() -> Any:
    return MODEL.init(jax.random.key(0))


# --- parameters


def test_every_parameter_names_each_of_its_dims() -> None:
    names = {
        path: spec.mesh_axes for path, spec in flat(MODEL.specs(), ShardSpec).items()
    }
    assert names == {
        "embedding": ("vocab", "table"),
        "decoder/attention/query/kernel": ("layers", "embed", "heads", "head_dim"),
        "decoder/attention/key/kernel": ("layers", "embed", "kv_heads", "head_dim"),
        "decoder/attention/value/kernel": ("layers", "embed", "kv_heads", "head_dim"),
        "decoder/attention/output/kernel": ("layers", "heads", "head_dim", "embed"),
        "decoder/attention/query_norm/scale": ("layers", "head_dim"),
        "decoder/attention/key_norm/scale": ("layers", "head_dim"),
        "decoder/mlp/gate/kernel": ("layers", "embed", "mlp"),
        "decoder/mlp/up/kernel": ("layers", "embed", "mlp"),
        "decoder/mlp/down/kernel": ("layers", "mlp", "embed"),
        "decoder/pre_attention_norm/scale": ("layers", "norm"),
        "decoder/post_attention_norm/scale": ("layers", "norm"),
        "decoder/pre_mlp_norm/scale": ("layers", "norm"),
        "decoder/post_mlp_norm/scale": ("layers", "norm"),
        "final_norm/scale": ("norm",),
    }
    assert flat(MODEL.abstract(), jax.ShapeDtypeStruct).keys() == names.keys()


def test_weights_are_split_over_fsdp_and_tp() -> None:
    layouts = flat(MODEL.layouts(mesh_of(dp=2, fsdp=2, tp=2)), PartitionSpec)
    assert {path: tuple(spec) for path, spec in layouts.items() if spec} == {
        "embedding": ("tp", "fsdp"),
        "decoder/attention/query/kernel": (None, "fsdp", "tp"),
        "decoder/attention/key/kernel": (None, "fsdp", "tp"),
        "decoder/attention/value/kernel": (None, "fsdp", "tp"),
        "decoder/attention/output/kernel": (None, "tp", None, "fsdp"),
        "decoder/mlp/gate/kernel": (None, "fsdp", "tp"),
        "decoder/mlp/up/kernel": (None, "fsdp", "tp"),
        "decoder/mlp/down/kernel": (None, "tp", "fsdp"),
    }
    assert all(path.endswith("scale") for path, spec in layouts.items() if not spec)


def test_an_axis_that_the_mesh_lacks_splits_nothing() -> None:
    layouts = flat(MODEL.layouts(mesh_of(dp=4)), PartitionSpec)
    assert not any(layouts.values())


def test_init_gives_fan_in_scaled_weights(params: Any) -> None:
    attention, mlp = params["decoder"]["attention"], params["decoder"]["mlp"]
    for kernel, fan_in in (
        (params["embedding"], 256),
        (attention["query"]["kernel"], 256),
        (attention["output"]["kernel"], 4 * 4),
        (mlp["up"]["kernel"], 256),
        (mlp["down"]["kernel"], 16),
    ):
        assert np.std(kernel) * math.sqrt(fan_in) == pytest.approx(1, rel=0.03)
    assert not np.any(params["decoder"]["pre_mlp_norm"]["scale"])


@pytest.mark.full
def test_init_gives_unit_logits(params: Any) -> None:
    logits = jax.jit(MODEL.apply)(params, TOKENS)
    assert np.std(logits) == pytest.approx(1, rel=0.1)


@pytest.mark.full
def test_init_gives_the_same_values_on_every_mesh(params: Any) -> None:
    mesh = mesh_of(fsdp=2, tp=4)
    sharded = MODEL.init(jax.random.key(0), mesh)
    # A block of another shape may round otherwise in the last bit.
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), sharded, params)
    layouts = jax.tree.map(lambda leaf: leaf.sharding.spec, sharded)
    assert flat(layouts, PartitionSpec) == flat(MODEL.layouts(mesh), PartitionSpec)


def test_a_mesh_that_is_not_here_can_be_planned_but_not_filled() -> None:
    model, mesh = DecoderModel(config_of("gemma3_1b")), mesh_of(dp=36, tp=2)
    assert model.layouts(mesh)["embedding"] == PartitionSpec("tp")
    with pytest.raises(AbstractMeshError):
        model.init(jax.random.key(0), mesh)


# --- notes and errors


def test_notes_say_what_stays_whole() -> None:
    model = DecoderModel(config_of("tiny"), sequence_parallel=True)
    assert model.layout_notes(mesh_of(fsdp=2, tp=4)) == [
        "num_kv_heads 2 < tp 4: the key and value projections are replicated over "
        "'tp', and each device uses the one head that its 1 query head(s) attend with",
    ]
    assert model.layout_notes(mesh_of(dp=2)) == [
        "sequence_parallel changes nothing: 'tp' has one device"
    ]
    assert DecoderModel(config_of("tiny")).layout_notes(mesh_of(dp=2, tp=2)) == []


def test_copied_key_value_heads_are_whole_in_the_layout() -> None:
    layouts = MODEL.layouts(mesh_of(fsdp=2, tp=4))
    attention = layouts["decoder"]["attention"]
    assert attention["key"]["kernel"] == PartitionSpec(None, "fsdp")
    assert attention["query"]["kernel"] == PartitionSpec(None, "fsdp", "tp")


def test_heads_that_tp_does_not_divide() -> None:
    with pytest.raises(HeadCountError) as caught:
        DecoderModel(config_of("gemma3_4b")).layouts(mesh_of(tp=6))
    assert str(caught.value) == (
        "[T402] 8 attention heads cannot be divided over mesh axis 'tp'\n"
        "  got: num_heads = 8, num_kv_heads = 4, axis size 6, remainder 2\n"
        "  fix: use tp 4 or 8\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T402.html"
    )
    with pytest.raises(HeadCountError) as caught:
        DecoderModel(config_of("gemma3_1b")).layouts(mesh_of(dp=8, tp=9))
    assert str(caught.value) == (
        "[T402] 4 attention heads cannot be divided over mesh axis 'tp'\n"
        "  got: num_heads = 4, num_kv_heads = 1, axis size 9, remainder 4\n"
        "  fix: use tp 4, or num_heads 9\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T402.html"
    )


def test_key_value_heads_that_neither_divide_nor_copy() -> None:
    model = DecoderModel(dataclasses.replace(CONFIG, num_heads=12, num_kv_heads=6))
    with pytest.raises(HeadCountError) as caught:
        model.layouts(mesh_of(tp=4))
    assert str(caught.value) == (
        "[T402] 6 key/value heads can be neither divided over mesh axis 'tp' nor "
        "copied along it\n"
        "  got: num_heads = 12, num_kv_heads = 6, axis size 4: neither of 6 and 4 "
        "divides the other\n"
        "  fix: use tp 3 or 6, or num_kv_heads 4 or 12\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T402.html"
    )


def test_every_parameter_that_does_not_divide_is_named() -> None:
    model = DecoderModel(dataclasses.replace(CONFIG, mlp_dim=18))
    with pytest.raises(ShardDivisibilityError) as caught:
        model.layouts(mesh_of(tp=4))
    assert str(caught.value) == (
        "[T201] parameter 'decoder/mlp/down/kernel' cannot be split evenly over mesh "
        "axes ('tp',)\n"
        "  got: shape (2, 18, 256), dim 1 = 18, axis size 4\n"
        "  got: also parameter 'decoder/mlp/gate/kernel' cannot be split evenly over "
        "mesh axes ('tp',): shape (2, 256, 18), dim 2 = 18, axis size 4\n"
        "  got: also parameter 'decoder/mlp/up/kernel' cannot be split evenly over "
        "mesh axes ('tp',): shape (2, 256, 18), dim 2 = 18, axis size 4\n"
        "  fix: use 16 or 20, or drop 'tp' from the spec\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T201.html"
    )


def test_a_width_that_fsdp_does_not_divide() -> None:
    with pytest.raises(ShardDivisibilityError, match="dim 1 = 256, axis size 3"):
        MODEL.layouts(mesh_of(fsdp=3))


def test_a_batch_that_the_data_axes_do_not_divide() -> None:
    with pytest.raises(ShardDivisibilityError) as caught:
        jax.eval_shape(
            lambda p: MODEL.apply(
                p, jnp.asarray(TOKENS[:6]), mesh=mesh_of(dp=2, fsdp=2)
            ),
            MODEL.abstract(),
        )
    assert str(caught.value) == (
        "[T201] tokens cannot be split evenly over mesh axes ('dp', 'fsdp')\n"
        "  got: shape (6, 8), dim 0 = 6, axis size 4 (dp 2 × fsdp 2)\n"
        "  fix: use 4 or 8, or drop 'dp' or 'fsdp' from the spec\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T201.html"
    )


def test_a_logical_name_without_a_rule() -> None:
    with pytest.raises(LogicalAxisError) as caught:
        Placement(mesh_of(tp=2)).axes("head")
    assert str(caught.value) == (
        "[T404] there is no rule for a dim called 'head'\n"
        "  fix: did you mean 'heads'? Known: 'batch', 'context', 'sequence', 'vocab', "
        "'embed', 'table', 'wide_table', 'words', 'columns', 'heads', 'kv_heads', "
        "'mlp', 'experts', 'router', 'head_dim', 'layers', 'lora_rank', 'stages', "
        "'norm'\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T404.html"
    )


# --- results


def loss(model: DecoderModel, mesh: Mesh | None, params: Any, tokens: jax.Array) -> Any:
    logits = model.apply(params, tokens, mesh=mesh)
    scores = jax.nn.log_softmax(logits)[:, :-1]
    right = jax.nn.one_hot(tokens[:, 1:], CONFIG.vocab_size)
    return -(scores * right).sum(-1).mean(), logits


@cache
def compiled(model: DecoderModel, mesh: Mesh | None) -> Any:
    """Loss, logits and gradients, each array in its declared layout."""
    step = jax.value_and_grad(lambda p, t: loss(model, mesh, p, t), has_aux=True)
    if mesh is None:
        return jax.jit(step, compiler_options=QUICK)
    layouts = jax.tree.map(lambda s: NamedSharding(mesh.jax, s), model.layouts(mesh))
    batch = NamedSharding(
        mesh.jax, PartitionSpec(model.place(mesh).axes("batch") or None)
    )
    return jax.jit(
        step,
        in_shardings=(layouts, batch),
        out_shardings=(None, layouts),
        compiler_options=QUICK,
    )


# An axis of one device, and all axes in another order; copied heads are in make test.
MESHES = [{"fsdp": 4, "tp": 1}, {"tp": 2, "dp": 2, "fsdp": 2}]


@pytest.mark.slow(reason="the one composition of axes of the decoder")
@pytest.mark.parametrize(
    ("sizes", "sequence_parallel"),
    [
        ({"fsdp": 2, "tp": 4}, True),
        *(pytest.param(sizes, False, marks=pytest.mark.full) for sizes in MESHES),
    ],
    ids=str,
)
def test_logits_and_gradients_are_those_of_one_device(
    params: Any, sizes: dict[str, int], sequence_parallel: bool
) -> None:
    model = DecoderModel(CONFIG, sequence_parallel=sequence_parallel)
    results = compiled(model, mesh_of(**sizes))(params, TOKENS)
    expected = compiled(MODEL, None)(params, TOKENS)

    def assert_close(actual: jax.Array, wanted: jax.Array) -> None:
        atol = 1e-5 * np.abs(wanted).max()
        np.testing.assert_allclose(actual, wanted, rtol=0, atol=atol)

    jax.tree.map(assert_close, results, expected)


# --- collectives


def block_collectives(model: DecoderModel, mesh: Mesh) -> list[str]:
    """Kinds of the collectives in the body of the scan of a compiled forward."""
    layouts = jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh.compile_mesh, spec)
        ),
        model.abstract(),
        model.layouts(mesh),
    )
    forward = jax.jit(lambda p, t: model.apply(p, t, mesh=mesh))
    text = forward.lower(layouts, TOKENS).compile(QUICK).as_text()
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf" ({kinds})(?:-start)?\(.*op_name=\"([^\"]*)\"", text)
    return sorted(kind for kind, name in found if "/while/body/" in name)


@pytest.mark.slow(reason="it compiles several programs")
def test_a_block_half_has_one_all_reduce_over_tp() -> None:
    assert block_collectives(MODEL, mesh_of(tp=2)) == ["all-reduce"] * 2
    # Copied key/value heads cost nothing in the forward.
    assert block_collectives(MODEL, mesh_of(tp=4)) == ["all-reduce"] * 2


@pytest.mark.full
def test_fsdp_gathers_each_weight_of_a_block_once() -> None:
    assert block_collectives(MODEL, mesh_of(fsdp=2)) == ["all-gather"] * 7


def test_data_parallel_blocks_do_not_communicate() -> None:
    assert block_collectives(MODEL, mesh_of(dp=2)) == []


def test_sequence_parallel_blocks_gather_before_each_half() -> None:
    model = DecoderModel(CONFIG, sequence_parallel=True)
    kinds = block_collectives(model, mesh_of(tp=2))
    # XLA on CPU writes a reduce-scatter as an all-reduce and a slice.
    kinds = [kind.replace("reduce-scatter", "all-reduce") for kind in kinds]
    assert kinds == ["all-gather"] * 2 + ["all-reduce"] * 2
