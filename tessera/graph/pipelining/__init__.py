# SPDX-License-Identifier: Apache-2.0
"""Pipelines: schedules as tables, checked, and executed by one loop.

The names of the stub beside this file are public: those of schedules (``schedule``,
``custom``, ``Schedule``, ``Op``, ``Kind``, ``Placement``, ``stage_of``) and their
buffers (``allocate``), and the loop with what it runs (``Pipeline``, ``Stages``).
"""

from tessera._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
