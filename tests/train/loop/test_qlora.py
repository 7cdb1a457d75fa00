# SPDX-License-Identifier: Apache-2.0
"""``model.lora.quantize_base``: runs on weights of a folder in 4 or 8 bits."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from tessera.errors import CheckpointMismatchError, UnknownSettingError
from tessera.foundations.tree import named_leaves, nest
from tessera.mesh import Mesh
from tessera.train.checkpoints.export_checkpoint import open_checkpoint
from tessera.train.checkpoints.restore_arrays import Restoration
from tessera.train.checkpoints.saving import Checkpoints
from tessera.train.commands.export import main as export
from tessera.train.commands.generate import main as generate
from tessera.train.config.command_line import Composed, compose
from tessera.train.config.config_schema import settings_of_text
from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.data.cursor import Cursor
from tessera.train.loop.build_run import Run
from tessera.train.loop.main import configs_dir
from tessera.train.loop.trained_model import open_trained
from tessera.train.models import DecoderModel, from_pretrained
from tessera.train.models.decoder.quantized_kernel import dequantize, quantize
from tessera.train.models.weights import import_weights
from tessera.train.planner.workload import workload
from tests.train.loop.adapter_runs import batch_of, begun, on_host, stepped
from tests.train.models.published_folders import GEMMA3, gemma3_tensors, write_folder

# Two blocks of inputs in each matmul; three heads of the output's are two blocks.
SIZES = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 128}
VALUES = {**GEMMA3, **SIZES, "vocab_size": 264, "query_pre_attn_scalar": 32}
SMALL = (
    *("training.sequence_length=16", "training.clip_norm=null"),
    *("training.sample_length=0", "training.report=false"),
    *("data=stdlib", "data.tokenizer=bytes", "optimizer=sgd"),
    *("optimizer.learning_rate=0.1", "optimizer.warmup_steps=0", "recipe=none"),
    *("model.lora.rank=2", "model.lora.alpha=6", "model.lora.quantize_base=nf4"),
)
MESHES = {
    "one device": ("training.micro_batch_size=8",),
    "fsdp": ("model.mesh_shape=[[2],[fsdp]]", "training.micro_batch_size=4"),
    "tp": ("model.mesh_shape=[[2],[tp]]", "training.micro_batch_size=8"),
    "fsdp x tp": (
        *("model.mesh_shape=[[2,2],[fsdp,tp]]", "training.micro_batch_size=4"),
        *("training.remat=full", "training.mixed_precision=f32"),
    ),
    "zero": (
        *("model.mesh_shape=[[4],[dp]]", "training.micro_batch_size=1"),
        *("training.zero_stage=3", "training.gradient_accumulation_steps=2"),
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("published") / "tiny-gemma"
    return write_folder(path, gemma3_tensors(VALUES), VALUES)


def composed(folder: Path, *overrides: str) -> Composed:
    return compose([f"model={folder}", *SMALL, *overrides], configs_dir())


def run_of(folder: Path, *overrides: str) -> Run:
    config = composed(folder, *overrides).config
    return Run(config, mesh_of_shape(config.model.mesh_shape))


def base_of(params: Any, model: DecoderModel) -> dict[str, np.ndarray]:
    """The weights that codes and scales stand for, and the other parameters."""
    leaves = dict(on_host(params))
    shapes = {
        n: x.shape for n, x in named_leaves(model.dequantized().abstract()).items()
    }
    for name in sorted(model.quantized):
        if name.endswith("/codes"):
            module = name.removesuffix("/codes")
            parts = leaves.pop(name), leaves.pop(f"{module}/scales")
            weight = np.stack(
                [dequantize(*map(jnp.asarray, p)) for p in zip(*parts, strict=True)]
            )
            kernel = f"{module}/kernel"
            leaves[kernel] = weight.reshape(shapes[kernel])
    return leaves


# --- what is typed


@pytest.mark.slow(reason="it composes several configurations")
def test_settings_choose_what_the_base_is(folder: Path) -> None:
    both = composed(folder, "model.lora.quantize_base=int8")
    assert both.config.model.config.lora.quantize_base == "int8"
    assert settings_of_text(both.text) == both.config
    for words in (["recipe=qlora"], ["model.lora.quantize_base=nf4"]):
        lora = compose(
            [f"model={folder}", *words], configs_dir()
        ).config.model.config.lora
        assert (lora.quantize_base, lora.rank, lora.alpha) == ("nf4", 16, 32.0)
    for word, kind in (("model.lora.load_in_4bit", "nf4"), ("load_in_8bit", "int8")):
        with pytest.raises(UnknownSettingError, match=f"quantize_base={kind}"):
            composed(folder, f"{word}=true")


# --- weights


@pytest.mark.slow(reason="each mesh reads the folder")
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_every_mesh_has_the_codes_of_the_folder(folder: Path, kind: str) -> None:
    plain = named_leaves(from_pretrained(folder)[1])
    for mesh in ("one device", "fsdp", "tp", "zero"):
        run = run_of(folder, *MESHES[mesh], f"model.lora.quantize_base={kind}")
        run.check()
        params = import_weights(
            folder,
            run.model,
            run.mesh,
            layouts=run.step_config.zero.params,
            adapters=run.model.init(jax.random.key(0)),
        )
        found = on_host(params)
        for name in run.model.quantized:
            module, _, part = name.rpartition("/")
            outputs = found[f"{module}/scales"].shape[2:]
            for layer, weight in enumerate(plain[f"{module}/kernel"]):
                codes, scales = quantize(weight.reshape(-1, *outputs), kind)
                expected = codes if part == "codes" else scales
                np.testing.assert_array_equal(found[name][layer], expected)
        for name in found.keys() & plain.keys():
            np.testing.assert_array_equal(found[name], plain[name])


@pytest.fixture(scope="module")
def on_one_device(folder: Path) -> Any:
    return stepped(run_of(folder, *MESHES["one device"]))


@pytest.mark.slow(reason="it compiles a step")
def test_a_step_trains_the_adapters_alone(folder: Path, on_one_device: Any) -> None:
    (before, after), run = on_one_device, run_of(folder, *MESHES["one device"])
    for name, values in after.items():
        is_same = values.tobytes() == before[name].tobytes()
        assert is_same == (name not in run.model.adapters), name
    kept = jax.tree.leaves(run.abstract_state.params)
    assert sum(x.dtype == jnp.uint8 for x in kept) == 7


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["fsdp", "tp", "fsdp x tp", "zero"])
@pytest.mark.usefixtures("compiled_here")
def test_a_mesh_takes_the_step_of_one_device(
    folder: Path, on_one_device: Any, mesh: str
) -> None:
    run = run_of(folder, *MESHES[mesh])
    assert not run.compiled.collectives.unplanned
    _, after = stepped(run)
    for name, values in after.items():
        if name in run.model.quantized:
            np.testing.assert_array_equal(values, on_one_device[0][name])
        np.testing.assert_allclose(
            values, on_one_device[1][name], rtol=1e-5, atol=1e-6, err_msg=name
        )


@pytest.mark.full
def test_a_step_is_that_of_lora_on_the_dequantized_weights(
    folder: Path, on_one_device: Any
) -> None:
    run = run_of(folder, *MESHES["one device"])
    plain = run_of(folder, *MESHES["one device"], "model.lora.quantize_base=none")
    before, after = on_one_device
    state = begun(plain)
    weights = base_of(nest(before), run.model)
    params = {n: jnp.asarray(weights[n]) for n in named_leaves(state.params)}
    state = dataclasses.replace(state, params=nest(params))
    expected = on_host(plain.step(state, batch_of(plain))[0].params)
    for name in run.model.adapters:
        np.testing.assert_allclose(after[name], expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.full
@pytest.mark.usefixtures("compiled_here")
def test_devices_gather_codes_and_not_weights(folder: Path) -> None:
    gathered = {
        kind: run_of(folder, *MESHES["fsdp"], f"model.lora.quantize_base={kind}")
        .compiled.collectives.totals()[("fsdp",), "all-gather"]
        .nbytes
        for kind in ("none", "nf4")
    }
    # A weight of 4 bytes is one of 9 / 16; adapters and tables are gathered as before.
    assert gathered["nf4"] < 0.4 * gathered["none"]


# --- checkpoints and exports


def saved(folder: Path, path: Path, *overrides: str) -> Run:
    """A checkpoint of a run whose adapters are not zero."""
    both = composed(folder, *overrides)
    run = Run(both.config, mesh_of_shape(both.config.model.mesh_shape))
    with Checkpoints(run, path / "checkpoints", both.text) as checkpoints:
        checkpoints.save(4, begun(run), Cursor(16, {}))
    return run


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run on four devices, its model, and its parameters on one."""
    path = tmp_path_factory.mktemp("run")
    run = saved(folder, path, *MESHES["fsdp x tp"])
    model = DecoderModel(run.config.model.config)
    return path, model, open_trained(path).read(None)


