# SPDX-License-Identifier: Apache-2.0
"""Reads files that anyone may have written, in bounded time and memory."""
