# SPDX-License-Identifier: Apache-2.0
"""The report of a run, or of several compared: one HTML file that loads nothing.

    run_files, samples_file         what a run's folder says, also if lines are cut
    markup, charts                  escaped HTML, and charts by Plotly with their text
    summary, curves, history,
    samples, configuration          the sections
    page                            the whole file

Nothing here imports JAX. What a run's folder holds is text from elsewhere: a name, a
sample or a warning may be HTML, so that all text passes through ``markup.text``.
"""
