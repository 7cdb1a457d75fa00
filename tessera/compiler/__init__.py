# SPDX-License-Identifier: Apache-2.0
"""The compiler: a Python function becomes a program for a mesh, in three phases.

1. ``trace``: a callable and its arguments -> ``Graph`` (``ir.py``).
2. ``passes``: ``Graph`` -> ``Graph``, in the order of ``pass_runner.PASSES``.
3. ``lower``: ``Graph`` -> ``jax.jit`` with ``NamedSharding``.

``compile_stages.py`` has an object for the result of each phase, like ``jax.stages``.
``pipelining`` is what the pass that schedules pipelines is made of.
"""
