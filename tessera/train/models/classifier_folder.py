# SPDX-License-Identifier: Apache-2.0
"""The folder of a sequence classifier with one label, such as a reward model."""

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np

from tessera.errors import ModelFolderError, WeightFileError, printable
from tessera.train.models.model_folder import ModelFolder

_SCORE: Final = "score.weight"


class ClassifierFolder(ModelFolder):
    """A decoder's folder that has ``score.weight`` ``[1, D]`` in place of a head.

    Transformers calls such classes ``XForSequenceClassification``. The decoder is that
    of the family; its configuration has a tied head, so that no head is looked for.

    Args:
      path: The folder.

    Raises:
      ModelFolderError: [T806] it is of a model of another kind or family.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        names = self.values.get("architectures")
        is_list = isinstance(names, list) and len(names) == 1
        if not (is_list and str(names[0]).endswith("ForSequenceClassification")):
            raise ModelFolderError(
                f"{path} is no sequence classifier",
                got=f"architectures = {printable(str(names), longest=80)}",
                fix="name a model whose class ends in ForSequenceClassification, as "
                "Transformers saves reward models with num_labels=1",
            )
        ignored = (*self.family.ignored, _SCORE)
        self.family = replace(self.family, ignored=ignored)
        self.config = replace(self.config, tied_head=True)

    @cached_property
    def score(self) -> np.ndarray:
        """The weights of the score, f32 ``[D]``.

        Raises:
          WeightFileError: [T805] there are none, or those of several labels.
        """
        whole, expected = ModelFolder(self.path), (1, self.config.d_model)
        dtype, shape = whole.arrays.get(_SCORE, ("nothing", ()))
        if shape != expected or dtype not in ("F32", "BF16", "F16"):
            raise WeightFileError(
                f"{self.path} does not have the weights of one score",
                got=f"{_SCORE}: {dtype}{[*shape]}, not F32{[*expected]}",
                fix="use a reward model, a classifier with one label (num_labels=1)",
            )
        return whole.view(_SCORE)[0].astype(np.float32)
