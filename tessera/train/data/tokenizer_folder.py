# SPDX-License-Identifier: Apache-2.0
"""Reads what Hugging Face stores beside a tokenizer's file.

``tokenizer_config.json`` has the names of special tokens, tokens that were added later
and the chat template, which may also be in ``chat_template.jinja``, with another one
for tools.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tessera.errors import TokenizerError
from tessera.train.files.regular_files import read_regular
from tessera.train.files.untrusted_json import check_json_values

_CONFIG: Final = "tokenizer_config.json"
_TEMPLATE: Final = "chat_template.jinja"
TOOL_TEMPLATE: Final = "additional_chat_templates/tool_use.jinja"
# The largest tokenizers have 35 MB.
LONGEST_FILE: Final = 2**26
TOKENIZER_FILE: Final = "tokenizer.json"
_SPECIAL_TOKENS: Final = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


@dataclass(frozen=True)
class TokenizerFolder:
    """What a folder says about its tokenizer.

    Attributes:
      special_tokens: Names by role, such as ``bos_token``.
      added_tokens: Properties of tokens by id.
      chat_template: The Jinja template of conversations, or nothing.
      tool_template: That of conversations with tools, if it is another one.
    """

    special_tokens: Mapping[str, str] = field(default_factory=dict)
    added_tokens: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    chat_template: str = ""
    tool_template: str = ""

    @property
    def separator(self) -> str | None:
        """The token between documents: ``bos_token``, else ``eos_token``."""
        names = self.special_tokens
        return names.get("bos_token", names.get("eos_token"))


def read_folder(file: Path) -> TokenizerFolder:
    """What is stored beside a tokenizer's file; nothing if that has another name.

    Raises:
      TokenizerError: [T605] a file cannot be read.
    """
    if file.name != TOKENIZER_FILE:
        return TokenizerFolder()
    path = file.with_name(_CONFIG)
    try:
        text = _content(path) or "{}"
        check_json_values(text)
        values = json.loads(text)
        template = _content(file.with_name(_TEMPLATE)) or values.get("chat_template")
        tool_template = ""
        if isinstance(template, list):
            named = {one["name"]: one["template"] for one in template}
            template = named.get("default")
            tool_template = named.get("tool_use", "")
        tool_template = _content(file.parent / TOOL_TEMPLATE) or tool_template
        special_tokens = {
            f"{role}_token": _content_of_token(values[f"{role}_token"])
            for role in _SPECIAL_TOKENS
            if values.get(f"{role}_token") is not None
        }
        added = values.get("added_tokens_decoder") or {}
        added_tokens = {int(number): dict(one) for number, one in added.items()}
        if not isinstance(template or "", str) or not isinstance(tool_template, str):
            raise ValueError("chat_template is not text")
    except Exception as error:  # there is any JSON in place of what is expected
        raise TokenizerError(
            f"the settings of the tokenizer {str(file)!r} cannot be read",
            got=f"{path}: {getattr(error, 'strerror', None) or error}",
            fix="use the folder as Hugging Face Transformers saved it",
        ) from error
    return TokenizerFolder(
        special_tokens, added_tokens, template or "", tool_template or ""
    )


def folder_files(file: Path) -> list[Path]:
    """The files beside a tokenizer's file that ``read_folder`` reads."""
    if file.name != TOKENIZER_FILE:
        return []
    paths = [file.parent / name for name in (_CONFIG, _TEMPLATE, TOOL_TEMPLATE)]
    return [path for path in paths if path.exists()]


def _content(path: Path) -> str:
    return read_regular(path, LONGEST_FILE).decode() if path.exists() else ""


def _content_of_token(value: Any) -> str:
    name = value["content"] if isinstance(value, dict) else value
    if not isinstance(name, str):
        raise ValueError(f"{name!r} is not the name of a token")
    return name