@pytest.mark.slow(reason="its first use saves a checkpoint")
def test_a_checkpoint_resumes_on_another_mesh_alone(trained: Any, folder: Path) -> None:
    path, _, params = trained
    checkpoint = open_checkpoint(path)
    run = run_of(folder, *MESHES["zero"])
    state = Restoration(checkpoint.metadata, run).restore(checkpoint)
    jax.tree.map(np.testing.assert_array_equal, state.params, params)
    for kind in ("int8", "none"):
        other = run_of(folder, f"model.lora.quantize_base={kind}")
        with pytest.raises(CheckpointMismatchError) as caught:
            Restoration(checkpoint.metadata, other).check()
        assert "mlp/up/codes: saved uint8[3,2,32,128]" in caught.value.got


@pytest.mark.slow(reason="it exports three times")
def test_exports_are_dequantized_and_merged_or_the_adapters(
    trained: Any, folder: Path, tmp_path: Path
) -> None:
    path, model, params = trained
    expected = base_of(params, model)
    for name in sorted(model.adapters):
        if name.endswith("lora_a"):
            a, b = expected.pop(name), expected.pop(name.replace("lora_a", "lora_b"))
            kernel = name.replace("lora_a", "kernel")
            low = np.stack([3 * np.tensordot(*ab, 1) for ab in zip(a, b, strict=True)])
            expected[kernel] = expected[kernel] + low
    for kind, dtype in (("hf", "f32"), ("safetensors", "bf16")):
        out = tmp_path / kind
        words = [str(path), str(out), f"--format={kind}", f"--dtype={dtype}"]
        assert export(words) == 0
        plain = DecoderModel(from_pretrained(folder)[0].config)
        read = on_host(import_weights(out, plain))
        assert read.keys() == expected.keys()
        for name, weight in expected.items():
            rounded = weight if dtype == "f32" else weight.astype(jnp.bfloat16)
            np.testing.assert_allclose(read[name], rounded, rtol=1e-2, atol=1e-6)
    assert export([str(path), str(tmp_path / "peft"), "--format=peft"]) == 0
    values = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert values["base_model_name_or_path"] == str(folder)
    tensors = safetensors.numpy.load_file(tmp_path / "peft/adapter_model.safetensors")
    assert len(tensors) == 2 * 7 * 3
    assert {x.dtype.name for x in tensors.values()} == {"float32"}


