# SPDX-License-Identifier: Apache-2.0
"""Coded error classes, one for each kind of user mistake.

A message says what is wrong, the offending values (with the arithmetic), and the fix:

    [T201] parameter 'up' cannot be split evenly over mesh axes ('tp',)
      got: shape (2560, 10242), dim 1 = 10242, axis size 4
      fix: use 10240 or 10244, or drop 'tp' from the spec
      docs: https://tessera-spmd.github.io/tessera/errors/T201.html

The first digit of a code is its topic, one module for each. ``assert`` is for bugs in
Tessera itself.
"""

from tessera.errors.base import TesseraError as TesseraError
from tessera.errors.base import TesseraWarning as TesseraWarning
from tessera.errors.base import did_you_mean as did_you_mean
from tessera.errors.base import nearest as nearest
from tessera.errors.base import nearest_multiples as nearest_multiples
from tessera.errors.base import printable as printable
from tessera.errors.meshes import *
from tessera.errors.layouts import *
from tessera.errors.tracing import *
from tessera.errors.operations import *
from tessera.errors.settings import *
from tessera.errors.data import *
from tessera.errors.machine import *
from tessera.errors.checkpoints import *
