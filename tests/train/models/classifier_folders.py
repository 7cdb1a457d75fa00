# SPDX-License-Identifier: Apache-2.0
"""Writes small reward models: a Gemma 3 with one score, and its tokenizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.train.data import chat_folders
from tests.train.models.published_folders import (
    GEMMA3,
    gemma3_tensors,
    tensor,
    write_folder,
)

CLASSIFIER: Mapping[str, Any] = {
    **GEMMA3,
    "architectures": ["Gemma3TextForSequenceClassification"],
    "vocab_size": 300,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 200,
    "id2label": {"0": "LABEL_0"},
}
SCORE = tensor("score.weight", (1, 16)) * 4


def write_classifier(
    folder: Path,
    values: Mapping[str, Any] = CLASSIFIER,
    tensors: Mapping[str, np.ndarray] | None = None,
    *,
    tokenizer: str = "gemma",
) -> Path:
    """The folder; ``tensors`` are in place of ``score.weight``."""
    tensors = {"score.weight": SCORE} if tensors is None else tensors
    write_folder(folder, {**gemma3_tensors(CLASSIFIER), **tensors}, values)
    return chat_folders.write_folder(folder, tokenizer, marked=False)
