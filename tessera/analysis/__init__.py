# SPDX-License-Identifier: Apache-2.0
"""Analyzes programs and arrays: layouts, communication, memory and cost.

    hlo, source_lines, trip_counts,
    executions, replica_groups      the text of a compiled program, as objects
    ledger                          every collective, with axes, bytes and source line
    memory                          bytes per device
    flops                           operations, counted on the jaxpr
    propagation                     the layout of every operation before partitioning
    peaks, cost                     what devices can do, and an estimate from all this
    layouts                         where the shards of tensors and trees are

It knows meshes and arrays, and nothing of graphs. Nothing here runs a program.
"""
