# SPDX-License-Identifier: Apache-2.0
"""What a run records of itself over all of its attempts: events, and goodput."""
