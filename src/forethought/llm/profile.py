"""``ModelProfile``: what a model's own files say of how it is to be used.

The markers of its thoughts are in its vocabulary or its chat template; the form of its calls of
tools is what the chat template writes for one.
"""

from __future__ import annotations

from dataclasses import dataclass

from forethought.llm.tokenizer import Tokenizer
from forethought.llm.tool_format import ToolFormat, tool_format_of


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """How a model is to be used.

    Attributes:
        thinking_markers: what opens and closes a thought; None: the model has no such markers.
        tool_format: how it writes calls of tools; None: as the tokenizer's response template says.
    """

    thinking_markers: tuple[str, str] | None
    tool_format: ToolFormat | None

    @classmethod
    def read(cls, tokenizer: Tokenizer, tool_format: str | None = None) -> ModelProfile:
        """The profile of the model of a tokenizer.

        Args:
            tool_format: name of the format, in the place of what the chat template writes.

        Raises:
            ParameterError: there is no such format.
        """
        return cls(tokenizer.thinking_markers, tool_format_of(tokenizer.hf, tool_format))
