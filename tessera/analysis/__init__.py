# SPDX-License-Identifier: Apache-2.0
"""Analyzes programs and arrays: layouts, communication, memory and cost.

    hlo, source_lines               the text of a compiled program, as objects
    hlo_walk, dataflow,
    device_variance                 one walker: executions, definitions, uses, variance
    ledger                          every collective, with axes, bytes and source line
    memory                          bytes per device
    flops                           operations, counted on the jaxpr
    device_peaks, measured_times    peaks of devices, measured times
    loop_counts                     how often a program runs what it contains
    timeline/                       the predicted timeline of a step on its target
    inspection                      where blocks of arrays are

It knows meshes and arrays, and nothing of graphs. Nothing here runs a program.
"""
