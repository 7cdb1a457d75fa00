# SPDX-License-Identifier: Apache-2.0
"""What a training run reads: text or made-up tokens, as shuffled batches of rows.

config         the settings
documents      which files, and which of them are for validation
tokenization   text -> ids and back
synthetic      ids without text
packing        documents -> one stream -> rows
batches        rows -> batches, by grain
corpus         all of it in order: ``load``
sampling       indices by epoch and process, for data sets of one's own
"""

from tessera._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
