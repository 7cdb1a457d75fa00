# SPDX-License-Identifier: Apache-2.0
"""Makes a program for a mesh of a Python function, in three phases.

    function, step, pipelines,      what users decorate with or call: each compiles and
    distribute, kernel, jit, ...    runs a function
    tracer/                         1: a callable and arguments -> ``Graph`` (``ir``)
    passes/                         2: ``Graph`` -> ``Graph``, in the order of
                                    ``pass_runner.PASSES``
    lower/                          3: ``Graph`` -> ``jax.jit`` with ``NamedSharding``
    pipelining/                     what the pass that schedules pipelines is made of
    compile_stages                  an object for the result of each phase, as in
                                    ``jax.stages``

``from tessera import graph`` gives the names of the stub beside this file.
"""

from tessera._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
