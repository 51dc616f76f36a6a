"""``PartialAnswer``: what has come of a streamed answer, and the request that goes on with it.

::

    prompt                          completion of prompt + text so far
    messages                        chat that continues an assistant's message: the text so far

The tokens of the text so far count: ``max_tokens`` is reduced by them, and the usage of the rest is
that of the whole answer. Another server tokenises this text again. That gives the tokens that the
first one has generated, unless the model has written a text in other tokens than its tokenizer
would, or the server leaves some of them out of the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from forethought.errors import UpstreamError
from forethought.scaffolding.sampling import derived_seed

_CHANGED = (
    "best_of",
    "echo",
    "frequency_penalty",
    "presence_penalty",
    "response_format",
    "suffix",
    "tools",
)
"""Fields that mean something else where a part of the answer is in the prompt."""
_UNCHANGED = frozenset(
    {
        "chat_template_kwargs",
        "include_stop_str_in_output",
        "min_p",
        "skip_special_tokens",
        "stop_token_ids",
        "top_k",
        "top_n_sigma",
        "xtc_probability",
        "xtc_threshold",
    }
)
"""Fields outside OpenAI's API that mean the same there; what others mean is not known."""
_LIMITS = ("max_tokens", "max_completion_tokens")
_LINE, _TOKEN = "A\n", "A"
"""What stands before a text whose tokens are counted in a message, so that no template cuts off its
first blanks; a text of one token.
"""


