# SPDX-License-Identifier: Apache-2.0
"""A run: built from its settings, then stepped through, watched and resumed."""
