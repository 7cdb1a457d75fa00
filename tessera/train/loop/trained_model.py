# SPDX-License-Identifier: Apache-2.0
"""``TrainedModel``: a run, a checkpoint or a published folder, ready to be used."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from pathlib import Path

import jax
from jax.sharding import NamedSharding, SingleDeviceSharding

from tessera.errors import (
    MeshShapeError,
    ModelFolderError,
    TokenizerError,
    did_you_mean,
)
from tessera.foundations.device_grid import checked_axes, checked_shape
from tessera.foundations.tree import Tree, named_leaves, nest
from tessera.mesh import Mesh
from tessera.train.checkpoints.export_checkpoint import (
    CheckpointParams,
    open_checkpoint,
    settings_of_checkpoint,
)
from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.config.run_config import MESH_AXES
from tessera.train.data.chat_prompts import ChatPrompts
from tessera.train.data.chat_template import Conversation
from tessera.train.data.tokenization import (
    Ids,
    JsonTokenizer,
    Tokenizer,
    load_tokenizer,
)
from tessera.train.data.tokenizer_folder import TOKENIZER_FILE
from tessera.train.data.vocabulary import check_tokens
from tessera.train.files.bounded_yaml import parse_yaml
from tessera.train.files.hub import WEIGHT_FILES, local_path
from tessera.train.models.decoder.decoder_model import DecoderModel
from tessera.train.models.definition import ModelOptions, import_module
from tessera.train.models.families.published_files import Published, read_published
from tessera.train.models.model import Model
from tessera.train.models.model_folder import ModelFolder
from tessera.train.models.weights import import_weights
from tessera.train.runtime.devices import prepare_devices


@dataclass(frozen=True)
class TrainedModel:
    """A model with its tokenizer, before its parameters are read.

    Attributes:
      model: The model; its experts are dropless.
      tokenizer_name: The tokenizer, as ``data.tokenizer`` names it.
      tokenizer: The same, loaded.
      prefix: The tokens before every text.
      stop_tokens: The tokens that end a text.
      max_length: Tokens of the sequences that it was trained on, if it says so.
      read: Reads the parameters onto a mesh.
    """

    model: Model
    tokenizer_name: str
    tokenizer: Tokenizer
    prefix: tuple[int, ...]
    stop_tokens: tuple[int, ...]
    max_length: int | None
    read: Callable[[Mesh | None], Tree]

    def encode(self, text: str) -> list[int]:
        """The tokens of a text that is to be continued.

        Raises:
          TokenRangeError: [T604] the model does not have one of them.
        """
        ids = self.tokenizer.encode(text)
        return [*self.prefix, *self._checked(text, ids)]

    def encode_chat(self, conversation: Conversation) -> list[int]:
        """The tokens of a conversation that is to be answered.

        Raises:
          TokenizerError: [T605] there is no chat template.
          OperandError: [T401] the template does not accept the conversation.
          TokenRangeError: [T604] the model does not have one of the tokens.
        """
        return self.encode_special(self.chat.render(conversation))

    def encode_special(self, text: str) -> list[int]:
        """The tokens of a text in which the names of special tokens are such.

        Raises:
          TokenRangeError: [T604] the model does not have one of them.
        """
        tokenizer, ids = self.tokenizer, None
        if isinstance(tokenizer, JsonTokenizer):
            ids, _ = tokenizer.encode_chat(text)
        return self._checked(text, tokenizer.encode(text) if ids is None else ids)

    def chat_stop_tokens(self, chats: Iterable[Conversation]) -> tuple[int, ...]:
        """The tokens that end an answer; raises as ``encode_chat`` does.

        They are those that end a text, the tokenizer's ``eos_token``, and what the
        template writes after an answer, such as ``<end_of_turn>``.
        """
        ends = {end for chat in chats for end in self.chat.ends(chat)}
        return tuple(sorted(ends.union(self.stop_tokens)))

    @cached_property
    def chat(self) -> ChatPrompts:
        """The chat template; [T605] if there is none."""
        return ChatPrompts(self.tokenizer, self.tokenizer_name)

    def _checked(self, text: str, ids: Ids) -> list[int]:
        size = self.model.vocab_size
        check_tokens("the prompt", text, ids, self.tokenizer, size)
        return ids.tolist()


def open_trained(path: str | Path, modules: Sequence[str] = ()) -> TrainedModel:
    """What is at a path; no parameter is read yet.

    Args:
      path: The folder of a run, of its checkpoints, or of one of them; a folder of
        Hugging Face; or, if there is none, ``organization/name[@revision]`` of the Hub.
      modules: Imported first: those that register the model of the run. What a run's
        own files name is never imported.

    Raises:
      UnknownModelError: [T403] none of the modules registers the model of the run.
      CheckpointNotFoundError: [T801] there is none, or the newest is damaged.
      CheckpointMismatchError: [T802] the checkpoint is of a newer Tessera.
      ModelFolderError: [T806] the folder's ``config.json`` cannot be used.
      TokenizerError: [T605] there is no tokenizer, or it cannot be read.
      HubError: [T719] the Hub does not give it.
    """
    for module in modules:
        import_module(module)
    path = Path(local_path(path, WEIGHT_FILES, bare=True)).expanduser()
    return _folder(path) if os.path.isfile(path / "config.json") else _checkpoint(path)


def mesh_of(text: str | None) -> Mesh | None:
    """The mesh of a command line, ``[[1,4],[fsdp,tp]]``, with its devices prepared.

    Raises:
      MeshShapeError: [T101] it is not sizes and axes that models know.
      TesseraError: [T701], [T702] the machine does not have the devices.
    """
    if text is None:
        prepare_devices(1)
        return None
    try:
        sizes, names = parse_yaml(text)
        axes = checked_axes(names)
        shape = checked_shape(sizes, axes)
    except (TypeError, ValueError) as error:
        if isinstance(error, MeshShapeError):
            raise
        raise MeshShapeError(
            "a mesh shape is a pair of sizes and axis names",
            got=f"--mesh={text}",
            fix="write --mesh='[[1,4],[fsdp,tp]]'",
        ) from error
    for axis in axes:
        if axis not in MESH_AXES:
            raise MeshShapeError(
                f"no layout of a model uses a mesh axis {axis!r}",
                got=f"--mesh={text}",
                fix=did_you_mean(axis, MESH_AXES),
            )
    least = prod(size for size in shape if size != -1)
    prepare_devices(least, axes=dict(zip(axes, shape, strict=True)))
    return mesh_of_shape([shape, axes])


def _checkpoint(path: Path) -> TrainedModel:
    checkpoint = open_checkpoint(path)
    settings = settings_of_checkpoint(checkpoint)
    if settings.data.name == "synthetic":
        raise TokenizerError(
            "the model of this run was trained on no text",
            got=f"{path}: data=synthetic, whose tokens have no text",
            fix="use a run with data=stdlib or data=text",
        )
    name = settings.data.tokenizer_name
    tokenizer = load_tokenizer(name)
    begins = () if tokenizer.separator is None else (tokenizer.separator,)
    published = Published.parse(checkpoint.metadata.published)
    ends = _ends(path, published) if published.has_tokenizer_of(begins) else ()
    model = settings.model.kind.build(settings.model.config, ModelOptions(), None)

    def read(mesh: Mesh | None) -> Tree:
        params = CheckpointParams(checkpoint)
        params.check(model)
        specs = {} if mesh is None else named_leaves(model.layouts(mesh))
        device = SingleDeviceSharding(jax.local_devices()[0])

        def put(name: str) -> jax.Array:
            sharding = device if mesh is None else NamedSharding(mesh.jax, specs[name])
            return jax.device_put(params.read(name.replace("/", ".")), sharding)

        return nest({name: put(name) for name in named_leaves(model.abstract())})

    length = settings.training.sequence_length
    stops = tuple({*begins, *ends})
    return TrainedModel(model, name, tokenizer, begins, stops, length, read)


def _folder(path: Path) -> TrainedModel:
    model = DecoderModel(ModelFolder(path).config)
    tokenizer = load_tokenizer(str(path))
    assert isinstance(tokenizer, JsonTokenizer)
    published = read_published(path)
    return TrainedModel(
        model,
        str(path / TOKENIZER_FILE),
        tokenizer,
        tuple(tokenizer.prefix),  # for Qwen there are none
        _ends(path, published),
        published.context_length,
        partial(import_weights, path, model),
    )


def _ends(path: Path, published: Published) -> tuple[int, ...]:
    """The tokens that end a text, by the first file that says so.

    Raises:
      ModelFolderError: [T806] it names no tokens.
    """
    ends = published.generation.get("eos_token_id")
    if ends is None:
        ends = published.config.get("eos_token_id")
    if ends is None:
        return ()
    ends = ends if isinstance(ends, list) else [ends]
    if not all(type(end) is int for end in ends):
        raise ModelFolderError(
            f"the tokens that end a text are not those of the model in {path}",
            got=f"eos_token_id = {str(ends)[:80]}",
            fix="write the number of a token, or a list of numbers",
        )
    return tuple(ends)
