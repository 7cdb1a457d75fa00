# SPDX-License-Identifier: Apache-2.0
"""The functions that users decorate with or call: each compiles and runs a step.

``tessera/__init__.pyi`` and ``tessera/graph.py`` give them their public names.
"""
