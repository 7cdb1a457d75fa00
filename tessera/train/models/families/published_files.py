# SPDX-License-Identifier: Apache-2.0
"""What a folder says beside the model, which an export of the trained model says again.

published = read_published("llama")     # when a run begins
values = published.config_values(...)   # when it is exported
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tessera.errors import TesseraError
from tessera.train.models.families.config_keys import without_effect
from tessera.train.models.families.family import Family
from tessera.train.models.families.registry import (
    CONFIG_FILE,
    differences,
    family_for,
    parse_object,
    read_object,
)

GENERATION_FILE: Final = "generation_config.json"
_IDS: Final = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Published:
    """The files of a folder, as values; empty for a model that had no folder.

    Attributes:
      config: Of ``config.json``.
      generation: Of ``generation_config.json``.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, texts: Mapping[str, str]) -> "Published":
        """From the text of each file, as ``published_texts`` gives it.

        Raises:
          ModelFolderError: [T806] one is no JSON object.
        """
        values = {name: parse_object(text, name) for name, text in texts.items()}
        return cls(values.get(CONFIG_FILE, {}), values.get(GENERATION_FILE, {}))

    def has_tokenizer_of(self, separators: Iterable[int | None]) -> bool:
        """Whether the folder's own tokens begin or end a text with these separators.

        Then the tokenizer is the folder's, and the folder's ids hold.
        """
        ends = [None, *self._ends()]
        return bool(self.config) and all(token in ends for token in separators)

    def token_ids(self, tokens: Mapping[str, int | None]) -> dict[str, Any]:
        """The ids of special tokens of an export.

        Args:
          tokens: Those of the tokenizer that the model was trained with; none if that
            is unknown.
        """
        if self.has_tokenizer_of(tokens.values()):
            return {name: self._flat[name] for name in _IDS if name in self._flat}
        return {**dict.fromkeys(_IDS), **tokens}

    def config_values(
        self,
        config: Any,
        tokens: Mapping[str, int | None],
        *,
        length: int | None = None,
    ) -> dict[str, Any]:
        """The ``config.json`` of a model: the folder's, with what the model is now.

        Args:
          config: The configuration; one of another kind than a decoder's is refused.
          tokens: See ``token_ids``.
          length: The context of a model that had no folder.

        Raises:
          ModelFolderError: [T806] no family of Transformers computes this model.
        """
        family, flat = family_for(config, self.model_type), self._flat
        written = family.values(config)
        # The folder's own spelling, unless the model is another one now.
        candidates = {**written, **flat}, {**flat, **written}
        values = next(
            (one for one in candidates if _describes(family, one, config)),
            {**without_effect(flat), **written},
        )
        values |= {key: written[key] for key in ("architectures", "model_type")}
        values |= self.token_ids(tokens)
        if length is not None and not self.config:
            values["max_position_embeddings"] = length
        return values

    def generation_values(self, tokens: Mapping[str, int | None]) -> dict[str, Any]:
        """The ``generation_config.json``; empty if there is to be none."""
        ids = self.token_ids(tokens)
        if self.config and ids.items() <= self._flat.items():
            return dict(self.generation)
        return {**self.generation, **ids} if tokens else {}

    @property
    def context_length(self) -> int | None:
        """The most tokens of a sequence, if the folder says so."""
        length = self._flat.get("max_position_embeddings")
        return length if type(length) is int and length > 0 else None

    def longest(self, config: Any) -> int | None:
        """The same for a configuration, which may scale its rotary positions."""
        known = self.context_length
        if known is None:
            return None
        scales = (getattr(config, f"rope_scale_{k}", 1.0) for k in ("global", "local"))
        # Where the file has the length before scaling, as those of Qwen do, or after.
        original = getattr(config, "rope_original_length", None) or 0
        return max(known, int(original * max(scales)))

    def excess_length(self, length: int, config: Any) -> str:
        """A warning where sequences have positions that the weights do not know.

        Args:
          length: Tokens of a sequence.
          config: The model's; a decoder's may scale its rotary positions.

        Returns:
          Nothing where all is well, or the folder does not say how long they may be.
        """
        known, most = self.context_length, self.longest(config)
        if most is None or length <= most:
            return ""
        return (
            f"training.sequence_length={length} is more than the {most:,} tokens that "
            f"the model's config.json allows (max_position_embeddings={known}): its "
            "weights do not know the positions after these; use "
            f"training.sequence_length={most}, or a model whose rope_scaling has more"
        )

    @property
    def model_type(self) -> str | None:
        """Of the folder; None without one."""
        return self._flat.get("model_type")

    @property
    def dtype(self) -> str | None:
        """Of the folder's weights, as far as it says; None without one."""
        values = {**self._flat, **self.config}
        name = values.get("dtype", values.get("torch_dtype"))
        return name if name in ("float32", "bfloat16", "float16") else None

    @property
    def _flat(self) -> dict[str, Any]:
        """The ``config.json`` of the text model of a larger one."""
        text = self.config.get("text_config")
        if not isinstance(text, dict):
            return dict(self.config)
        ids = {name: self.config[name] for name in _IDS if name in self.config}
        return {**ids, **text}

    def _ends(self) -> Iterator[Any]:
        for values in (self._flat, self.generation):
            for name in _IDS[:2]:
                ids = values.get(name)
                yield from ids if isinstance(ids, list) else [ids]


def _describes(family: Family, values: Mapping[str, Any], config: Any) -> bool:
    """Whether a ``config.json`` is that of a configuration."""
    try:
        return not differences(config, family.config(values))
    except TesseraError:
        return False


def published_texts(folder: str | Path) -> dict[str, str]:
    """The text of each file of a folder that an export needs again, by its name.

    Raises:
      ModelFolderError: [T806] one cannot be read, or is no JSON object.
    """
    path = Path(folder)
    names = [CONFIG_FILE]
    names += [GENERATION_FILE] if (path / GENERATION_FILE).exists() else []
    return {name: read_object(path / name)[0] for name in names}


def read_published(folder: str | Path) -> Published:
    """What a folder says beside the model; see ``published_texts``."""
    return Published.parse(published_texts(folder))
