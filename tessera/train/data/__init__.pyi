# SPDX-License-Identifier: Apache-2.0
"""Where the names of this package come from; see ``tessera/_lazy.py``."""

from tessera.train.data.corpus import Corpus as Corpus
from tessera.train.data.corpus import load as load
from tessera.train.data.data_config import DataConfig as DataConfig
from tessera.train.data.data_config import SyntheticConfig as SyntheticConfig
from tessera.train.data.packing import Batch as Batch
from tessera.train.data.sampler import EpochSampler as EpochSampler
from tessera.train.data.tokenization import Tokenizer as Tokenizer
