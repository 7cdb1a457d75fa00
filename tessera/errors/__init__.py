# SPDX-License-Identifier: Apache-2.0
"""Every mistake a user can make, as a class with a stable code.

A message says what is wrong, what was got (with the arithmetic), and what to do:

    [T201] parameter 'up' cannot be split evenly over mesh axes ('tp',)
      got: shape (2560, 10242), dim 1 = 10242, axis size 4
      fix: use 10240 or 10244, or drop 'tp' from the spec
      docs: docs/errors/T201.md

The first digit of a code says what it is about, as the modules here do. ``assert`` is
for Tessera's own bugs.
"""

from tessera.errors.base import TesseraError as TesseraError
from tessera.errors.base import TesseraWarning as TesseraWarning
from tessera.errors.base import did_you_mean as did_you_mean
from tessera.errors.meshes import *
from tessera.errors.layouts import *
from tessera.errors.tracing import *
from tessera.errors.operations import *
from tessera.errors.settings import *
from tessera.errors.data import *
from tessera.errors.machine import *
from tessera.errors.checkpoints import *
