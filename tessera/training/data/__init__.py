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

from tessera.training.data.config import DataConfig as DataConfig
from tessera.training.data.config import SyntheticConfig as SyntheticConfig
from tessera.training.data.corpus import Corpus as Corpus
from tessera.training.data.corpus import load as load
from tessera.training.data.packing import NO_TARGET as NO_TARGET
from tessera.training.data.packing import Batch as Batch
from tessera.training.data.sampling import EpochSampler as EpochSampler
from tessera.training.data.tokenization import Tokenizer as Tokenizer
