# SPDX-License-Identifier: Apache-2.0
"""AutoGraph: Python control flow on traced values, by converting source."""
