# SPDX-License-Identifier: Apache-2.0
"""``RewardModel``: a sequence classifier that scores completions on a run's mesh."""

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import NamedSharding, PartitionSpec

from tessera.analysis.inspection import inspect
from tessera.analysis.memory import format_bytes
from tessera.errors import TesseraError
from tessera.foundations.tree import Tree
from tessera.graph.function import Function
from tessera.train.checkpoints.first_process import broadcast_from_first
from tessera.train.config.step_config import batch_spec
from tessera.train.data.chat_prompts import ChatPrompts
from tessera.train.data.chat_template import Conversation
from tessera.train.data.tokenization import JsonTokenizer, load_tokenizer
from tessera.train.files.hub import MODEL_FILES, PREFIX, WEIGHT_FILES, local_path
from tessera.train.loop.build_run import Run
from tessera.train.loop.console import log
from tessera.train.loop.scores import make_score_step
from tessera.train.models.classifier_folder import ClassifierFolder
from tessera.train.models.decoder.decoder_model import DecoderModel
from tessera.train.models.families.published_files import read_published
from tessera.train.models.weights import check_weights, import_weights
from tessera.train.rewards.reward_functions import LARGEST, Outcome

# Tokens of the shortest rows; others have twice as many, and so on.
_SHORTEST: Final = 64


