# SPDX-License-Identifier: Apache-2.0
"""Lets lm-evaluation-harness evaluate a run, or a folder of Hugging Face.

python -m tessera.train.commands.lm_eval run --model tessera \
    --model_args pretrained=outputs/mine --tasks arc_easy

It is the harness's command ``lm_eval`` with one more model. In Python, call
``register()`` before ``lm_eval.simple_evaluate(model="tessera", ...)``.
"""

import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from typing import Any

from tessera.errors import OperandError, TokenizerError
from tessera.train.data.chat_template import Conversation
from tessera.train.data.optional_libraries import import_extra
from tessera.train.runtime.exit_codes import shows_errors


@cache
def register() -> type:
    """Make the harness know the model ``tessera``; returns its class.

    Raises:
      OperandError: [T401] lm_eval is not installed.
    """
    base = import_extra("lm_eval.api.model", "a task", "eval", OperandError)
    registry = import_module("lm_eval.api.registry")
    adapter = type("TesseraLM", (HarnessMethods, base.TemplateLM), {})
    return registry.register_model("tessera")(adapter)


class HarnessMethods:
    """The methods of a ``TemplateLM``, which ``register`` adds them to.

    Args:
      pretrained: A run, its checkpoints, one of them, or a folder of Hugging Face.
      mesh: Sizes and axes, such as ``[[1,4],[fsdp,tp]]``; None is one device.
      module: A module that registers the model of the run.
      max_length: The most tokens that the model reads at a time; None is the length
        that it was trained on, or 2048.
      batch_size: Rows of one call.
      device: Not used, but the harness always passes one; ``mesh`` names devices.

    Raises:
      OperandError: [T401] a size is not a number above 0.
      TesseraError: As ``open_trained`` and ``mesh_of`` do.
    """

    cache_hook: Any

    def __init__(
        self,
        pretrained: str,
        mesh: str | None = None,
        module: str | None = None,
        max_length: int | None = None,
        batch_size: int | str = 1,
        device: str | None = None,
    ) -> None:
        del device
        # These import JAX.
        from tessera.train.loop.trained_model import mesh_of, open_trained

        super().__init__()
        self._mesh = mesh_of(mesh)
        self._trained = trained = open_trained(pretrained, [module] if module else [])
        self.max_length = _size("max_length", max_length or trained.max_length or 2048)
        self.batch_size = _size("batch_size", batch_size)
        self._params = trained.read(self._mesh)
        self._stops = trained.stop_tokens

    # --- texts

    @property
    def eot_token_id(self) -> int:
        """The token before a text that has no context.

        Raises:
          TokenizerError: [T605] the tokenizer has none.
        """
        separator = self._trained.tokenizer.separator
        if separator is None:
            raise TokenizerError(
                "a text without context needs a token before it",
                got="the tokenizer has neither a bos_token nor an eos_token",
                fix="name one in tokenizer_config.json",
            )
        return separator

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Token ids; None adds the tokens before a text unless the string has them.

        Names of special tokens are such, as in Transformers.
        """
        ids, prefix = self._trained.encode_special(string), [*self._trained.prefix]
        if add_special_tokens is None:
            add_special_tokens = ids[: len(prefix)] != prefix
        return [*prefix, *ids] if add_special_tokens else ids

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer, for the harness's cache of requests."""
        return self._trained.tokenizer_name

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The source of the tokenizer's chat template."""
        if not chat_template:
            return None
        return self._trained.chat.tokenizer.folder.chat_template

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation, whose turns then end what is generated."""
        if not add_generation_prompt:
            return self._trained.chat.render_unfinished(chat_history)
        conversation = Conversation(chat_history)
        self._stops = self._trained.chat_stop_tokens([conversation])
        return self._trained.chat.render(conversation)

    # --- requests

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_unused: Any
    ) -> list[tuple[float, bool]]:
        from tessera.train.loop.log_likelihood import log_likelihoods

        results = log_likelihoods(
            self._trained.model,
            self._params,
            [(context, continuation) for _, context, continuation in requests],
            max_length=self.max_length,
            batch_size=self.batch_size,
            mesh=self._mesh,
        )
        for (pair, _, _), result in zip(requests, results, strict=True):
            if pair is not None:
                self.cache_hook.add_partial("loglikelihood", pair, result)
        return results

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """The log-likelihood of whole texts, in the harness's windows."""
        windows = [[*self._windows(request.args[0])] for request in requests]
        scores = iter(
            self._loglikelihood_tokens([one for own in windows for one in own])
        )
        totals = [sum(next(scores)[0] for _ in own) for own in windows]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _windows(self, text: str) -> Iterator[tuple[None, list[int], list[int]]]:
        utils = import_module("lm_eval.utils")
        for window in utils.get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.eot_token_id,
            max_seq_len=self.max_length,
            context_len=1,
        ):
            yield None, *utils.make_disjoint_window(window)

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        """What follows each context, up to a stop text or token."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        texts: dict[int, str] = {}
        for group in groups.values():
            options = _options(requests[group[0]].args[1])
            most = self.max_length - options["sampling"]["num_tokens"]
            _size("max_length less the tokens that are generated", most)
            rows = {n: self.tok_encode(requests[n].args[0])[-most:] for n in group}
            for number, text in self._generate(rows, options).items():
                args = requests[number].args
                self.cache_hook.add_partial("generate_until", args, text)
                texts[number] = text
        return [texts[number] for number in range(len(requests))]

    def _generate(
        self, rows: dict[int, list[int]], options: dict[str, Any]
    ) -> dict[int, str]:
        """The texts of requests, by their numbers."""
        import jax
        import numpy as np

        from tessera.train.data.text_stream import TextStream, stream_texts
        from tessera.train.rollouts.sampler import Sampler

        stops, until = self._stops, options["until"]
        prompts, tokenizer = [*rows.values()], self._trained.tokenizer
        streams = [TextStream(tokenizer, row, until) for row in prompts]
        sampler = Sampler(
            self._trained.model,
            self._mesh,
            slots=self.batch_size,
            max_length=self.max_length,
            stop_tokens=stops,
            **options["sampling"],
        )
        tokens = sampler.stream(
            self._params,
            prompts,
            # A request's number gives its key: its text is the same in any batch.
            jax.vmap(jax.random.fold_in, (None, 0))(
                jax.random.key(0), np.array([*rows])
            ),
            is_ended=lambda row: streams[row].is_ended,
        )
        texts = [""] * len(rows)
        for row, text in stream_texts(tokens, streams, stops):
            texts[row] += text
        return dict(zip(rows, texts, strict=True))


def _options(given: dict[str, Any]) -> dict[str, Any]:
    """The stop texts, and the arguments of ``Sampler``.

    Raises:
      OperandError: [T401] there are others.
    """
    utils = import_module("lm_eval.models.utils")
    options = dict(utils.normalize_gen_kwargs(given))
    until = [text for text in options.pop("until") if text]
    is_sampled = options.pop("do_sample")
    sampling = {
        "num_tokens": options.pop("max_gen_toks"),
        "temperature": options.pop("temperature", 1.0) if is_sampled else 0.0,
        "top_k": options.pop("top_k", None) or None,
        "top_p": options.pop("top_p", None),
    }
    options.pop("temperature", None)
    if options:
        raise OperandError(
            "generation has no use for some of a task's arguments",
            got=", ".join(f"{name}={value}" for name, value in options.items()),
            fix="leave them out, or override them: --gen_kwargs",
        )
    return {"until": until, "sampling": sampling}


def _size(name: str, value: int | str) -> int:
    if not str(value).isdecimal() or int(value) < 1:
        raise OperandError(
            f"{name} is a number above 0", got=f"{value}", fix="use a larger number"
        )
    return int(value)


@shows_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the harness's command; the exit code."""
    register()
    sys.argv[1:] = sys.argv[1:] if arguments is None else arguments
    import_module("lm_eval.__main__").cli_evaluate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
