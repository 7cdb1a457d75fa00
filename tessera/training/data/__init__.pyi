# SPDX-License-Identifier: Apache-2.0
"""Where the names of this package come from; see ``tessera/_lazy.py``."""

from tessera.training.data.corpus import Corpus as Corpus
from tessera.training.data.corpus import load as load
from tessera.training.data.data_config import DataConfig as DataConfig
from tessera.training.data.data_config import SyntheticConfig as SyntheticConfig
from tessera.training.data.packing import Batch as Batch
from tessera.training.data.sampler import EpochSampler as EpochSampler
from tessera.training.data.tokenization import Tokenizer as Tokenizer
