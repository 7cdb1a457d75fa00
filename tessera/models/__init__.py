# SPDX-License-Identifier: Apache-2.0
"""Model families in flax.nnx, by name, and as trees of parameters with layouts."""

from tessera.models.config import Gemma3Config as Gemma3Config
from tessera.models.gemma3 import Gemma3 as Gemma3
from tessera.models.model import Model as Model
from tessera.models.registry import CONFIGS as CONFIGS
from tessera.models.registry import build as build
from tessera.models.registry import config_of as config_of
from tessera.models.rules import RULES as RULES
from tessera.models.rules import Placement as Placement
from tessera.models.sampling import generate as generate
