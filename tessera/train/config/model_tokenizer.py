# SPDX-License-Identifier: Apache-2.0
"""Which tokenizer a run has: a folder of weights has its own."""

from pathlib import Path

from tessera.train.config.run_config import Config
from tessera.train.data.tokenizer_folder import TOKENIZER_FILE
from tessera.train.models.families.registry import CONFIG_FILE


def tokenizer_of(config: Config, folder: str | None) -> str | None:
    """``data.tokenizer``, or for null that of the weights' folder; else bytes.

    Args:
      config: The settings.
      folder: What ``model=<folder>`` names, if it names one.
    """
    if config.data.name == "synthetic" or config.data.tokenizer is not None:
        return config.data.tokenizer
    of_weights = _folder_of_weights(config, folder)
    return "bytes" if of_weights is None else str(of_weights)


def tokenizer_notes(config: Config, folder: str | None) -> list[str]:
    """A line for the log if the tokenizer is not that of the weights."""
    name, weights = config.data.tokenizer, _folder_of_weights(config, folder)
    if name is None or weights is None:
        return []
    own, chosen = weights / TOKENIZER_FILE, Path(name).expanduser()
    chosen = chosen / TOKENIZER_FILE if chosen.is_dir() else chosen
    if not own.is_file() or _is_same(own, chosen):
        return []
    return [
        f"the weights of {weights} come with a tokenizer of their own, and "
        f"data.tokenizer={name} gives the ids of tokens other meanings"
    ]


def _folder_of_weights(config: Config, folder: str | None) -> Path | None:
    """The folder of a published model that the run begins with."""
    given = config.training.init_from or folder
    if given is None:
        return None
    path = Path(given).expanduser()
    path = path if path.is_dir() else path.parent
    return path if (path / CONFIG_FILE).is_file() else None


def _is_same(own: Path, chosen: Path) -> bool:
    return chosen.is_file() and own.read_bytes() == chosen.read_bytes()