class RewardModel:
    """Scores texts by a Hugging Face sequence classifier with one label.

    It reads what TRL's GRPOTrainer gives such a model, by the model's own tokenizer,
    which adds no tokens: messages as the model's own chat template writes prompt and
    completion, or a prompt's text and the completion's. Names of special tokens in them
    are such.

    **The score is that of the last token.** That of Transformers is of the last token
    that is not ``pad_token_id``, which TRL sets to the tokenizer's ``pad_token``, or to
    ``eos_token`` without one: another token where a text ends with this one. The log
    then says so.

    Parameters are in the run's dtype of computation and the layouts of a decoder;
    scores are f32. Rows of a batch have one length, a power of two or the context, so
    there are few programs.

    Args:
      run: The run.
      name: A folder, or a name of the Hub.
      reads_messages: Whether it needs a chat template.

    Raises:
      ModelFolderError: [T806] it is no classifier of a family that is known.
      WeightFileError: [T805] it has other weights than a decoder and one score.
      TokenizerError: [T605] it has no tokenizer, or needs a chat template.
      TesseraError: T201, T402: the mesh cannot divide it; T719: the Hub has no such
        model.
    """

    def __init__(self, run: Run, name: str, *, reads_messages: bool) -> None:
        self._mesh, precision = run.mesh, run.config.training.precision
        # A dry run downloads no weights.
        is_whole = not (run.config.training.dry_run and name.startswith(PREFIX))
        files = WEIGHT_FILES if is_whole else MODEL_FILES
        path = Path(local_path(name, files, bare=True)).expanduser().absolute()
        self._folder, self._name = ClassifierFolder(path), name
        config, self._dtype = self._folder.config, precision.computation
        model = DecoderModel(config, dtype=self._dtype)
        self._step = replace(run.step_config, model=model)
        self._layouts = self._step.zero.params
        if is_whole:
            check_weights(self._folder, model)
            _ = self._folder.score
        tokenizer = load_tokenizer(str(path))
        assert isinstance(tokenizer, JsonTokenizer)
        self._tokenizer, special = tokenizer, tokenizer.folder.special_tokens
        self._padding = special.get("pad_token", special.get("eos_token"))
        if reads_messages:
            _ = self._chat
        if run.config.training.dry_run:
            self._log_size()
        # No mesh changes the rows of a step, nor those of a fixed order.
        is_fast = self._step.fixed_order is None
        micro = run.config.rows_per_microbatch(run.mesh.shape)
        self._rows = micro if is_fast else run.rows_per_step
        longest = read_published(path).longest(config)
        if config.rope_kind == "longrope":
            longest = config.rope_original_length
        # Each device that shares sequences has two parts of them.
        self._unit = 2 * model.place(run.mesh).size("context")
        self._longest = (longest or sys.maxsize) // self._unit * self._unit

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any]
    ) -> list[Outcome]:
        """A score for each completion, or why there is none."""
        pairs = zip(prompts, completions, strict=True)
        # A template may ask for the date, or take too long: in one process alone.
        found = broadcast_from_first(
            lambda: {"texts": [self._read(*pair) for pair in pairs]}
        )
        texts = found["texts"]
        outcomes: list[Outcome] = [
            one if isinstance(one, str) else None for one in texts
        ]
        by_length = defaultdict[int, list[int]](list)
        for i, ids in enumerate(texts):
            if not isinstance(ids, str):
                by_length[self._padded(len(ids))].append(i)
        for length, numbers in by_length.items():
            for begin in range(0, len(numbers), self._rows):
                part = numbers[begin : begin + self._rows]
                scores = self._scores(length, [texts[i] for i in part])
                for i, score in zip(part, scores, strict=True):
                    is_usable = abs(score) < LARGEST
                    outcomes[i] = score if is_usable else f"gave no number ({score})"
        return outcomes

    def _read(self, prompt: Any, completion: Any) -> list[int] | str:
        """The tokens of what is scored, or why it is not."""
        try:
            if isinstance(prompt, str):
                text = prompt + completion
            else:
                messages = Conversation([*prompt, *completion])
                text = self._chat.render(messages, add_generation_prompt=False)
            ids = self._tokenizer.encode_chat(text)[0].tolist()
        except TesseraError as error:
            return f"cannot read a completion ({error.what}: {error.got})"
        if not ids:
            return "has no token to score"
        if self._tokenizer.token(ids[-1]) == self._padding:
            log.warning(
                f"the reward model {self._name} scores the last token of a text, here "
                f"{self._padding}: Transformers takes it for padding, and scores the "
                "one before"
            )
            self._padding = None  # once is enough
        if len(ids) > self._longest:
            return f"reads at most {self._longest:,} tokens ({len(ids):,})"
        return ids

    @cached_property
    def _chat(self) -> ChatPrompts:
        return ChatPrompts(self._tokenizer, self._name)

    def _padded(self, size: int) -> int:
        """The length of the rows that a text is in."""
        length = -(-_SHORTEST // self._unit) * self._unit
        while length < size:
            length *= 2
        return min(length, self._longest)

    def _scores(self, length: int, texts: Sequence[list[int]]) -> list[float]:
        """The score of each text, of at most as many as a batch has rows."""
        shape = 1, self._rows, length
        tokens = np.zeros(shape, np.int32)
        for i, ids in enumerate(texts):
            tokens[0, i, : len(ids)] = ids
        positions = np.broadcast_to(np.arange(length, dtype=np.int32), shape)
        ones = np.ones(shape, np.int32)  # nothing attends to the padding after it
        arrays = {"tokens": tokens, "positions": positions, "segment_ids": ones}
        layout = NamedSharding(self._mesh.jax, batch_spec(self._step))
        batch = {
            name: jax.make_array_from_callback(shape, layout, array.__getitem__)
            for name, array in arrays.items()
        }
        self._function.compile(self._params, batch)  # a call would warn that it does
        scores = self._function(self._params, batch)
        if jax.process_count() > 1:
            scores = process_allgather(scores, tiled=True)
        rows = np.asarray(scores)[0]
        return [float(rows[i, len(ids) - 1]) for i, ids in enumerate(texts)]

    def _log_size(self) -> None:
        def placed(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
            at = NamedSharding(self._mesh.compile_mesh, spec)
            return jax.ShapeDtypeStruct(leaf.shape, self._dtype, sharding=at)

        model = self._step.model
        held = inspect(jax.tree.map(placed, model.abstract(), self._layouts))
        log.info(
            f"the reward model {self._name} has {model.num_params:,} parameters, "
            f"{format_bytes(held.local_nbytes)} per device beside the state"
        )

    @cached_property
    def _params(self) -> Tree:
        self._log_size()
        given = self._folder, self._step.model, self._mesh
        return import_weights(*given, layouts=self._layouts, dtype=self._dtype)

    @cached_property
    def _function(self) -> Function:
        def head(model: Any, params: Tree, hidden: jax.Array, *_: Any) -> jax.Array:
            hidden = model.merge(params).final_norm(hidden)
            return (hidden.astype(jnp.float32) * self._folder.score).sum(-1)

        return make_score_step(self._step, head=head)
