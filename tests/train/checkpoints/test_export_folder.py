# SPDX-License-Identifier: Apache-2.0
"""A run on any mesh becomes a folder for Transformers, with the run's tokenizer."""

import json

import jax
import numpy as np
import pytest

from tessera.train.checkpoints.export_checkpoint import export_checkpoint
from tessera.train.checkpoints.saving import Checkpoints
from tessera.train.checkpoints.tokenizer_files import tokenizer_files
from tessera.train.commands.export import main
from tessera.train.config.command_line import compose
from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.data.cursor import Cursor
from tessera.train.data.data_config import DataConfig
from tessera.train.loop.build_run import Run
from tessera.train.loop.main import configs_dir
from tessera.train.models import from_pretrained
from tessera.train.models.safetensors import SafetensorsFile

SMALL = (
    *("model.vocab_size=260", "model.d_model=16", "model.num_layers=3"),
    *("model.num_heads=4", "model.num_kv_heads=2", "model.head_dim=4"),
    *("model.mlp_dim=32", "model.window=8", "model.query_pre_attn_scalar=4"),
    *("training.sequence_length=16", "training.micro_batch_size=2"),
    *("model.global_every=2", "training.gradient_accumulation_steps=2"),
)


def save_run(folder, filled, *overrides, published=None):
    composed = compose([*SMALL, *overrides], configs_dir())
    run = Run(composed.config, mesh_of_shape(composed.config.model.mesh_shape))
    state = filled(run)
    with Checkpoints(
        run, folder / "checkpoints", composed.text, published=published or {}
    ) as checkpoints:
        checkpoints.save(4, state, Cursor(16, {}))
    return run.model.plain(state.params)


@pytest.mark.slow(reason="its first case compiles what the others share")
@pytest.mark.parametrize(
    "mesh",
    [
        "[[2,2],[pp,fsdp]]",
        *(
            pytest.param(mesh, marks=pytest.mark.full)
            for mesh in ("[[1],[fsdp]]", "[[2,2],[fsdp,tp]]", "[[2],[cp]]")
        ),
    ],
)
def test_a_run_on_any_mesh_is_the_same_folder(filled, tmp_path, mesh, capsys):
    params = save_run(tmp_path, filled, f"model.mesh_shape={mesh}")
    assert main([str(tmp_path), str(tmp_path / "hf"), "--format=hf"]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'hf'}: ")
    _, again = from_pretrained(tmp_path / "hf")
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_the_tokens_that_begin_and_end_documents_are_named(filled, tmp_path):
    save_run(tmp_path, filled)
    export_checkpoint(tmp_path, tmp_path / "hf", kind="hf", dtype="bf16")
    ids = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert ids == {"bos_token_id": 256, "eos_token_id": 256, "pad_token_id": None}
    values = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert values["dtype"] == "bfloat16"
    assert values["pad_token_id"] is None


@pytest.mark.parametrize(
    ("options", "dtype", "said"),
    [
        ([], "bfloat16", "bfloat16 as the folder that the run began with; --dtype=f32"),
        (["--dtype=float32"], "float32", "float32\n"),
    ],
)
def test_weights_have_the_dtype_of_the_folder_that_the_run_began_with(
    filled, tmp_path, capsys, options, dtype, said
):
    save_run(tmp_path, filled, published={"config.json": '{"torch_dtype": "bfloat16"}'})
    assert main([str(tmp_path), str(tmp_path / "hf"), "--format=hf", *options]) == 0
    assert f" KiB, {said}" in capsys.readouterr().out
    values = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert values["dtype"] == dtype
    dtypes = SafetensorsFile(tmp_path / "hf" / "model.safetensors").arrays.values()
    assert {name for name, _ in dtypes} == {"BF16" if dtype == "bfloat16" else "F32"}


def test_mistakes_are_found_before_anything_is_written(filled, tmp_path, capsys):
    save_run(tmp_path, filled, "model=moe_tiny", "model.num_experts=2")
    out = tmp_path / "hf"
    assert main([str(tmp_path), str(out), "--format=hf"]) == 2
    assert "[T806] no family" in capsys.readouterr().err
    out.mkdir()
    (out / "mine").touch()
    assert main([str(tmp_path), str(out), "--format=hf"]) == 2
    assert [path.name for path in out.iterdir()] == ["mine"]


@pytest.fixture
def tokenizer(tmp_path):
    library = pytest.importorskip("tokenizers")
    model = library.models.WordLevel({"<bos>": 0, "a": 1}, unk_token="a")
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    library.Tokenizer(model).save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_a_tokenizer_is_copied_with_what_stands_beside_it(tokenizer):
    beside = tokenizer.with_name("generation_config.json")
    beside.write_text('{"eos_token_id": [1, 106]}')
    tokenizer.with_name("notes.txt").touch()
    tokenizer.with_name("merges.txt").touch()
    template = tokenizer.with_name("additional_chat_templates") / "tools.jinja"
    template.parent.mkdir()
    template.touch()
    tokens, files = tokenizer_files(
        DataConfig(name="text", path="x", tokenizer=str(tokenizer))
    )
    assert tokens == {"bos_token_id": 0, "eos_token_id": 0}
    assert files == {
        "tokenizer.json": tokenizer,
        "generation_config.json": beside,
        "merges.txt": tokenizer.with_name("merges.txt"),
        "additional_chat_templates/tools.jinja": template,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
    }


def test_a_template_for_tools_is_exported(tokenizer, filled, tmp_path):
    path = tokenizer.parent / "additional_chat_templates/tool_use.jinja"
    path.parent.mkdir()
    path.write_text("tools")
    save_run(tmp_path / "run", filled, f"data.tokenizer={tokenizer.parent}")
    export_checkpoint(tmp_path / "run", tmp_path / "hf", kind="hf")
    written = tmp_path / "hf" / path.relative_to(tokenizer.parent)
    assert written.read_text() == "tools"


def test_a_folder_is_the_tokenizer_in_it(tokenizer):
    by_file, by_folder = (
        tokenizer_files(DataConfig(name="text", path="x", tokenizer=str(path)))
        for path in (tokenizer, tokenizer.parent)
    )
    assert by_folder == by_file
    assert by_folder[1]["tokenizer.json"] == tokenizer


def test_a_tokenizer_of_another_name_stands_alone(tokenizer):
    tokenizer.with_name("generation_config.json").touch()
    mine = tokenizer.rename(tokenizer.with_name("mine.json"))
    _, files = tokenizer_files(DataConfig(name="text", path="x", tokenizer=str(mine)))
    assert files.keys() == {"tokenizer.json", "tokenizer_config.json"}
    assert files["tokenizer.json"] == mine
