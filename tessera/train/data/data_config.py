# SPDX-License-Identifier: Apache-2.0
"""The settings ``data=`` and ``data.<setting>=``.

Only plain types, so that Hydra can use the classes as structured configs.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Final

from tessera.errors import SettingConflictError, SettingValueError, TesseraError
from tessera.train.config.setting_fields import (
    MOST_COUNT,
    Conflict,
    broken,
    collected,
    problems_of,
    raise_all,
    setting,
)
from tessera.train.files.hub import HubName

SOURCES = ("stdlib", "text", "mixture", "synthetic", "preferences", "prompts")
FORMATS = ("auto", "text", "jsonl")
LOSS_ON = ("all", "answers", "last_turn")
RECORDS = ("preferences", "prompts")
"""The sources whose records are more than a text or a conversation."""


# Not frozen: OmegaConf would refuse to override a frozen dataclass.
@dataclass
class SyntheticConfig:
    """Settings of ``data=synthetic``; see ``tessera.train.data.synthetic``.

    Attributes:
      tokens: Number of tokens, training and validation together.
      vocab_size: Ids are below this; null uses the model's vocabulary.
      noise: The share of tokens replaced by random ones.
    """

    tokens: int = setting(2_000_000, least=1, most=10**9)
    vocab_size: int | None = setting(None, least=2, most=MOST_COUNT)
    noise: float = setting(0.05, least=0, most=1)


@dataclass
class SourceConfig:
    """One source of ``data=mixture``, or of ``data=preferences``.

    Attributes:
      path: As data.path.
      weight: Its part of the training rows, relative to the weights of the others.
      format: As data.format.
      text_key: As data.text_key.
      messages_key: As data.messages_key.
      loss_on: As data.loss_on.
      split: As data.split.
      subset: As data.subset.
      prompt_key: As data.prompt_key.
      chosen_key: As data.chosen_key.
      rejected_key: As data.rejected_key.
    """

    path: str = ""
    weight: float = setting(1.0, above=0)
    format: str = setting("auto", choices=FORMATS)
    text_key: str = "text"
    messages_key: str = ""
    loss_on: str = setting("all", choices=LOSS_ON)
    split: str | None = None
    subset: str | None = None
    prompt_key: str = "prompt"
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"

    def alone(self, config: "DataConfig") -> "DataConfig":
        """The same as the only source, with the other settings of ``config``."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        del own["weight"]
        name = "text" if config.name == "mixture" else config.name
        return replace(config, name=name, sources={}, **own)


