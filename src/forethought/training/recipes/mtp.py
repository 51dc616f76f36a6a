"""MTP modules for a target that was trained without them: all depths of a draft at once.

At depth k (from 1) row t of the module reads what depth k - 1 returned for row t, and token t + k,
and predicts token t + k + 1 (DeepSeek-V3, 2024, arXiv 2412.19437, section 2.2). Depth k has weight
``decay ** (k - 1)``, normalised to a sum of 1. A single module is trained as it is replayed in
decoding: positions advance with the depth, and its attention is that of the "training-time test" of
EAGLE-3 (arXiv 2503.01840). Row t of the first depth sees rows 0 to t; row t of a later depth
follows row t of the depth before, and sees rows 0 to t of the first depth and row t alone of every
later one, its own last::

    depth 1   0 1 2 ... t
    depth 2             t    query row t of depth 3 sees these
    depth 3             t

:func:`attend_depth` computes one such depth, and :class:`TrainingTimeTestKeys` serves it to the
layers of any architecture through transformers' registry. Several modules have a depth each, and
see their own depth only. The target's own output projection predicts, of a large vocabulary by its
rows for the draft vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import AliasChoices, Field
from torch import Tensor, nn
from transformers import AttentionInterface
from typing_extensions import override

from forethought.config.drafters import MTPDecodingConfig
from forethought.errors import ModelError
from forethought.model.attention.base import Capability
from forethought.model.hidden_states import FINAL
from forethought.speculative.heads.mtp import (
    FedBackState,
    MtpModule,
    check_target,
    load_modules,
    save_modules,
)
from forethought.training.batches import TrainingBatch, TrainingBatches
from forethought.training.draft_vocabulary import DraftVocabulary, DraftVocabularySettings
from forethought.training.recipes.medusa import Labels, head_loss, labels_ahead
from forethought.training.teacher import Teacher
from forethought.training.texts import Text
from forethought.training.trainer import ParameterGroup, begin_with

ATTENTION = "forethought_training_time_test"
KEYWORD = "forethought_training_time_test"
"""Keyword argument of a layer that passes the keys on to attention."""


Keys = tuple[Tensor, Tensor]
"""Keys ``[R, heads, rows, key_dim]``, and values ``[R, heads, rows, value_dim]``."""


def attend_depth(
    q: Tensor, past: Keys, later: Sequence[Keys], rows: Tensor, scale: float
) -> Tensor:
    """A later depth: query s sees rows 0 to ``rows[s]`` of ``past``, and row s of each of
    ``later``.

    On a CPU with torch's flash kernel, which never holds the scores of all pairs; elsewhere by
    :func:`attend_depth_reference`.

    Args:
        q: ``[R, heads, S, key_dim]``.
        past: of the first depth, W rows.
        later: of each later depth, this one included, S rows each.
        rows: int64 ``[S]``, rising, below W.
        scale: on the products.

    Returns:
        ``[R, heads, S, value_dim]``.
    """
    if q.device.type != "cpu" or q.shape[-1] != past[1].shape[-1]:
        return attend_depth_reference(q, past, later, rows, scale)
    flat = [tensor for pair in later for tensor in pair]
    mixed: Tensor = _FlashDepth.apply(q, *past, rows, scale, *flat)
    return mixed


def attend_depth_reference(
    q: Tensor, past: Keys, later: Sequence[Keys], rows: Tensor, scale: float
) -> Tensor:
    """Reference implementation of :func:`attend_depth`: one softmax over all scores."""
    keys, values = past
    is_visible = torch.arange(keys.shape[2], device=q.device) <= rows[:, None]
    scores = [(q @ keys.transpose(-1, -2)).float().masked_fill(~is_visible, float("-inf"))]
    scores += [(q * k).sum(-1, keepdim=True).float() for k, _ in later]
    weights = (torch.cat(scores, -1) * scale).softmax(-1).to(values.dtype)
    mixed = weights[..., : keys.shape[2]] @ values
    for depth, (_, v) in enumerate(later, start=keys.shape[2]):
        mixed = mixed + weights[..., depth, None] * v
    return mixed


class _FlashDepth(torch.autograd.Function):
    """Blocks of the past through the flash kernel and ``later`` by hand, joined by log-sum-exp.

    With the joint log-sum-exp and output, the kernel's own backward gives a block's gradients of
    the joint softmax: it needs nothing else of the other scores (Dao et al., 2022, arXiv
    2205.14135, appendix B.2).
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, scale: float, *later: Tensor
    ) -> Tensor:
        blocks = _blocks(rows, k.shape[2], q.dtype)
        mixed, sums = [], []
        for block in blocks:
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *(q, *block.of(k, v), 0.0, block.causal), attn_mask=block.mask, scale=scale
            )
            mixed.append(out)
            sums.append(lse)
        scores = torch.stack([(q * key).sum(-1, dtype=torch.float32) for key in later[::2]]) * scale
        lse = torch.cat([torch.stack(sums), scores]).logsumexp(0)  # [R, heads, S]
        weights = (scores - lse).exp()  # [later, R, heads, S]
        shares = [*((block_lse - lse).exp() for block_lse in sums), *weights]
        out = torch.zeros_like(v[:, :, :1]).expand(*q.shape[:3], -1).contiguous()
        for share, value in zip(shares, [*mixed, *later[1::2]], strict=True):
            out.addcmul_(share.unsqueeze(-1).to(out.dtype), value)
        ctx.save_for_backward(q, k, v, out, lse, weights, *later)
        ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, weights, *later = ctx.saved_tensors
        gradient, scale = gradients[0].contiguous(), ctx.scale
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for block in ctx.blocks:
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *(gradient, q, *block.of(k, v), out, lse, 0.0, block.causal),
                attn_mask=block.mask,
                scale=scale,
            )
            for whole, part in zip((dq, *block.of(dk, dv)), parts, strict=True):
                whole.add_(part)
        delta = (gradient * out).sum(-1, dtype=torch.float32)
        later_gradients: list[Tensor] = []
        for weight, key, value in zip(weights, later[::2], later[1::2], strict=True):
            along = (gradient * value).sum(-1, dtype=torch.float32) - delta
            score = (scale * weight * along).unsqueeze(-1).to(q.dtype)
            dq.addcmul_(score, key)
            later_gradients += [score * q, weight.unsqueeze(-1).to(q.dtype) * gradient]
        return dq, dk, dv, None, None, *later_gradients


