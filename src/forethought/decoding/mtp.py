"""Drafts from multi-token prediction: how they are configured. Knows nothing about modules."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import AliasChoices, Field

from forethought.decoding.base import DecodingBaseConfig
from forethought.decoding.bounds import MOST_LEVELS


class MTPDecodingConfig(DecodingBaseConfig):
    """Drafts come from further layers that were trained with the target: multi-token prediction.

    DeepSeek-V3 (2024) and those who followed it. The modules lie in the target's own directory
    unless ``speculative_model`` names another. See ``speculative.drafters.mtp``.
    """

    decoding_type: ClassVar[str] = "MTP"
    uses_model: ClassVar[bool | None] = None

    name: str = Field(default="mtp", min_length=1)
    num_nextn_predict_layers: int | None = Field(default=None, ge=1, le=MOST_LEVELS)
    """Use at most so many of the modules; None: all there are. Where ``max_draft_len`` is left out,
    drafts are as long, or of one token: that is how TensorRT-LLM's files mean it."""
    use_mtp_vanilla: bool = False
    """Each place of a draft has keys and values of its own, even if only one module serves them
    all. Several modules always work so; otherwise a single one is replayed on what it said."""
    recycled_state: Literal["normed", "unnormed"] = "normed"
    """What the next guess reads in place of the target's state: what leaves the module's last norm,
    or what enters it. As the module was trained; the published ones are served in both ways."""
    use_relaxed_acceptance_for_thinking: bool = False
    """While a greedy request thinks, accept tokens that the target likes almost as well as its
    first choice. Changes its output, and marks it."""
    relaxed_topk: int = Field(default=1, ge=1)
    """The token must be among so many likeliest ones."""
    relaxed_delta: float = Field(default=0.0, ge=0.0)
    """How far it may lie behind the likeliest."""
    relaxed_rule: Literal["probability", "log_probability"] | None = None
    """What ``relaxed_delta`` is a difference of: TensorRT-LLM's kernels compare probabilities, its
    documentation speaks of their logarithms. Left out: ``log_probability``, which is documented,
    and the stricter one: what it accepts, ``probability`` accepts as well."""
    begin_thinking_phase_token: int = Field(
        default=128798,
        ge=0,
        validation_alias=AliasChoices("begin_thinking_phase_token", "BEGIN_THINKING_PHASE_TOKEN"),
    )
    """Token id that begins the thinking; unless said otherwise DeepSeek-R1's."""
    end_thinking_phase_token: int = Field(
        default=128799,
        ge=0,
        validation_alias=AliasChoices("end_thinking_phase_token", "END_THINKING_PHASE_TOKEN"),
    )
    """Token id that ends it."""

    def _settle_lengths(self) -> None:
        if self.max_draft_len == 0:
            self._set("max_draft_len", self.num_nextn_predict_layers or 1)
        if self.use_relaxed_acceptance_for_thinking and self.relaxed_rule is None:
            self._set("relaxed_rule", "log_probability")
        fields = type(self).model_fields
        names = ("relaxed_delta", "relaxed_rule", "relaxed_topk")
        relaxed = [name for name in names if getattr(self, name) != fields[name].default]
        if relaxed and not self.use_relaxed_acceptance_for_thinking:
            name = relaxed[0]
            reason = "without use_relaxed_acceptance_for_thinking acceptance is exact"
            raise self._refuse(name, getattr(self, name), reason)
        super()._settle_lengths()
