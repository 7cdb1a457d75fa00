# SPDX-License-Identifier: Apache-2.0
"""``model.lora``: a run trains adapters beside weights that exist, on any mesh."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from tessera.analysis.flops import count
from tessera.errors import (
    CheckpointMismatchError,
    ModelFolderError,
    SettingConflictError,
    UnknownSettingError,
    WeightFileError,
)
from tessera.foundations.tree import named_leaves, nest
from tessera.train.checkpoints.export_checkpoint import open_checkpoint
from tessera.train.checkpoints.restore_arrays import Restoration
from tessera.train.checkpoints.saving import Checkpoints
from tessera.train.commands.export import main as export
from tessera.train.commands.generate import main as generate
from tessera.train.config.command_line import Composed, compose
from tessera.train.config.config_schema import settings_of_text
from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.config.recipes import RANDOM_WEIGHTS
from tessera.train.data.cursor import Cursor
from tessera.train.loop.build_run import Run
from tessera.train.loop.log_likelihood import log_likelihoods
from tessera.train.loop.main import configs_dir
from tessera.train.loop.trained_model import open_trained
from tessera.train.models import DecoderModel, from_pretrained
from tessera.train.models.decoder.config import LoraConfig
from tessera.train.models.weights import check_weights, export_weights, import_weights
from tests.train.loop.adapter_runs import begun, stepped
from tests.train.models.decoder.lora_reference import merged
from tests.train.models.published_folders import GEMMA3, gemma3_tensors, write_folder

VALUES = {**GEMMA3, "vocab_size": 264}
SMALL = (
    *("training.sequence_length=16", "training.clip_norm=null"),
    *(
        "data=synthetic",
        "data.synthetic.tokens=4000",
        "training.sample_length=0",
        "training.report=false",
    ),
    *("optimizer=sgd", "optimizer.learning_rate=0.1", "optimizer.warmup_steps=0"),
    *("model.lora.rank=2", "model.lora.alpha=6", "recipe=none"),
)
MESHES = {
    "one device": ("training.micro_batch_size=8",),
    "fsdp x tp": (
        *("model.mesh_shape=[[2,2],[fsdp,tp]]", "training.micro_batch_size=4"),
        *("training.remat=full", "training.zero_stage=3"),
    ),
    "pipeline": (
        *("model.mesh_shape=[[2,2],[pp,fsdp]]", "training.micro_batch_size=1"),
        "training.gradient_accumulation_steps=4",
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


def test_settings_have_two_levels(folder: Path) -> None:
    both = composed(folder, "model.lora.targets=[q_proj,o_proj]")
    expected = LoraConfig(rank=2, alpha=6.0, targets=("q_proj", "o_proj"))
    assert both.config.model.config.lora == expected
    assert settings_of_text(both.text) == both.config
    with pytest.raises(UnknownSettingError, match=r"model\.lora_rank"):
        composed(folder, "model.lora_rank=2")
    with pytest.raises(SettingConflictError, match=r"model\.lora\.alpha"):
        composed(folder, "model.lora.rank=0")


@pytest.mark.full
def test_the_base_is_of_the_folder_and_adapters_begin_as_nothing(folder: Path) -> None:
    run = run_of(folder)
    run.check()
    plain, expected = from_pretrained(folder)
    initial = run.model.init(jax.random.key(0))
    params = import_weights(folder, run.model, adapters=initial)
    tokens = np.arange(24, dtype=np.int32).reshape(2, 12)
    np.testing.assert_array_equal(
        run.model.apply(params, tokens), plain.apply(expected, tokens)
    )
    for name, leaf in named_leaves(expected).items():
        np.testing.assert_array_equal(named_leaves(params)[name], leaf)


def test_missing_weights_are_still_missing(tmp_path: Path) -> None:
    tensors = gemma3_tensors(VALUES)
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    damaged = write_folder(tmp_path / "damaged", tensors, VALUES)
    with pytest.raises(WeightFileError, match=r"layers\.1\.self_attn\.q_proj"):
        run_of(damaged).check()


@pytest.fixture(scope="module")
def on_four_devices(folder: Path) -> tuple[Any, Any]:
    return stepped(run_of(folder, *MESHES["fsdp x tp"]))


@pytest.fixture(scope="module")
def on_one_device(folder: Path) -> Any:
    return stepped(run_of(folder, *MESHES["one device"]))[1]


@pytest.mark.full
def test_a_step_trains_the_adapters_alone(folder: Path, on_four_devices: Any) -> None:
    before, after = on_four_devices
    adapters = run_of(folder).model.adapters
    for name, values in after.items():
        if name in adapters:
            assert (values != before[name]).any(), name
        else:
            np.testing.assert_array_equal(values, before[name], name)


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["fsdp x tp", "pipeline"])
@pytest.mark.usefixtures("compiled_here")
def test_a_mesh_takes_the_step_of_one_device(
    folder: Path, on_four_devices: Any, on_one_device: Any, mesh: str
) -> None:
    run = run_of(folder, *MESHES[mesh])
    assert not run.compiled.collectives.unplanned
    _, after = on_four_devices if mesh == "fsdp x tp" else stepped(run)
    for name, values in after.items():
        np.testing.assert_allclose(values, on_one_device[name], rtol=1e-5, atol=1e-6)


def flops(run: Run) -> int:
    traced = run.step.trace(run.abstract_state, run.abstract_batch)
    return count(traced.graph.program).total


@pytest.mark.full
def test_nothing_is_kept_or_computed_for_the_base(folder: Path) -> None:
    momentum = (*MESHES["one device"], "optimizer.momentum=0.9")
    run = run_of(folder, *momentum)
    kept = {
        name.partition("trace/")[2]
        for name, leaf in named_leaves(run.abstract_state.optimizer).items()
        if leaf.shape
    }
    assert kept == run.model.adapters
    whole = run_of(folder, *momentum, "training.trainable=[*]")
    # A frozen weight needs two of the three matmuls of a trained one.
    assert flops(run) < 0.8 * flops(whole)


@pytest.mark.full
def test_random_weights_below_adapters_are_a_warning(folder: Path) -> None:
    without = run_of(folder, "training.init_from=null")
    assert without.warnings() == [RANDOM_WEIGHTS]
    assert RANDOM_WEIGHTS not in run_of(folder).warnings()


def saved(folder: Path, path: Path, *overrides: str) -> Run:
    """A checkpoint of a run whose adapters are not zero."""
    both = composed(folder, *overrides)
    run = Run(both.config, mesh_of_shape(both.config.model.mesh_shape))
    with Checkpoints(run, path / "checkpoints", both.text) as checkpoints:
        checkpoints.save(4, begun(run), Cursor(16, {}))
    return run


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of text that may be used, its parameters, and its model."""
    path = tmp_path_factory.mktemp("run")
    # The size of a synthetic corpus is its default.
    text = "data=stdlib", "data.tokenizer=bytes", "data.synthetic.tokens=2000000"
    run = saved(folder, path, *text, *MESHES["fsdp x tp"])
    model = DecoderModel(run.config.model.config)
    return path, model, open_trained(path).read(None)


