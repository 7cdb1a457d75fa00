# SPDX-License-Identifier: Apache-2.0
"""Which tokenizer a run has: a folder of weights has its own."""

import filecmp
import os

from tessera.train.config.run_config import Config
from tessera.train.data.tokenizer_folder import TOKENIZER_FILE
from tessera.train.files.hub import PREFIX, local_path
from tessera.train.models.families.registry import CONFIG_FILE


def tokenizer_of(config: Config, folder: str | None) -> str | None:
    """``data.tokenizer``, or for null that of the weights' folder; else bytes.

    Args:
      config: The settings.
      folder: What ``model=<folder>`` names, if it names one.
    """
    if config.data.name == "synthetic" or config.data.tokenizer is not None:
        return config.data.tokenizer
    return _folder_of_weights(config, folder) or "bytes"


def tokenizer_notes(config: Config, folder: str | None) -> list[str]:
    """A line for the log if the tokenizer is not that of the weights."""
    name, weights = config.data.tokenizer, _folder_of_weights(config, folder)
    if name is None or weights is None or name == weights:
        return []
    own = os.path.join(local_path(weights), TOKENIZER_FILE)
    chosen = os.path.expanduser(local_path(name))
    if os.path.isdir(chosen):
        chosen = os.path.join(chosen, TOKENIZER_FILE)
    if not os.path.isfile(own) or _is_same(own, chosen):
        return []
    return [
        f"the weights of {weights} come with a tokenizer of their own, and "
        f"data.tokenizer={name} gives the ids of tokens other meanings"
    ]


def _folder_of_weights(config: Config, folder: str | None) -> str | None:
    """The folder of a published model that the run begins with.

    Names that no file can have are names of no folder; what reads them says so.
    """
    given = config.training.init_from or folder
    if given is None:
        return None
    if given.startswith(PREFIX):
        return given
    path = os.path.expanduser(given)
    path = path if os.path.isdir(path) else os.path.dirname(path) or "."
    return path if os.path.isfile(os.path.join(path, CONFIG_FILE)) else None


def _is_same(own: str, chosen: str) -> bool:
    return os.path.isfile(chosen) and filecmp.cmp(own, chosen, shallow=False)