@dataclass
class DataConfig:
    """Which text to train on, and how to tokenize it.

    Attributes:
      name: The source of the text.
      path: For text: a file, a folder or a glob; or of the Hub, as data=<name> sets it,
        hf://datasets/<organization>/<name>[@<revision>][/<glob>].
      split: For a data set of the Hub: which split of it; null is train.
      subset: For a data set of the Hub: which of its configurations, if it has several.
      format: For text: how files are read; auto depends on the suffix, jsonl reads a
        JSON object from each line, text reads all bytes as they are.
      text_key: For JSON lines and tables: the key of the text.
      messages_key: For JSON lines and tables: the key of a list of messages with role
        and content, instead of a text; the tokenizer's chat template writes them.
      loss_on: For messages: which tokens are learned; last_turn has the answers after
        the last message of a user.
      prompt_key: For preferences and prompts: the key of the prompt, text or a list of
        messages; empty where chosen and rejected have it themselves.
      chosen_key: For preferences: the key of the better answer.
      rejected_key: For preferences: the key of the other one.
      tokenizer: bytes, the path of a tokenizers file (.json) or of a folder with one;
        null is that of the folder of the model's weights, and bytes without a folder.
      validation_fraction: The share of the data for validation; 0 disables it, and 1
        leaves nothing to train on, for training.eval_only.
      sources: For mixture: the sources by name, each with path and weight, and with
        format, text_key, messages_key and loss_on where they differ from the default;
        for preferences, in place of path: with prompt_key, chosen_key and rejected_key.
      num_workers: Processes that make tokens; null is one for each usable core.
      cache_dir: The folder of prepared tokens; null is tessera/tokens in the user's
        cache folder.
      prefetch: Number of batches to prepare ahead in a thread; 0 prepares none.
      synthetic: The settings of synthetic.
    """

    name: str = setting("stdlib", choices=SOURCES)
    path: str = ""
    split: str | None = None
    subset: str | None = None
    format: str = setting("auto", choices=FORMATS)
    text_key: str = "text"
    messages_key: str = ""
    loss_on: str = setting("all", choices=LOSS_ON)
    prompt_key: str = "prompt"
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    tokenizer: str | None = None
    validation_fraction: float = setting(0.05, least=0, most=1)
    sources: dict[str, SourceConfig] = field(default_factory=dict)
    num_workers: int | None = setting(None, least=1, most=1024)
    cache_dir: str | None = None
    prefetch: int = setting(4, least=0, most=1024)
    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer, with bytes for null: there is no folder of weights."""
        return self.tokenizer or "bytes"


# Settings that a source does not read, and then those that files do not.
_UNREAD: Final = (
    Conflict(
        "name!=text|preferences|prompts",
        "path split subset format text_key messages_key loss_on",
    ),
    Conflict(
        "name=preferences|prompts",
        "format=text text_key messages_key loss_on",
        ", whose text or messages data.prompt_key names",
    ),
    Conflict("name!=preferences|prompts", "prompt_key"),
    Conflict("name!=preferences", "chosen_key rejected_key"),
    Conflict("name=synthetic", "tokenizer num_workers cache_dir"),
    Conflict("name!=mixture|preferences", "sources"),
    Conflict(
        "name=preferences sources",
        "path split subset format prompt_key chosen_key rejected_key",
    ),
    Conflict("name!=synthetic", "synthetic"),
)
_UNREAD_BY_SOURCES: Final = {
    "mixture": [Conflict("", "prompt_key chosen_key rejected_key")],
    "preferences": [Conflict("", "format=text text_key messages_key loss_on")],
}
_UNREAD_BY_FILES: Final = (
    Conflict("format=text", "text_key messages_key"),
    Conflict("messages_key", "text_key"),
    Conflict("messages_key=''", "loss_on"),
)


def check(config: DataConfig) -> None:
    """Check that all values are legal, and that the source uses every setting.

    Raises:
      SettingValueError: [T502] values are out of range or missing.
      SettingConflictError: [T507] settings have no effect here. It is the first of all
        mistakes that decides.

    Example:
      >>> check(DataConfig(name="text", path="books"))
    """
    problems = problems_of(config, "data")
    problems += problems_of(config.synthetic, "data.synthetic")
    # Which settings are used is only known for a source that exists.
    if config.name in SOURCES:
        problems += broken(_UNREAD, config, "data")
    files: dict[str, DataConfig | SourceConfig] = {}
    if config.name == "text" or (config.name in RECORDS and not config.sources):
        files["data"] = config
    elif config.name in _UNREAD_BY_SOURCES:
        problems += _source_names(config)
        files |= {f"data.sources.{name}": each for name, each in config.sources.items()}
    for group, each in files.items():
        if isinstance(each, SourceConfig):
            problems += problems_of(each, group)
            problems += broken(_UNREAD_BY_SOURCES[config.name], each, group)
        problems += broken(_UNREAD_BY_FILES, each, group)
        if not each.path:
            problems.append(
                SettingValueError(
                    f"data={config.name} needs {group}.path",
                    got=f"{group}.path is empty",
                    fix=f"add {group}.path=<a file, a folder or a glob>",
                )
            )
        with collected(problems):
            problems += _hub_problems(each, group)
    raise_all(problems)


def _hub_problems(
    config: DataConfig | SourceConfig, group: str
) -> Iterator[TesseraError]:
    """Whether the path is of a data set, where it is of the Hub; and what needs one."""
    name, got = HubName.parse(config.path), f"{group}.path={config.path}"
    if name is not None and not name.is_dataset:
        yield SettingValueError(
            f"{group}.path names a model",
            got=got,
            fix=f"write hf://datasets/{name.repo} for a data set",
        )
    if name is not None and not name.files:
        return
    for setting_name in ("split", "subset"):
        if value := getattr(config, setting_name):
            yield SettingConflictError(
                f"{group}.{setting_name} is of a whole data set of the Hub",
                got=f"{group}.{setting_name}={value} {got}",
                fix="leave it out: the path says which files are read",
            )


def _source_names(config: DataConfig) -> Iterator[SettingValueError]:
    example = "data.sources={web: {path: web.jsonl, weight: 3}, books: {path: books}}"
    if not config.sources:
        yield SettingValueError(
            "data=mixture needs data.sources",
            got="data.sources is empty",
            fix=f"add '{example}'",
        )
    for name in config.sources:
        if not re.fullmatch(r"[\w.-]+", name):
            yield SettingValueError(
                "the name of a source has characters that no name of a metric has",
                got=f"data.sources: {name!r}",
                fix="use letters, digits, '_', '-' and '.'",
            )