class _Block(NamedTuple):
    """Rows of the past in one call of the kernel."""

    start: int
    stop: int
    causal: bool = False
    mask: Tensor | None = None
    """``[S, stop - start]``, added to the scores."""

    def of(self, *tensors: Tensor) -> list[Tensor]:
        """The block of tensors ``[R, heads, W, dim]``."""
        return [tensor[:, :, self.start : self.stop] for tensor in tensors]


def _blocks(rows: Tensor, width: int, dtype: torch.dtype) -> list[_Block]:
    """What queries at ``rows`` see of ``width`` rows; of the last rows, a full block before them
    and a causal triangle.
    """
    first = width - len(rows)
    if int(rows[0]) == first:
        triangle = _Block(first, width, causal=True)
        return [_Block(0, first), triangle] if first else [triangle]
    is_visible = torch.arange(width) <= rows[:, None]
    mask = torch.zeros(is_visible.shape, dtype=dtype).masked_fill(~is_visible, float("-inf"))
    return [_Block(0, width, mask=mask)]


class TrainingTimeTestKeys:
    """Keys and values of the depths so far, for R texts."""

    def __init__(self) -> None:
        self._past: Keys | None = None
        self._later: list[Keys] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        """Attention of the next depth, which has at most as many rows as the one before.

        Args:
            q: ``[R, heads, S, key_dim]``, rotated, as is k.
            k: ``[R, kv_heads, S, key_dim]``.
            v: ``[R, kv_heads, S, value_dim]``.
            scale: on the products.

        Returns:
            ``[R, heads, S, value_dim]``.
        """
        grouped, num_rows = q.shape[1] // k.shape[1], q.shape[2]
        if grouped > 1:
            k, v = (x.repeat_interleave(grouped, 1) for x in (k, v))
        if self._past is None:
            self._past = k, v
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        self._later.append((k, v))
        later = [(k[:, :, :num_rows], v[:, :, :num_rows]) for k, v in self._later]
        rows = torch.arange(num_rows, device=q.device)
        return attend_depth(q, self._past, later, rows, scale or q.shape[-1] ** -0.5)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Serve one attention layer; see ``model.attention.interface.attend`` for the shapes."""
    keys: TrainingTimeTestKeys = kwargs[KEYWORD]
    return keys.attend(query, key, value, kwargs.get("scaling")).transpose(1, 2), None


AttentionInterface.register(ATTENTION, attend)


_EVALUATED_DRAFT_LEN = 5


class MtpSettings(DraftVocabularySettings):
    """The loop's settings, and these."""

    modules: int = Field(default=1, ge=1)
    """Number of modules. One is replayed for every depth; several have a depth each."""
    depths: int = Field(default=3, ge=1)
    """Number of depths that one module is trained for; several modules have one each."""
    decay: float = Field(default=0.6, gt=0.0, le=1.0)
    """Weight of a depth relative to that of the one before."""
    fed_back_state: FedBackState = Field(
        default="normed", validation_alias=AliasChoices("fed_back_state", "recycled_state")
    )
    """Output that is fed back as hidden state at the next depth."""
    labels: Labels = "distributions"
    """Learn the tokens of the texts, or the target's next-token distributions."""
    layout: Literal["deepseek", "mimo", "qwen"] = "deepseek"
    """Family whose tensor names and order of inputs the modules have."""
    export_dtype: Literal["float32", "bfloat16"] = "bfloat16"

    @override
    def check_target(self, teacher: Teacher) -> None:
        """Raises ModelError if a module cannot be made of the target's classes, or its attention
        has features that the training-time test lacks.
        """
        check_target(teacher.lm)
        unknown = {Capability.SOFTCAP, Capability.SINKS}.intersection(
            *(layer.needs() for layer in teacher.lm.traits.layers[-1:])
        )
        if unknown:
            raise ModelError(
                "no MTP modules can be trained for this model",
                f"its attention has {', '.join(sorted(unknown))}",
                "Train another kind of drafter",
            )


