# SPDX-License-Identifier: Apache-2.0
"""``TrajectoryWriter``: what a policy writes after prompts, and whoever answers it."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np

from tessera.analysis.memory import format_bytes
from tessera.errors import SettingConflictError
from tessera.foundations.tree import Tree
from tessera.train.data.chat_prompts import ChatPrompts
from tessera.train.data.chat_template import Conversation
from tessera.train.data.prompts import Prompt, PromptCorpus, stop_tokens
from tessera.train.loop.build_run import Run
from tessera.train.loop.policy_sampler import policy_sampler, sampling_mesh
from tessera.train.models.families.published_files import Published
from tessera.train.rollouts.completions import Completion
from tessera.train.rollouts.environments import Environments, load_environment
from tessera.train.rollouts.openai_server import OpenAIServer, seeds_of
from tessera.train.rollouts.resharding import moved_bytes
from tessera.train.rollouts.sampler import Sampler
from tessera.train.rollouts.server_weights import ServerWeights
from tessera.train.rollouts.trajectories import Trajectory, run_turns


class TrajectoryWriter:
    """Samples by the run's own sampler, or by a server; with or without an environment.

    Args:
      run: The run.
      corpus: Its prompts.
      columns: What environments are made from.
      published: The files of the folder that the run began with.

    Raises:
      SettingValueError: [T502] there is no such environment or kind of server.
      SettingConflictError: [T507] an environment has no messages to answer, or a server
        does not take the weights of the run.
      ServerError: [T721] there is no such server.
      TokenizerError: [T605] an environment needs a chat template.
    """

    def __init__(
        self,
        run: Run,
        corpus: PromptCorpus,
        columns: Sequence[str],
        published: Mapping[str, str],
    ) -> None:
        self._run, self._settings = run, run.config.grpo
        tokenizer, name = corpus.tokenizer, run.config.data.tokenizer_name
        (first,) = corpus.take(0, 1)
        self._stops = tuple(stop_tokens(tokenizer, name, first))
        self._environment, self._server, self._weights = None, None, None
        self.notes = list[str]()
        """Lines for the log of the run."""
        if (environment := self._settings.environment) is not None:
            self._environment = load_environment(environment, columns)
            self._chat = ChatPrompts(tokenizer, name)
            _messages_of(first)
        if (mesh := sampling_mesh(run)) is not run.mesh:
            moved = moved_bytes(run.model, run.mesh, mesh)
            self.notes.append(
                f"a rollout moves {format_bytes(moved.total)} of weights to "
                f"{mesh.topology}, at most {format_bytes(moved.most)} to one device"
            )
        if (url := self._settings.server) is not None:
            name, weights = self._settings.server_model, self._settings.server_weights
            if weights is None:
                self._server = OpenAIServer(url, name)
            else:
                given = run.model, Published.parse(published)
                self._weights = ServerWeights(weights, url, name, *given)

    def write(
        self,
        params: Tree,
        prompts: Sequence[Prompt],
        keys: jax.Array,
        should_continue: Callable[[], bool] = lambda: True,
    ) -> list[Trajectory]:
        """What follows each prompt.

        Args:
          params: Of the policy.
          prompts: One for each completion.
          keys: A random key for each.
          should_continue: Asked now and then.

        Raises:
          RolloutStopped: ``should_continue`` said no.
        """
        if self._weights is not None:
            self._server = self._weights.send(params)
        complete = partial(self._complete, params, should_continue)
        ids = [prompt.ids.tolist() for prompt in prompts]
        if self._environment is not None:
            makers = [
                partial(self._environment, **prompt.columns) for prompt in prompts
            ]
            return run_turns(
                complete,
                ids,
                [_messages_of(prompt) for prompt in prompts],
                Environments(makers),
                keys,
                self._chat,
                max_turns=self._settings.max_turns,
                max_tokens=self._settings.max_completion,
            )
        return [
            Trajectory(
                one.tokens, one.log_probs, np.ones(len(one.tokens), bool), one.ended
            )
            for one in complete(ids, keys)
        ]

    def _complete(
        self,
        params: Tree,
        should_continue: Callable[[], bool],
        prompts: list[list[int]],
        keys: jax.Array,
    ) -> list[Completion]:
        if self._server is None:
            return self._sampler.complete(
                params, prompts, keys, should_continue=should_continue
            )
        return self._server.complete(
            prompts,
            seeds_of(keys),
            num_tokens=self._settings.max_completion,
            temperature=self._settings.temperature,
            stop_tokens=self._stops,
        )

    @cached_property
    def _sampler(self) -> Sampler:
        return policy_sampler(self._run, self._stops)


def _messages_of(prompt: Prompt) -> Conversation:
    """The messages that an environment goes on with."""
    if (conversation := prompt.conversation) is None:
        raise SettingConflictError(
            "an environment answers messages",
            got=f"grpo.environment, and a prompt of text: {prompt.content!r:.60}",
            fix='write prompts as messages: [{"role": "user", "content": "…"}]',
        )
    return conversation


def answer_of(prompt: Prompt, after: Trajectory, tokenizer: Any) -> Any:
    """What follows a prompt as reward functions see it: a text, or messages."""
    if after.messages:
        return after.messages
    text = tokenizer.decode(after.tokens)
    if isinstance(prompt.content, str):
        return text
    return [{"role": "assistant", "content": text}]
