# SPDX-License-Identifier: Apache-2.0
"""Machines that programs are compiled and planned for, and that need not be there."""
