# SPDX-License-Identifier: Apache-2.0
"""Where the names of this package come from; see ``tessera/_lazy.py``."""

from tessera.train.rollouts.completions import Completion as Completion
from tessera.train.rollouts.environments import Environment as Environment
from tessera.train.rollouts.environments import load_environment as load_environment
from tessera.train.rollouts.openai_server import OpenAIServer as OpenAIServer
from tessera.train.rollouts.openai_server import seeds_of as seeds_of
from tessera.train.rollouts.sampler import Sampler as Sampler
from tessera.train.rollouts.sampler import generate as generate
from tessera.train.rollouts.trajectories import Trajectory as Trajectory
from tessera.train.rollouts.trajectories import run_turns as run_turns
