# SPDX-License-Identifier: Apache-2.0
"""Predicts the timeline of a compiled step on the machine that it was compiled for.

work                            FLOPs and bytes of one operation, from its shapes
operation_times, transfers      seconds of operations, and of collectives on links
schedule                        the program as timed steps, in order of execution
simulation                      what overlaps and what is waited for
prediction                      ``timeline(program, mesh)``
timeline                        ``Timeline``, as a table
"""
