# SPDX-License-Identifier: Apache-2.0
"""The trainer: configuration, data, optimizers, the loop, and what a person watches."""