@pytest.mark.full
def test_a_checkpoint_resumes_on_another_mesh(trained: Any, folder: Path) -> None:
    path, _, params = trained
    run = run_of(folder, *MESHES["pipeline"])
    checkpoint = open_checkpoint(path)
    state = Restoration(checkpoint.metadata, run).restore(checkpoint)
    jax.tree.map(np.testing.assert_array_equal, run.model.plain(state.params), params)


@pytest.mark.slow(reason="its first case compiles what the others share")
@pytest.mark.parametrize(
    ("change", "got"),
    [
        ("model.lora.rank=3", "lora_a"),
        ("model.lora.targets=[q_proj]", "lora_b"),
        # No shape shows it, and the model would be another one.
        ("model.lora.alpha=5", "saved 3, this run 2.5"),
    ],
)
def test_other_adapters_do_not_resume(
    trained: Any, folder: Path, change: str, got: str
) -> None:
    metadata = open_checkpoint(trained[0]).metadata
    with pytest.raises(CheckpointMismatchError) as caught:
        Restoration(metadata, run_of(folder, change)).check()
    assert got in caught.value.got


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("kind", ["safetensors", "hf"])
def test_an_export_merges_adapters(
    trained: Any, tmp_path: Path, kind: str, dtype: str
) -> None:
    path, model, params = trained
    plain, expected = merged(model, params)
    out = tmp_path / "out"
    words = [str(path), str(out), f"--format={kind}", f"--dtype={dtype}"]
    assert export(words) == 0
    read = named_leaves(import_weights(out, plain))
    for name, weight in named_leaves(expected).items():
        got = np.asarray(read[name])
        if dtype == "f32":
            np.testing.assert_allclose(got, weight, rtol=0, atol=1e-6, err_msg=name)
        else:
            # Rounded once, from float32: not the sum of rounded numbers.
            rounded = np.asarray(weight.astype(jnp.bfloat16).astype(jnp.float32))
            wrong = (got != rounded).mean()
            assert wrong < 0.01, name
    weight = "decoder/attention/query/kernel"
    assert np.abs(read[weight] - named_leaves(params)[weight]).max() > 0.01


