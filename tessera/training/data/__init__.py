# SPDX-License-Identifier: Apache-2.0
"""The data of a training run: text or synthetic tokens in shuffled batches of rows.

data_config    the settings
documents      finds files and splits them into train and validation
formats        reads the texts of a file: plain text or JSON lines
tokenization   text -> ids and back
synthetic      generates ids without text
packing        documents -> one token stream -> rows
batches        rows -> batches, by grain
corpus         loads all of it: ``load``
cursor         the position in the data, for checkpoints
sampler        indices by epoch and process, for custom data sets
"""

from tessera._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
