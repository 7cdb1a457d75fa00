# SPDX-License-Identifier: Apache-2.0
"""The files of a run's tokenizer, as an exported folder has them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tessera.train.data.data_config import DataConfig
from tessera.train.data.tokenization import load_tokenizer
from tessera.train.data.tokenizer_folder import TOKENIZER_FILE, TOOL_TEMPLATE
from tessera.train.files.hub import local_path
from tessera.train.models.families.published_files import GENERATION_FILE

# A tokenizer's own file, and what tokenizers of Hugging Face have beside it.
_OWN: Final = (TOKENIZER_FILE, "tokenizer.model")
_BESIDE: Final = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    TOOL_TEMPLATE,
    GENERATION_FILE,
    "vocab.json",
    "merges.txt",
)


def tokenizer_files(
    data: DataConfig,
) -> tuple[dict[str, int | None], dict[str, Path | Mapping[str, Any]]]:
    """The special tokens and the files of an exported folder.

    A run separates documents by one token, which therefore begins and ends each. The
    files beside a tokenizer of Hugging Face say more, and are copied.

    Args:
      data: The run's data settings; a tokenizer of bytes or of synthetic tokens has no
        files.

    Raises:
      TokenizerError: [T605] the tokenizer is not there any more.
    """
    if data.name == "synthetic":
        return {}, {}
    name = data.tokenizer_name
    separator = load_tokenizer(name).separator
    tokens = {"bos_token_id": separator, "eos_token_id": separator}
    path = Path(local_path(name)).expanduser()
    if name == "bytes":
        return tokens, {}
    folder = path if path.is_dir() else path.parent
    own = _OWN if path.is_dir() else (path.name,)
    files: dict[str, Path | Mapping[str, Any]] = {
        f"tokenizer{Path(name).suffix}": folder / name
        for name in own
        if (folder / name).is_file()
    }
    if path.is_dir() or path.name in _OWN:
        files |= {name: folder / name for name in _BESIDE if (folder / name).is_file()}
        templates = folder.glob("additional_chat_templates/*.jinja")
        files |= {f"{path.parent.name}/{path.name}": path for path in templates}
    # Without it, Transformers chooses a class by the model, which may be another.
    default = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if "tokenizer.json" in files:
        files.setdefault("tokenizer_config.json", default)
    return tokens, files
