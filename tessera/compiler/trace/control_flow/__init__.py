# SPDX-License-Identifier: Apache-2.0
"""Python's control flow on traced values: converted source, and what it calls."""
