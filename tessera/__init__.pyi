# SPDX-License-Identifier: Apache-2.0
"""Where the public names of Tessera come from; see ``tessera/_lazy.py``."""

from tessera import amp as amp
from tessera import dist as dist
from tessera import distributed as distributed
from tessera import graph as graph
from tessera import mesh as mesh
from tessera import nn as nn
from tessera import op as op
from tessera import schedule as schedule
from tessera.annotations import Tensor as Tensor
from tessera.arrays import *
from tessera.debug.compare_layouts import compare_layouts as compare_layouts
from tessera.errors import TesseraError as TesseraError
from tessera.errors import TesseraWarning as TesseraWarning
from tessera.foundations.dtypes import *
from tessera.graph.distribute import distribute as distribute
from tessera.graph.jit import function as function
from tessera.graph.jit import function as jit
from tessera.graph.value_and_grad import grad as grad
from tessera.graph.value_and_grad import value_and_grad as value_and_grad
from tessera.mesh import Mesh as Mesh
from tessera.ops.clipping import clip_by_global_norm as clip_by_global_norm
from tessera.ops.clipping import global_norm as global_norm
from tessera.ops.gradient_accumulation import (
    accumulate_gradients as accumulate_gradients,
)
from tessera.ops.rematerialization import checkpoint as checkpoint
from tessera.ops.rematerialization import remat as remat
from tessera.shard import DistTensor as DistTensor
from tessera.shard import ShardSpec as ShardSpec
from tessera.tracing.casts import autocast as autocast
from tessera.version import __version__ as __version__
