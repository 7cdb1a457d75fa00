# SPDX-License-Identifier: Apache-2.0
"""What was trained is opened again: by ``tessera generate``, on any mesh."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers

from tessera.errors import (
    CheckpointNotFoundError,
    MeshShapeError,
    ModelFolderError,
    TokenizerError,
)
from tessera.train.checkpoints.saving import Checkpoints
from tessera.train.commands.generate import _lines, main
from tessera.train.config.command_line import Composed, compose
from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.data.chat_template import Conversation
from tessera.train.data.cursor import Cursor
from tessera.train.loop.build_run import Run
from tessera.train.loop.main import configs_dir
from tessera.train.loop.train_state import init_state
from tessera.train.loop.trained_model import mesh_of, open_trained
from tessera.train.rollouts import generate
from tests.train.data import chat_folders
from tests.train.models.published_folders import GEMMA3, gemma3_tensors, write_folder

SMALL = (
    *("model.vocab_size=260", "model.d_model=16", "model.num_layers=3"),
    *("model.num_heads=4", "model.num_kv_heads=2", "model.head_dim=4"),
    *("model.mlp_dim=32", "model.window=8", "model.query_pre_attn_scalar=4"),
    *("training.sequence_length=16", "training.micro_batch_size=2"),
    *("model.global_every=2", "training.gradient_accumulation_steps=2"),
)
MESH = "[[1,4],[fsdp,tp]]"


def save_run(folder: Path, *overrides: str) -> Run:
    return save(compose([*SMALL, *overrides], configs_dir()), folder)


def save(composed: Composed, folder: Path) -> Run:
    run = Run(composed.config, mesh_of_shape(composed.config.model.mesh_shape))
    state = init_state(
        run.model, run.step_config.optimizer, jax.random.key(0), run.mesh
    )
    text, published = composed.text, composed.published
    with Checkpoints(
        run, folder / "checkpoints", text, published=published
    ) as checkpoints:
        checkpoints.save(4, state, Cursor(16, {}))
    return run


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    save_run(folder)
    return folder


def written(capsys: Any, *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


@pytest.mark.full
def test_parameters_are_read_from_a_run_on_any_mesh(tmp_path: Path) -> None:
    run = save_run(tmp_path, "model.mesh_shape=[[2,2,2],[pp,fsdp,tp]]")
    expected = run.model.plain(run.model.init(jax.random.key(0)))
    trained = open_trained(tmp_path)
    for read in (trained.read(None), trained.read(mesh_of(MESH))):
        jax.tree.map(np.testing.assert_array_equal, read, expected)
    assert trained.prefix == trained.stop_tokens == (256,)


@pytest.mark.slow(reason="it trains a model and continues a text")
def test_one_prompt_is_continued_as_text(run_folder: Path, capsys: Any) -> None:
    arguments = (str(run_folder), "hé", "--max-tokens=8", "--temperature=0.5")
    text = written(capsys, *arguments)
    trained = open_trained(run_folder)
    prompt = [256, *"hé".encode()]
    ids = generate(
        trained.model,
        trained.read(None),
        [prompt],
        8,
        jax.random.key(0),
        temperature=0.5,
        stop_tokens=[256],
    )[0, len(prompt) :]
    assert text == trained.tokenizer.decode(ids) + "\n"


@pytest.mark.full
def test_the_text_depends_on_the_seed_and_not_on_the_mesh(
    run_folder: Path, capsys: Any
) -> None:
    arguments = (str(run_folder), "hé", "--max-tokens=8", "--temperature=0.5")
    text = written(capsys, *arguments)
    assert written(capsys, *arguments, f"--mesh={MESH}") == text
    assert written(capsys, *arguments, "--seed=1") != text


@pytest.mark.full
def test_several_prompts_are_lines_of_json(
    run_folder: Path, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "prompts").write_text("two\nthree and more\n")
    options = ("--max-tokens=6", "--temperature=0", "--prompts-file")
    text = written(capsys, str(run_folder), "one", *options, str(tmp_path / "prompts"))
    lines = [*map(json.loads, text.splitlines())]
    assert [line["prompt"] for line in lines] == ["one", "two", "three and more"]
    alone = written(capsys, str(run_folder), "two", *options[:2])
    assert lines[1]["text"] == alone[:-1]
    # Any character of it may be the stop text.
    stop = lines[1]["text"][2]
    cut = written(capsys, str(run_folder), "two", *options[:2], f"--stop={stop}")
    assert cut[:-1] == lines[1]["text"].partition(stop)[0]


def test_a_file_of_prompts_has_one_in_each_line(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "prompts"
    path.write_bytes("\ufeffone\r\n two\u2028\nthree\x0c\n".encode())
    assert _lines(str(path)) == ["one", " two\u2028", "three\x0c"]
    path.write_text("one\n\ntwo\n \n")
    assert main(["run", f"--prompts-file={path}"]) != 0
    assert capsys.readouterr().err.startswith(
        f"[T401] a line of the file of prompts is blank\n  got: {path}: line 2, 4\n"
    )
    path.write_text("")
    assert main(["run", f"--prompts-file={path}"]) != 0
    assert "got: no prompt\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("{", "generation_config.json cannot be read"),
        ("[" * 200_000, "got: it is nested too deeply"),
        ('{"eos_token_id": "</s>"}', "got: eos_token_id = ['</s>']"),
        ('{"eos_token_id": [1, true]}', "got: eos_token_id = [1, True]"),
        ("{}", None),
    ],
)
def test_tokens_that_end_a_text_are_numbers(
    tmp_path: Path, content: str, line: str | None
) -> None:
    values = {**GEMMA3, "eos_token_id": 3, "vocab_size": 300, "text_config": None}
    folder = write_folder(tmp_path / "gemma", gemma3_tensors(values), values)
    chat_folders.write_folder(folder, "gemma", marked=False)
    (folder / "generation_config.json").write_text(content)
    if line is None:
        assert open_trained(folder).stop_tokens == (3,)
        return
    with pytest.raises(ModelFolderError) as caught:
        open_trained(folder)
    assert line in str(caught.value)


@pytest.mark.full
def test_a_run_stops_where_the_model_that_it_began_with_does(tmp_path: Path) -> None:
    values = {**GEMMA3, "vocab_size": 300, "eos_token_id": [1, 7]}
    folder = write_folder(tmp_path / "gemma", gemma3_tensors(values), values)
    chat_folders.write_folder(folder, "gemma", marked=False)
    own = open_trained(folder)
    begin = own.tokenizer.special_tokens["<bos>"]
    values["bos_token_id"] = begin
    (folder / "config.json").write_text(json.dumps(values))
    words = (f"model={folder}", "training.sequence_length=16")
    save(compose(words, configs_dir()), tmp_path / "run")
    trained = open_trained(tmp_path / "run")
    assert trained.tokenizer_name == str(folder)
    assert {*trained.stop_tokens} == {begin, 1, 7}
    save(compose([*words, "data.tokenizer=bytes"], configs_dir()), tmp_path / "bytes")
    assert open_trained(tmp_path / "bytes").stop_tokens == (256,)


@pytest.mark.full
def test_a_published_folder_brings_its_tokenizer(tmp_path: Path, capsys: Any) -> None:
    values = {**GEMMA3, "eos_token_id": [3, 4]}
    folder = write_folder(tmp_path / "gemma", gemma3_tensors(values), values)
    with pytest.raises(TokenizerError, match="T605"):
        open_trained(folder)
    words = {"<unk>": 0, "<bos>": 1, "one": 2, "two": 3, "three": 4, "four": 5}
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(words, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<bos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    # Nothing precedes a text unless the file says so.
    assert open_trained(folder).prefix == ()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    trained = open_trained(folder)
    assert trained.prefix == (1,)
    assert trained.stop_tokens == (3, 4)
    assert written(capsys, str(folder), "one two", "--max-tokens=3")


@pytest.mark.full
def test_a_chat_is_answered_until_its_turn_ends(tmp_path: Path, capsys: Any) -> None:
    values = {**GEMMA3, "eos_token_id": 3, "vocab_size": 300}
    folder = write_folder(tmp_path / "gemma", gemma3_tensors(values), values)
    chat_folders.write_folder(folder, "gemma", marked=False)
    trained = open_trained(folder)
    tokens = trained.tokenizer.special_tokens
    turns = chat_folders.turns("hi", "hello", "all?", system="Be well.")
    stops = trained.chat_stop_tokens([Conversation(turns)])
    assert {*stops} == {3, tokens["<eos>"], tokens["<end_of_turn>"]}
    chats = [Conversation([turns[0], turns[3]]), Conversation(turns)]
    rows = [*map(trained.encode_chat, chats)]
    # The template begins a conversation itself: nothing precedes what it writes.
    begin, model = tokens["<bos>"], tokens["<start_of_turn>"]
    assert [row.count(begin) for row in rows] == [1, 1]
    assert [row.count(model) for row in rows] == [2, 4]
    ids = generate(
        trained.model,
        trained.read(None),
        rows,
        40,
        jax.random.key(26),
        stop_tokens=stops,
    )[:, len(rows[1]) :]
    assert tokens["<end_of_turn>"] in ids
    assert ids[:, -1].tolist() == [-1, -1]  # both have ended before
    # What ends an answer is no part of its text.
    expected = [trained.tokenizer.decode(row[row >= 0][:-1]) for row in ids]
    (tmp_path / "chats").write_text(json.dumps({"messages": turns[1:]}) + "\n")
    options = ("--chat", "--seed=26", "--max-tokens=40", "--system=Be well.")
    text = written(
        capsys, str(folder), *options, f"--messages-file={tmp_path / 'chats'}", "all?"
    )
    lines = [*map(json.loads, text.splitlines())]
    assert lines == [
        {"prompt": prompt, "text": text}
        for prompt, text in zip(["all?", turns[1:]], expected, strict=True)
    ]


@pytest.mark.slow(reason="its first case compiles what the others share")
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["RUN", "x", "--chat"], "T605"),
        (["RUN", "x", "--system=y"], "T401"),
        (["RUN", "x", "--messages-file=y"], "T401"),
        (["no/such/run", "x"], CheckpointNotFoundError.code),
        (["RUN"], "T401"),
        (["RUN", "x", "--stop="], "T401"),
        (["RUN", "x", "--top-p=2"], "T401"),
        (["RUN", "x", "--mesh=[[2],[foo]]"], MeshShapeError.code),
        (["RUN", "x", "--mesh=4"], MeshShapeError.code),
        (["RUN", "x", "--mesh=[[1,3],[fsdp,tp]]"], "T402"),
        (["RUN", "x", "--prompts-file=no/such/file"], "T601"),
    ],
)
def test_a_mistake_is_a_coded_error(
    run_folder: Path, capsys: Any, arguments: list[str], code: str
) -> None:
    words = [str(run_folder) if word == "RUN" else word for word in arguments]
    assert main(words) != 0
    assert capsys.readouterr().err.startswith(f"[{code}] ")


@pytest.mark.full
def test_synthetic_tokens_have_no_text(tmp_path: Path) -> None:
    save_run(tmp_path, "data=synthetic")
    with pytest.raises(TokenizerError, match="data=synthetic"):
        open_trained(tmp_path)
