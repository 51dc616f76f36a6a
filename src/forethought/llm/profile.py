"""``ModelProfile``: what a model's own files say of how it is to be used.

==================  ================================================================================
thoughts            markers in the vocabulary, or texts of the chat template; whether the template
                    opens one, and its switch
sampling defaults   ``generation_config.json``; of a GGUF file its own, or ollama's parameters
calls of tools      what the chat template writes for a call (``llm.tool_format``)
drafters inside     the names of the tensors: MTP modules
==================  ================================================================================
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, meta

from forethought.config.generation_config import not_honoured, sampling_defaults
from forethought.llm.reasoning import opens_thought
from forethought.llm.tokenizer import Tokenizer
from forethought.llm.tool_format import ToolFormat, tool_format_of
from forethought.model_dir import read_json
from forethought.speculative import registry

_SWITCHES = ("enable_thinking", "thinking", "reasoning_effort")
"""Arguments of chat templates that ask for thoughts."""
_ENVIRONMENT = Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=True)
"""Parses chat templates, and renders none."""
_HARMONY = ("<|channel|>analysis<|message|>", "<|end|>")
"""What opens and closes the thought of a model that writes messages in channels."""


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """How a model is to be used.

    Attributes:
        thinking_markers: what opens and closes a thought in its text; None: it has no such markers.
        opens_thought: whether the chat template opens a thought in front of an answer.
        thinking_switch: argument of the chat template that asks for thoughts; None: it has none.
        sampling: sampling fields that its maker advises; temperature 0 where it is to be greedy.
        not_honoured: fields of its ``generation_config.json`` that change what is drawn, and have
            no effect here.
        tool_format: how it writes calls of tools; None: as the tokenizer's response template says.
        drafters: drafters in its checkpoint, such as MTP modules: name -> what there is of it.
    """

    thinking_markers: tuple[str, str] | None
    opens_thought: bool
    thinking_switch: str | None
    sampling: Mapping[str, float]
    not_honoured: tuple[str, ...]
    tool_format: ToolFormat | None
    drafters: Mapping[str, str]

    @classmethod
    def read(
        cls, tokenizer: Tokenizer, directory: Path, tool_format: str | None = None
    ) -> ModelProfile:
        """The profile of the model in a directory.

        Args:
            tool_format: name of the format, in the place of what the chat template writes.

        Raises:
            ParameterError: there is no such format.
            ModelError: a file cannot be read.
        """
        form, markers = tool_format_of(tokenizer.hf, tool_format), tokenizer.thinking_markers
        file = directory / "generation_config.json"
        written = read_json(file) if file.is_file() else {}
        return cls(
            markers,
            markers is not None and opens_thought(_prompt(tokenizer), markers),
            _switch(tokenizer.template_text),
            sampling_defaults(written),
            not_honoured(written),
            form,
            registry.inside(directory),
        )

    @property
    def thinks(self) -> bool:
        """Whether the model writes thoughts."""
        return self.thinking_markers is not None or self._writes_messages

    @property
    def takes_effort(self) -> bool:
        """Whether the chat template is told by ``reasoning_effort`` how much to think, of a model
        without markers for a budget.
        """
        return self.thinking_markers is None and self.thinking_switch == "reasoning_effort"

    @property
    def _writes_messages(self) -> bool:
        return self.tool_format is not None and self.tool_format.reads_messages

    def to_dict(self) -> dict[str, Any]:
        """The profile as plain values, for reports."""
        markers = _HARMONY if self._writes_messages else self.thinking_markers
        return {
            "thinks": self.thinks,
            "thinking_markers": None if markers is None else list(markers),
            "opens_thought": self.opens_thought,
            "thinking_switch": self.thinking_switch,
            "answer": self._answer(),
            "sampling": dict(self.sampling),
            "sampling_not_honoured": list(self.not_honoured),
            "tool_format": None if self.tool_format is None else self.tool_format.name,
            "describes_tools": self.tool_format is None or bool(self.tool_format.shows_tools),
            "drafters": dict(self.drafters),
        }

    def _answer(self) -> str:
        """Where the answer stands in an output."""
        if self._writes_messages:
            return "the message in the channel final"
        if self.thinking_markers is not None:
            return f"after {self.thinking_markers[1]}"
        return "the whole text"


def _switch(template: str) -> str | None:
    """The argument of a chat template that asks for thoughts: a variable that it does not set."""
    try:
        variables = meta.find_undeclared_variables(_ENVIRONMENT.parse(template))
    except TemplateSyntaxError:  # a tag of transformers' own
        variables = {name for name in _SWITCHES if re.search(rf"(?<![.'\"\w]){name}\b", template)}
    return next((name for name in _SWITCHES if name in variables), None)


def _prompt(tokenizer: Tokenizer) -> str:
    """The end of a conversation in the chat template; empty if there is none."""
    try:
        return tokenizer.render([{"role": "user", "content": "?"}])
    except Exception:  # whatever a template raises
        return ""