@pytest.mark.full
def test_a_run_generates_with_what_it_was_trained_on(trained: Any, capsys: Any) -> None:
    path, model, params = trained
    assert generate([str(path), "a b", "--max-tokens=6", "--temperature=0"]) == 0
    text = capsys.readouterr().out
    plain, weights = model.dequantized(), nest(base_of(params, model))
    ids, logits = [256, *b"a b"], jax.jit(plain.apply)
    for last in range(3, 9):
        row = jnp.asarray([ids + [0] * (10 - len(ids))])
        ids.append(int(logits(weights, row)[0, last].argmax()))
        if ids[-1] == 256:
            break
    assert text == open_trained(path).tokenizer.decode(ids[4:]) + "\n"


@pytest.mark.full
def test_a_plan_counts_what_is_stored(folder: Path) -> None:
    run = run_of(folder)
    target = Mesh(("fsdp",), target="h100:1x1").target
    found, plain = (
        workload(one.config, target, ("none",))
        for one in (run, run_of(folder, "model.lora.quantize_base=none"))
    )
    stored = sum(each.itemsize * each.size for each in found.parameters)
    assert stored == sum(x.nbytes for x in named_leaves(begun(run).params).values())
    for ours, theirs in zip(found.products, plain.products, strict=True):
        assert dataclasses.replace(ours, source=0) == dataclasses.replace(
            theirs, source=0
        )
    assert found.trained() == plain.trained()
