# SPDX-License-Identifier: Apache-2.0
"""What a step trains where it is not the next token.

preference_losses   of pairs of answers: DPO, IPO, ORPO, SimPO, KTO
policy_losses       of completions with rewards: GRPO and its relatives
"""