class PartialAnswer:
    """The part of the answer to a streamed request that has come.

    Args:
        fields: of the request.
        chat: whether it is a chat.
        continues_chats: whether the servers honour ``continue_final_message`` in chats.

    Attributes:
        text: that has come.
    """

    def __init__(
        self, fields: Mapping[str, Any], *, chat: bool, continues_chats: bool = False
    ) -> None:
        self.fields, self.chat, self.text = fields, chat, ""
        self._continues_chats = continues_chats
        self._num_tokens, self._num_continued = 0, 0
        self._spelled = ""
        """The text of the tokens whose log-probabilities have come."""
        self._num_scored = 0
        self._overlap = ""
        """The end of the text, which the rest begins with once more."""
        self._has_others = False
        """Whether something has come that is no text, such as a call or a thought."""
        self._finished: set[int] = set()

    @property
    def has_begun(self) -> bool:
        """Whether anything has come that cannot be taken back."""
        return bool(self.text) or self._has_others

    @property
    def is_complete(self) -> bool:
        """Whether all choices have ended, so that at most the usage is missing."""
        return len(self._finished) >= (self.fields.get("n") or 1)

    @property
    def limit(self) -> int | None:
        """The most tokens of the answer; None: the server chooses."""
        values = [self.fields.get(name) for name in _LIMITS]
        return next((value for value in values if value is not None), None)

    @property
    def num_scored(self) -> int | None:
        """Tokens of the text, where log-probabilities tell; None: they do not."""
        return self._num_scored or None

    def take(self, chunk: Any) -> Any:
        """Record a chunk; returns it as a part of the whole answer.

        Raises UpstreamError for a rest that does not begin as it has to.
        """
        try:
            for choice in getattr(chunk, "choices", None) or ():
                self._take_choice(choice)
            self._count_usage(getattr(chunk, "usage", None))
        except (AttributeError, TypeError):  # no chunk of the API, as its reader is going to say
            self._has_others = True
        return chunk

    def refusal(self) -> str | None:
        """Why another server cannot go on with the answer; None: it can."""
        names = [name for name in _CHANGED if self.fields.get(name) is not None]
        names += [name for name in self.fields.get("extra_body") or () if name not in _UNCHANGED]
        if (self.fields.get("n") or 1) > 1:
            return "it is one of several in the same request (n)"
        if names:
            return f"{', '.join(names)} would mean something else there"
        if self._has_others:
            return "a thought, a call of a tool or a refusal has come, which no request continues"
        if self.chat and not self._continues_chats:
            return "it is a chat, and the servers are not known to honour continue_final_message"
        if not self.chat and not isinstance(self.fields.get("prompt"), str):
            return "its prompt is token ids, and the answer so far is text"
        if not self.chat and self.limit is None:
            return "max_tokens is not set, so that the length of the rest is not known"
        if self._spelled and self._spelled != self.text:
            return "the log-probabilities of tokens have come whose text has not"
        if self.chat and self._spelled and self._blanks:
            return "the log-probabilities of the blanks at its end would come twice"
        if self._may_stop():
            return "its text ends with what may be the beginning of a stop string"
        return None

    def counting_prompts(self) -> list[dict[str, Any]]:
        """Two prompts, as fields of requests: the second is longer by the tokens of the text."""
        if not self.chat:
            return [{"prompt": self.fields["prompt"]}, self._prompt(self.text)]
        return [self._prompt(_LINE + _TOKEN), self._prompt(_LINE + self.text)]

    def num_counted(self, usages: Sequence[Any]) -> int | None:
        """Tokens of the text, by the usages of two answers to the counting prompts; None: these do
        not tell.
        """
        shorter, longer = (getattr(usage, "prompt_tokens", None) for usage in usages)
        return max(0, longer - shorter + self.chat) if shorter and longer else None

    def rest(self, num_tokens: int) -> dict[str, Any] | None:
        """The fields of the request that goes on; None: nothing is missing but the end.

        A seeded answer goes on with another seed, as the same one would draw the first samples
        again.

        Args:
            num_tokens: of the text so far.
        """
        self._num_tokens = num_tokens
        self._num_continued += 1
        self._overlap = self._blanks if self.chat else ""
        fields = {**self.fields, **self._prompt(self.text)}
        if fields.get("seed") is not None:
            fields["seed"] = derived_seed(fields["seed"], self._num_continued)
        for name in _LIMITS:
            if fields.get(name) is not None:
                fields[name] -= num_tokens
                if fields[name] <= 0:
                    return None
        return fields

    def end(self) -> Any:
        """The last chunk of an answer whose text is as long as it may be."""
        piece = {"delta": SimpleNamespace(content="")} if self.chat else {"text": ""}
        self._finished.add(0)
        last = SimpleNamespace(index=0, finish_reason="length", logprobs=None, **piece)
        return SimpleNamespace(id=None, choices=[last], usage=None)

    @property
    def _blanks(self) -> str:
        """At the end of the text."""
        return self.text[len(self.text.rstrip()) :]

    def _prompt(self, text: str) -> dict[str, Any]:
        """The prompt with ``text`` after it, as fields of a request."""
        if not self.chat:
            return {"prompt": self.fields["prompt"] + text}
        if not text.strip():
            return {"messages": self.fields["messages"]}
        last = {"role": "assistant", "content": text.rstrip()}
        body = {"add_generation_prompt": False, "continue_final_message": True}
        return {
            "messages": [*self.fields["messages"], last],
            "extra_body": {**(self.fields.get("extra_body") or {}), **body},
        }

    def _take_choice(self, choice: Any) -> None:
        if choice.finish_reason is not None:
            self._finished.add(choice.index)
        holder, name = choice, "text"
        if (delta := getattr(choice, "delta", None)) is not None:
            holder, name = delta, "content"
            others = ("tool_calls", "refusal", "reasoning", "reasoning_content")
            self._has_others |= any(getattr(delta, other, None) for other in others)
        text = getattr(holder, name)
        if text and self._overlap:
            text = self._without_overlap(text)
            setattr(holder, name, text)
        self.text += text or ""
        if (scores := getattr(choice, "logprobs", None)) is not None:
            tokens = [part.token for part in scores.content or ()] if self.chat else scores.tokens
            self._num_scored += len(tokens or ())
            self._spelled += "".join(tokens or ())

    def _without_overlap(self, text: str) -> str:
        length = min(len(text), len(self._overlap))
        if text[:length] != self._overlap[:length]:
            raise UpstreamError(
                "another server has gone on with the answer in another way",
                "the blanks at its end, which chat templates leave out, are others there",
            )
        self._overlap = self._overlap[length:]
        return text[length:]

    def _count_usage(self, usage: Any) -> None:
        """Make the usage of the rest that of the whole answer."""
        if usage and self._num_tokens:
            usage.prompt_tokens = max(0, usage.prompt_tokens - self._num_tokens)
            usage.completion_tokens += self._num_tokens

    def _may_stop(self) -> bool:
        stops = self.fields.get("stop") or ()
        stops = [stops] if isinstance(stops, str) else stops
        return any(_ends_within(self.text, stop) for stop in stops)


def _ends_within(text: str, stop: str) -> bool:
    """Whether a text ends with a beginning of a stop string."""
    return any(text.endswith(stop[:length]) for length in range(1, len(stop)))
