"""EAGLE-3: the head is trained on its own outputs, as it is used ("training-time test").

Li et al., 2025 (arXiv 2503.01840): after the first step on the target's hidden states, the head
takes several steps on its own output states. Each step's logits have the target's distribution at
that position as label, with weight ``step_decay ** step``. Distributions are restricted to the
draft vocabulary, the most frequent tokens of the answers; positions where the target's most
probable token is not in it are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import pydantic
import torch
import torch.nn.functional as F
from pydantic import AliasChoices, Field
from torch import Tensor
from transformers import LlamaConfig

from forethought.config.drafters import EagleDecodingConfig
from forethought.config.speculation import DecodingBaseConfig
from forethought.speculative.heads.eagle3 import (
    Eagle3Head,
    Eagle3Traits,
    Layout,
    default_layer_ids,
    rising,
)
from forethought.speculative.heads.layers import head_dim, rotary_tables
from forethought.training.batches import TrainingBatch, TrainingBatches
from forethought.training.cross_entropy import projected_cross_entropy
from forethought.training.draft_vocabulary import (
    MAX_TOKENS,
    DraftVocabulary,
    DraftVocabularySettings,
    frequent_tokens,
)
from forethought.training.llama import rotate
from forethought.training.recipes.mtp import Keys, attend_depth
from forethought.training.teacher import Teacher
from forethought.training.texts import Text
from forethought.training.trainer import ParameterGroup, begin_with, seeded

_EVALUATED_DRAFT_LEN = 7


class Eagle3Settings(DraftVocabularySettings):
    """The loop's settings, and these; sizes that are left out are the target's."""

    ttt_length: int = Field(
        default=7, ge=1, validation_alias=AliasChoices("ttt_length", "unrolled")
    )
    """Number of steps of the training-time test, the first one on the target's states."""
    step_decay: float = Field(default=0.8, gt=0.0, le=1.0)
    """Weight of a step relative to that of the one before."""
    ttt_share: float = Field(
        default=1.0, gt=0.0, le=1.0, validation_alias=AliasChoices("ttt_share", "unrolled_share")
    )
    """Share of the positions, random in each batch, at which steps after the first are taken."""
    distribution_width: int = Field(default=32, ge=1)
    """Number of the target's top-k probabilities that are learned from."""
    draft_vocab_size: int | None = Field(default=None, ge=1)
    """Maximum size of the draft vocabulary, the answers' most frequent tokens; None: 8,192."""
    layer_ids: tuple[int, ...] | None = Field(
        default=None, validation_alias=AliasChoices("layer_ids", "places")
    )
    """Indices of the hidden states that the head reads, each the one that enters a layer, -1 after
    the final norm; None: as in the paper's code."""
    hidden_size: int | None = Field(default=None, ge=1)
    """If it is not the target's, the head learns an embedding of its own."""
    intermediate_size: int | None = Field(default=None, ge=1)
    num_attention_heads: int | None = Field(default=None, ge=1)
    num_key_value_heads: int | None = Field(default=None, ge=1)
    norm_before_residual: bool = False
    norm_output: bool = False
    layout: Layout = "eagle3"
    """Layout of the exported directory."""
    export_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of the exported weights."""
    runs_in_float32: bool = False
    """Whatever their dtype and the target's: small heads are faster so on a CPU."""

    @pydantic.field_validator("layer_ids", mode="after")
    @classmethod
    def _rising(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """Heads are served with states in rising order of layers, whatever was written."""
        if value is not None and (not value or len(set(value)) < len(value)):
            raise ValueError("they are one or more different layers")
        return value and rising(value)


class Eagle3Recipe:
    """A head, for ``training.trainer``."""

    Settings = Eagle3Settings

    def __init__(self, teacher: Teacher, texts: Sequence[Text], settings: Eagle3Settings) -> None:
        self._teacher, self._settings = teacher, settings
        lm = teacher.lm
        self._layer_ids = settings.layer_ids or default_layer_ids(lm.num_layers)
        with seeded(settings.seed):
            self._head = _first_head(teacher, texts, settings)
        self._head.traits = replace(self._head.traits, layer_ids=self._layer_ids)
        self._head.to(lm.device)
        self._vocabulary = DraftVocabulary(lm.vocab_size, self._head.ids, lm.device)
        self.target_dtype = lm.dtype
        self._rotary = rotary_tables(
            self._head.config, lm.max_positions + settings.ttt_length, self._head.fc.weight
        )
        self._batches = TrainingBatches(
            texts,
            teacher,
            self._layer_ids,
            tokens=settings.batch_tokens,
            seed=settings.seed,
            width=settings.distribution_width,
        )

    @classmethod
    def build(
        cls, settings: Eagle3Settings, texts: Sequence[Text], teacher: Teacher
    ) -> Eagle3Recipe:
        """The recipe that ``settings`` describe, its initial weights drawn here."""
        return cls(teacher, texts, settings)

    @staticmethod
    def decoding(directory: Path) -> DecodingBaseConfig:
        """How to decode with the drafter that was saved in ``directory``."""
        return EagleDecodingConfig(max_draft_len=_EVALUATED_DRAFT_LEN, speculative_model=directory)

    @property
    def module(self) -> Eagle3Head:
        """The head."""
        return self._head

    def groups(self) -> list[ParameterGroup]:
        """All weights of the head."""
        return [ParameterGroup(list(self._head.parameters()))]

    def batch(self, step: int) -> TrainingBatch:
        """The batch of a step, counted from 0."""
        return self._batches(step)

    def loss(self, batch: TrainingBatch) -> Tensor:
        """Cross entropy in nats, summed over the steps with their weights."""
        loss, device = self._head.fc.weight.new_zeros(()), self._head.fc.weight.device.type
        # All in one dtype: conversions around a product take longer than the product.
        mixed = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if mixed else torch.float32
        with torch.autocast(device, enabled=False):
            for step, (positions, exits) in enumerate(self.predictions(batch, dtype)):
                read = positions + 1 + step
                distribution = restricted(
                    _at(batch.choices, read), _at(batch.probs, read), self._vocabulary
                )
                learned = _at(batch.taught, read + 1) & distribution.has_label
                weight = self._settings.step_decay**step
                loss = loss + weight * self._step_loss(exits, distribution, learned)
        return loss

    def _step_loss(self, exits: Tensor, target: Restricted, learned: Tensor) -> Tensor:
        """Mean cross entropy over the positions that are ``learned`` (bool ``[R, S]``), in nats; 0
        without any.
        """
        total = projected_cross_entropy(
            exits[learned],
            self._head.lm_head.weight,
            target.rows[learned],
            target.probs[learned],
        )
        return total / learned.sum().clamp_min(1)

    def predictions(
        self, batch: TrainingBatch, dtype: torch.dtype = torch.float32
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each step positions t, int64 ``[S]``, and inputs of the output projection ``[R, S,
        hidden]``.

        Step 0 reads state t and token t + 1 at position t; step i reads its own output of step i -
        1 for position t, and token t + 1 + i, and predicts token t + 2 + i.
        """
        captured = torch.cat([batch.states[layer] for layer in self._layer_ids], -1)
        states = self._head.fuse(captured[:, :-2].to(dtype))
        positions = torch.arange(states.shape[1], device=states.device)
        attention = TrainingTimeTestAttention(self._rotary)
        for step in range(self._settings.ttt_length):
            if step == 1:
                positions, states = self._sample(batch, positions, states)
            embedded = self._embed(_at(batch.tokens, positions + 1 + step)).to(dtype)
            states, exits = self._head.advance(embedded, states, partial(attention, positions))
            yield positions, exits

    def _embed(self, token_ids: Tensor) -> Tensor:
        """int64 ``[...]`` -> ``[..., hidden]``."""
        if self._head.traits.own_embedding:
            embedded: Tensor = self._head.embed_tokens(token_ids)
            return embedded
        return self._teacher.lm.embed(token_ids)

    def _sample(
        self, batch: TrainingBatch, positions: Tensor, states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Positions of the later steps: a share of those from which a label can be reached."""
        if self._settings.ttt_share == 1.0:  # all from which a later step reaches an answer
            first = int(batch.taught.any(0).int().argmax()) - 1 - self._settings.ttt_length
            return positions[max(0, first) :], states[:, max(0, first) :]
        useful = positions[batch.taught[:, 2:].any(0)]
        count = max(1, round(self._settings.ttt_share * len(useful)))
        chosen = useful[torch.randperm(len(useful), device=positions.device)[:count]].sort().values
        return chosen, states[:, chosen]

    def save(self, directory: Path) -> None:
        """Write the head."""
        dtype = getattr(torch, self._settings.export_dtype)
        written = Eagle3Head(self._head.config, self._head.traits)
        written.load_state_dict(self._head.state_dict())
        runs_in = torch.float32 if self._settings.runs_in_float32 else None
        target = str(self._teacher.directory)
        written.to(dtype).save(directory, self._settings.layout, target, runs_in)


class Restricted:
    """The target's top-k probabilities, restricted to the draft vocabulary.

    Attributes:
        rows: int64 ``[..., K]``, rows of the head's logits; 0 for what is not in the vocabulary.
        probs: float32 ``[..., K]``, summing to 1, or all 0.
        has_label: bool ``[...]``, whether the most probable token is in the vocabulary.
    """

    def __init__(self, rows: Tensor, probs: Tensor, has_label: Tensor) -> None:
        self.rows, self.probs, self.has_label = rows, probs, has_label


def restricted(choices: Tensor, probs: Tensor, vocabulary: DraftVocabulary) -> Restricted:
    """Restrict the target's most probable tokens, int64 ``[..., K]`` in falling order, with their
    probabilities, float32 ``[..., K]``, to the draft vocabulary.
    """
    rows, kept_probs = vocabulary.restrict(choices, probs)
    has_label = kept_probs[..., 0] > 0
    kept_probs = kept_probs / kept_probs.sum(-1, keepdim=True).clamp_min(1e-20)
    return Restricted(rows, kept_probs, has_label)


class TrainingTimeTestAttention:
    """Attention of the training-time test, one call per step.

    In the first step, position t sees positions 0 to t. In a later step it sees the same keys of
    the first step, and of each step since then its own alone, as in decoding; see ``recipes.mtp``.
    ``rotary`` are cosines and sines ``[positions, head_dim]``.
    """

    def __init__(self, rotary: tuple[Tensor, Tensor]) -> None:
        self._cos, self._sin = rotary
        self._past: Keys | None = None
        self._later_keys: list[Keys] = []

    def __call__(self, positions: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with q, k, v ``[R, S, heads or kv_heads, head_dim]``; see
        ``speculative.heads.layers.Attend``.

        ``positions``, int64 ``[S]``, rise: all of the first step, and the same subset from the
        second step on.
        """
        rotated = positions + len(self._later_keys) + (self._past is not None)
        q, k = self._rotate(q, rotated), self._rotate(k, rotated)
        grouped = q.shape[2] // k.shape[2]
        if grouped > 1:
            k, v = (x.repeat_interleave(grouped, 2) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [R, heads, S, head_dim]
        if self._past is None:
            self._past = k, v
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            self._later_keys.append((k, v))
            mixed = attend_depth(q, self._past, self._later_keys, positions, q.shape[-1] ** -0.5)
        return mixed.transpose(1, 2)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = (table[positions, None].to(x.dtype) for table in (self._cos, self._sin))
        return rotate(x, cos, sin)


def _first_head(teacher: Teacher, texts: Sequence[Text], settings: Eagle3Settings) -> Eagle3Head:
    """The head of ``settings.start``, with its draft vocabulary, or an untrained one."""
    if settings.start is None:
        size = settings.draft_vocab_size or MAX_TOKENS
        return new_head(teacher, frequent_tokens(texts, size), settings)
    read = Eagle3Head.load(settings.start)
    head = new_head(teacher, read.ids, settings)
    begin_with(head, read.state_dict(), settings.start)
    return head


def new_head(teacher: Teacher, vocabulary: Tensor, settings: Eagle3Settings) -> Eagle3Head:
    """An untrained head in float32."""
    lm = teacher.lm
    target = lm.config.get_text_config(decoder=True)
    heads = settings.num_attention_heads or target.num_attention_heads
    hidden = settings.hidden_size or lm.hidden_size
    same_sizes = (heads, hidden) == (target.num_attention_heads, lm.hidden_size)
    config = LlamaConfig(
        vocab_size=lm.vocab_size,
        hidden_size=hidden,
        intermediate_size=settings.intermediate_size or _intermediate_size(target),
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=settings.num_key_value_heads or _num_key_value_heads(target),
        head_dim=head_dim(target) if same_sizes else None,
        max_position_embeddings=lm.max_positions,
        rms_norm_eps=getattr(target, "rms_norm_eps", 1e-6),
        rope_parameters=_plain_rope(target),
    )
    layer_ids = settings.layer_ids or default_layer_ids(lm.num_layers)
    traits = Eagle3Traits(
        draft_vocab_size=len(vocabulary),
        target_hidden_size=lm.hidden_size,
        captures=len(layer_ids),
        layer_ids=layer_ids,
        norm_before_residual=settings.norm_before_residual,
        norm_output=settings.norm_output,
        own_embedding=hidden != lm.hidden_size,
    )
    head = Eagle3Head(config, traits)
    for weight in head.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.02)
    if not traits.own_embedding:  # the head's projection begins as the target's
        with torch.no_grad():
            head.lm_head.weight.copy_(lm.output_projection(vocabulary.to(lm.device)))
    head.set_vocabulary(vocabulary)
    return head


def _intermediate_size(target: object) -> int:
    """Width of the target's feed-forward layers; 4 hidden sizes if its config has none."""
    size = getattr(target, "intermediate_size", None) or getattr(target, "ffn_dim", None)
    return int(size or 4 * target.hidden_size)  # type: ignore[attr-defined]


def _num_key_value_heads(target: object) -> int:
    """The target's; as many as query heads if its config has none."""
    num_heads = getattr(target, "num_key_value_heads", None)
    return int(num_heads or target.num_attention_heads)  # type: ignore[attr-defined]


def _plain_rope(target: object) -> dict[str, object]:
    """The target's rotary base, without its scaling, which a single layer does not need."""
    rope = getattr(target, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") or 10_000.0
    return {"rope_type": "default", "rope_theta": theta}


def _at(x: Tensor, positions: Tensor) -> Tensor:
    """x ``[R, W, ...]`` at ``positions`` [S] -> ``[R, S, ...]``; 0 after the end."""
    width = x.shape[1]
    rows = x[:, positions.clamp(max=width - 1)]
    beyond = (positions >= width).view(-1, *[1] * (x.ndim - 2))
    return rows.masked_fill(beyond, 0)