class MtpRecipe:
    """Modules in float32 for a target. Batches have the states after the final norm."""

    Settings = MtpSettings

    def __init__(
        self,
        settings: MtpSettings,
        batches: TrainingBatches,
        module: nn.ModuleList,
        teacher: Teacher,
    ) -> None:
        self._settings, self._batches, self._teacher = settings, batches, teacher
        self.module, self.target_dtype = module, teacher.lm.dtype
        token_map = getattr(module[0], "token_map", None)
        self._vocabulary = DraftVocabulary(teacher.lm.vocab_size, token_map, teacher.lm.device)
        self._projection = teacher.lm.output_projection(self._vocabulary.ids).float()
        depths = settings.depths if len(module) == 1 else len(module)
        weights = [settings.decay**depth for depth in range(depths)]
        self._weights = [weight / sum(weights) for weight in weights]

    @classmethod
    def build(cls, settings: MtpSettings, texts: Sequence[Text], teacher: Teacher) -> MtpRecipe:
        """New modules, or those of ``settings.start``.

        Raises ModelError as ``MtpSettings.check_target``, or if the modules to begin with are
        missing or others.
        """
        lm = teacher.lm
        settings.check_target(teacher)
        modules = [
            MtpModule.fresh(lm, settings.layout, settings.fed_back_state)
            for _ in range(settings.modules)
        ]
        token_map = DraftVocabulary.of(settings, texts, teacher).ids
        if settings.start is not None:
            read = nn.ModuleList(load_modules(settings.start, lm, fed_back=settings.fed_back_state))
            begin_with(nn.ModuleList(modules), read.state_dict(), settings.start)
            token_map = read[0].token_map
        for module in modules:
            module.token_map = token_map
            module.model.set_attn_implementation(ATTENTION)
        batches = TrainingBatches(
            texts, teacher, [FINAL], tokens=settings.batch_tokens, seed=settings.seed
        )
        return cls(settings, batches, nn.ModuleList(modules), teacher)

    @staticmethod
    def decoding(directory: Path) -> MTPDecodingConfig:
        """How to decode with the drafter that was saved in ``directory``."""
        return MTPDecodingConfig(max_draft_len=_EVALUATED_DRAFT_LEN, speculative_model=directory)

    def groups(self) -> list[ParameterGroup]:
        """All weights of the modules; embedding and projection are the target's."""
        return [ParameterGroup(list(self.module.parameters()))]

    def batch(self, step: int) -> TrainingBatch:
        """The batch of a step, counted from 0."""
        return self._batches(step)

    def loss(self, batch: TrainingBatch) -> Tensor:
        """Mean cross entropy at each depth in nats, weighted. At depth k row t has state t and
        token t + k, and predicts token t + k + 1.
        """
        states = batch.states[FINAL].float()
        rows, width = batch.tokens.shape
        keys, losses = TrainingTimeTestKeys(), list[Tensor]()
        for depth, weight in enumerate(self._weights, start=1):
            size = width - depth - 1  # rows whose label is in the text
            if size < 1:
                break
            states = states[:, :size]
            replayed = len(self.module) == 1
            positions = torch.arange(size, device=states.device) + (depth - 1) * replayed
            result = self.module[0 if replayed else depth - 1](
                self._teacher.lm.embed(batch.tokens[:, depth : depth + size]).float(),
                states,
                positions.expand(rows, -1),
                **{KEYWORD: keys if replayed else TrainingTimeTestKeys()},
            )
            labels = labels_ahead(batch, depth + 1, self._settings.labels, self._vocabulary)
            loss = head_loss(nn.Identity(), self._projection, result.normed, labels)
            losses.append(weight * loss)
            states = result.states
        return torch.stack(losses).sum()

    def save(self, directory: Path) -> None:
        """Write the modules, numbered from the target's last layer on where the layout says so."""
        dtype = getattr(torch, self._settings.export_dtype)
        first = self._teacher.lm.num_layers if self._settings.layout == "deepseek" else 0
        modules = [copy.deepcopy(module).to(dtype) for module in self.module]
        save_modules(modules, directory, self._settings.layout, first)