def test_python_exports_merge_too(trained: Any, tmp_path: Path) -> None:
    _, model, params = trained
    plain, expected = merged(model, params)
    export_weights(params, tmp_path / "w.safetensors", model=model)
    check_weights(tmp_path / "w.safetensors", plain)
    read = import_weights(tmp_path / "w.safetensors", plain)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), read, expected
    )


def test_adapters_apart_have_the_names_and_shapes_of_peft(
    trained: Any, folder: Path, tmp_path: Path
) -> None:
    path, model, params = trained
    out = tmp_path / "adapters"
    assert export([str(path), str(out), "--format=peft"]) == 0
    values = json.loads((out / "adapter_config.json").read_text())
    assert (values["r"], values["lora_alpha"], values["peft_type"]) == (2, 6, "LORA")
    assert values["base_model_name_or_path"] == str(folder)
    assert sorted(values["target_modules"]) == sorted(model.config.projections)
    tensors = safetensors.numpy.load_file(out / "adapter_model.safetensors")
    layers = model.config.num_layers
    assert len(tensors) == 2 * 7 * layers
    module = "base_model.model.model.layers.1.self_attn.o_proj"
    a, b = (tensors[f"{module}.lora_{x}.weight"] for x in "AB")
    assert a.shape == (2, 24)
    assert b.shape == (16, 2)
    output = params["decoder"]["attention"]["output"]
    np.testing.assert_array_equal(a, output["lora_a"][1].reshape(24, 2).T)
    np.testing.assert_array_equal(b, output["lora_b"][1].T)


@pytest.mark.full
@pytest.mark.parametrize(
    ("overrides", "got"),
    [
        (["training.trainable=[*lora*,*norm*]"], "has trained more than its adapters"),
        (["model.lora.rank=0", "model.lora.alpha=null"], "no adapters to write"),
    ],
)
def test_what_peft_cannot_hold_is_refused(
    folder: Path, tmp_path: Path, overrides: list[str], got: str, capsys: Any
) -> None:
    saved(folder, tmp_path, *overrides)
    assert export([str(tmp_path), str(tmp_path / "out"), "--format=peft"]) == 2
    assert got in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_adapters_of_a_part_of_a_larger_model_are_refused(
    tmp_path: Path, capsys: Any
) -> None:
    tensors = {f"language_model.{k}": v for k, v in gemma3_tensors(VALUES).items()}
    values = {"model_type": "gemma3", "text_config": VALUES, "vision_config": {}}
    base = write_folder(tmp_path / "base", tensors, values)
    saved(base, tmp_path)
    assert export([str(tmp_path), str(tmp_path / "out"), "--format=peft"]) == 2
    assert "model_type = 'gemma3', not 'gemma3_text'" in capsys.readouterr().err
    assert export([str(tmp_path), str(tmp_path / "out"), "--format=hf"]) == 0


@pytest.mark.full
def test_a_run_generates_with_its_adapters(trained: Any, capsys: Any) -> None:
    path, model, params = trained
    words = ["a b", "--max-tokens=8", "--temperature=0"]
    assert generate([str(path), *words]) == 0
    text = capsys.readouterr().out
    ids, logits = [256, *b"a b"], jax.jit(model.apply)
    for last in range(3, 11):
        # What is after a token does not change its logits.
        row = jnp.asarray([ids + [0] * (12 - len(ids))])
        ids.append(int(logits(params, row)[0, last].argmax()))
        if ids[-1] == 256:
            break
    assert text == open_trained(path).tokenizer.decode(ids[4:]) + "\n"
    base = dataclasses.replace(model.config, lora=LoraConfig())
    leaves = named_leaves(params)
    plain = nest({n: x for n, x in leaves.items() if n not in model.adapters})
    tokens = jnp.asarray([ids])
    other = DecoderModel(base).apply(plain, tokens)
    assert np.abs(other - model.apply(params, tokens)).max() > 0.1


@pytest.mark.full
def test_a_run_is_evaluated_with_its_adapters(trained: Any) -> None:
    path, model, params = trained
    pairs = [([256], [*b"to be or not to be"])]
    opened = open_trained(path)
    ((found, _),) = log_likelihoods(
        opened.model, opened.read(None), pairs, max_length=32
    )
    ((expected, _),) = log_likelihoods(*merged(model, params), pairs, max_length=32)
    assert found == pytest.approx(expected, rel=1e-4)


def test_model_folders_are_not_changed(folder: Path) -> None:
    assert from_pretrained(folder)[0].config.lora == LoraConfig()
    with pytest.raises(ModelFolderError, match="window"):
        run_of(folder, "model.window=9").check()
