"""Attention of a layer that learns on its own guesses: several depths over one text.

Row t of the first depth sees rows 0 to t, as ever. Row t of a later depth stands for what follows
row t of the depth before: it sees rows 0 to t of the first depth, and of each later one row t
alone, its own last. That is what a module sees when it is replayed behind a known text (the
"training-time test" of EAGLE-3, arXiv 2503.01840). :func:`attend_unrolled` computes one such depth;
:class:`UnrolledKeys` is registered with transformers, so that any architecture's layer can learn
so. Knows nothing about losses.

[mtp] MTP modules for a target that was trained without: each place of a draft is learned at once.

At depth k (from 1) a module reads what depth k - 1 made of every position, with the token k places
further on, and guesses the one behind it (DeepSeek-V3, 2024, arXiv 2412.19437, section 2.2). Depth
k weighs ``decay ** (k - 1)``, all weights together 1. One module is trained as it will be replayed:
with positions that move on, on keys and values that it made of the target's states where these are
known, and of its own where not. Several modules have a depth each, and see their own depth only.
Knows nothing about the loop around it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from transformers import AttentionInterface

from forethought.config.drafters import MTPDecodingConfig
from forethought.errors import ModelError
from forethought.model.attention.base import Capability
from forethought.model.causal_lm import FINAL
from forethought.speculative.heads.mtp import MtpModule, Recycled, save_modules
from forethought.training.batches import TrainingBatch, TrainingBatches
from forethought.training.recipes.medusa import projection_of
from forethought.training.teacher import Teacher
from forethought.training.texts import Text
from forethought.training.trainer import ParameterGroup, TrainingSettings

ATTENTION = "forethought_unrolled"
KEYWORD = "forethought_unrolled"
"""The extra argument of a layer that carries the keys."""


Keys = tuple[Tensor, Tensor]
"""Keys ``[R, heads, rows, key_dim]``, and values ``[R, heads, rows, value_dim]``."""


def attend_unrolled(
    q: Tensor, past: Keys, own: Sequence[Keys], rows: Tensor, scale: float
) -> Tensor:
    """A later depth: query s sees rows 0 to ``rows[s]`` of the past, and row s of each of ``own``.

    On a CPU with torch's flash kernel, which never holds the scores of all pairs; elsewhere by
    :func:`attend_unrolled_reference`.

    Args:
        q: ``[R, heads, S, key_dim]``.
        past: of the first depth, W rows.
        own: of each later depth, this one included, S rows each.
        rows: int64 ``[S]``, rising, below W.
        scale: on the products.

    Returns:
        ``[R, heads, S, value_dim]``.
    """
    if q.device.type != "cpu" or q.shape[-1] != past[1].shape[-1]:
        return attend_unrolled_reference(q, past, own, rows, scale)
    flat = [tensor for pair in own for tensor in pair]
    mixed: Tensor = _FlashUnrolled.apply(q, *past, rows, scale, *flat)
    return mixed


def attend_unrolled_reference(
    q: Tensor, past: Keys, own: Sequence[Keys], rows: Tensor, scale: float
) -> Tensor:
    """The same with one softmax over all scores; see :func:`attend_unrolled`."""
    keys, values = past
    seen = torch.arange(keys.shape[2], device=q.device) <= rows[:, None]
    scores = [(q @ keys.transpose(-1, -2)).float().masked_fill(~seen, float("-inf"))]
    scores += [(q * k).sum(-1, keepdim=True).float() for k, _ in own]
    weights = (torch.cat(scores, -1) * scale).softmax(-1).to(values.dtype)
    mixed = weights[..., : keys.shape[2]] @ values
    for depth, (_, v) in enumerate(own, start=keys.shape[2]):
        mixed = mixed + weights[..., depth, None] * v
    return mixed


class _FlashUnrolled(torch.autograd.Function):
    """Blocks of the past through the flash kernel and ``own`` by hand, joined by log-sum-exp.

    With the joint log-sum-exp and output, the kernel's own backward gives a block's gradients of
    the joint softmax: it needs nothing else of the other scores (Dao et al., 2022, arXiv
    2205.14135, appendix B.2).
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, scale: float, *own: Tensor
    ) -> Tensor:
        blocks = _blocks(rows, k.shape[2], q.dtype)
        mixed, sums = [], []
        for block in blocks:
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *(q, *block.of(k, v), 0.0, block.causal), attn_mask=block.mask, scale=scale
            )
            mixed.append(out)
            sums.append(lse)
        scores = torch.stack([(q * key).sum(-1, dtype=torch.float32) for key in own[::2]]) * scale
        lse = torch.cat([torch.stack(sums), scores]).logsumexp(0)  # [R, heads, S]
        weights = (scores - lse).exp()  # [own, R, heads, S]
        shares = [*((each - lse).exp() for each in sums), *weights]
        out = torch.zeros_like(v[:, :, :1]).expand(*q.shape[:3], -1).contiguous()
        for share, value in zip(shares, [*mixed, *own[1::2]], strict=True):
            out.addcmul_(share.unsqueeze(-1).to(out.dtype), value)
        ctx.save_for_backward(q, k, v, out, lse, weights, *own)
        ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, weights, *own = ctx.saved_tensors
        given, scale = gradients[0].contiguous(), ctx.scale
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for block in ctx.blocks:
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *(given, q, *block.of(k, v), out, lse, 0.0, block.causal),
                attn_mask=block.mask,
                scale=scale,
            )
            for whole, part in zip((dq, *block.of(dk, dv)), parts, strict=True):
                whole.add_(part)
        delta = (given * out).sum(-1, dtype=torch.float32)
        found: list[Tensor] = []
        for weight, key, value in zip(weights, own[::2], own[1::2], strict=True):
            along = (given * value).sum(-1, dtype=torch.float32) - delta
            score = (scale * weight * along).unsqueeze(-1).to(q.dtype)
            dq.addcmul_(score, key)
            found += [score * q, weight.unsqueeze(-1).to(q.dtype) * given]
        return dq, dk, dv, None, None, *found


class _Block(NamedTuple):
    """Rows of the past that the kernel reads in one call."""

    start: int
    stop: int
    causal: bool = False
    mask: Tensor | None = None
    """``[S, stop - start]``, added to the scores."""

    def of(self, *tensors: Tensor) -> list[Tensor]:
        """The block of tensors ``[R, heads, W, dim]``."""
        return [tensor[:, :, self.start : self.stop] for tensor in tensors]


def _blocks(rows: Tensor, width: int, dtype: torch.dtype) -> list[_Block]:
    """What queries at ``rows`` see of ``width`` rows.

    Where these are the last ones: those before them, and a triangle, half of which is computed.
    """
    first = width - len(rows)
    if int(rows[0]) == first:
        triangle = _Block(first, width, causal=True)
        return [_Block(0, first), triangle] if first else [triangle]
    seen = torch.arange(width) <= rows[:, None]
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, float("-inf"))
    return [_Block(0, width, mask=mask)]


class TrainingTimeTestKeys:
    """Keys and values of the depths so far, of one text in each of R rows."""

    def __init__(self) -> None:
        self._past: Keys | None = None
        self._own: list[Keys] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        """The next depth, of at most as many rows as the one before.

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
        self._own.append((k, v))
        own = [(k[:, :, :num_rows], v[:, :, :num_rows]) for k, v in self._own]
        rows = torch.arange(num_rows, device=q.device)
        return attend_unrolled(q, self._past, own, rows, scale or q.shape[-1] ** -0.5)


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


CHAIN = 5
"""Levels of the drafts by which one module is measured while it learns."""


class MtpSettings(TrainingSettings):
    """The loop's, and these."""

    modules: int = Field(default=1, ge=1)
    """One is replayed; of several, each has a place of its own."""
    depths: int = Field(default=3, ge=1)
    """Places that one module learns to guess; of several modules, as many as there are."""
    decay: float = Field(default=0.6, gt=0.0, le=1.0)
    """Each depth's weight, as a share of that of the one before."""
    recycled_state: Recycled = "normed"
    """What takes the target's state's place at the next depth."""
    labels: Literal["tokens", "laws"] = "laws"
    """Learn the tokens that stand there, or the target's law of each of them."""
    layout: Literal["deepseek", "mimo", "qwen"] = "deepseek"
    """Whose names the modules are written under, and whose order of inputs they have."""
    export_dtype: Literal["float32", "bfloat16"] = "bfloat16"


class MtpRecipe:
    """Modules for a target.

    Args:
        settings: sizes and weights of the losses.
        lessons: with the states behind the final norm.
        module: the modules, in float32, on the target's device.
        teacher: the target.
    """

    Settings = MtpSettings

    def __init__(
        self,
        settings: MtpSettings,
        lessons: TrainingBatches,
        module: nn.ModuleList,
        teacher: Teacher,
    ) -> None:
        self._settings, self._lessons, self._teacher = settings, lessons, teacher
        self.module, self._projection = module, projection_of(teacher)
        depths = settings.depths if len(module) == 1 else len(module)
        weights = [settings.decay**depth for depth in range(depths)]
        self._weights = [weight / sum(weights) for weight in weights]

    @classmethod
    def build(cls, settings: MtpSettings, texts: Sequence[Text], teacher: Teacher) -> MtpRecipe:
        """New modules.

        Raises:
            ModelError: the target's attention is of a kind that cannot be unrolled here.
        """
        lm = teacher.lm
        unknown = {Capability.SOFTCAP, Capability.SINKS}.intersection(
            *(layer.needs() for layer in lm.traits.layers[-1:])
        )
        if unknown:
            raise ModelError(
                "no MTP modules can be trained for this model",
                f"its attention has {', '.join(sorted(unknown))}",
                "Train another kind of drafter",
            )
        modules = [
            MtpModule.fresh(lm, settings.layout, settings.recycled_state)
            for _ in range(settings.modules)
        ]
        for module in modules:
            module.model.set_attn_implementation(ATTENTION)
        lessons = TrainingBatches(
            texts, teacher, [FINAL], tokens=settings.batch_tokens, seed=settings.seed
        )
        return cls(settings, lessons, nn.ModuleList(modules), teacher)

    @staticmethod
    def decoding(directory: Path) -> MTPDecodingConfig:
        """See ``recipes.table``."""
        return MTPDecodingConfig(max_draft_len=CHAIN, speculative_model=directory)

    def groups(self) -> list[ParameterGroup]:
        """All weights of the modules; embedding and projection are the target's."""
        return [ParameterGroup(list(self.module.parameters()))]

    def batch(self, step: int) -> TrainingBatch:
        """See :class:`~forethought.training.trainer.Recipe`."""
        return self._lessons(step)

    def loss(self, batch: TrainingBatch) -> Tensor:
        """Mean cross entropy at each depth in nats, weighted.

        At depth k row t has state t and token t + k, and guesses the token at t + k + 1.
        """
        states = batch.states[FINAL].float()
        rows, width = batch.tokens.shape
        keys, losses = TrainingTimeTestKeys(), list[Tensor]()
        for depth, weight in enumerate(self._weights, start=1):
            size = width - depth - 1  # rows whose label lies in the text
            if size < 1:
                break
            states = states[:, :size]
            replayed = len(self.module) == 1
            positions = torch.arange(size, device=states.device) + (depth - 1) * replayed
            left = self.module[0 if replayed else depth - 1](
                self._teacher.lm.embed(batch.tokens[:, depth : depth + size]).float(),
                states,
                positions.expand(rows, -1),
                **{KEYWORD: keys if replayed else TrainingTimeTestKeys()},
            )
            losses.append(weight * self._depth_loss(left.normed, batch, depth))
            states = left.states
        return torch.stack(losses).sum()

    def _depth_loss(self, normed: Tensor, batch: TrainingBatch, depth: int) -> Tensor:
        """normed ``[R, S, hidden]``, what left the module at one depth."""
        told = slice(depth, depth + normed.shape[1])  # where the laws of the guesses stand
        wanted = batch.taught[:, told.start + 1 : told.stop + 1]
        logits = nn.functional.linear(normed[wanted], self._projection).float()  # [N, vocab]
        if not len(logits):
            return logits.sum()
        if self._settings.labels == "tokens":
            labels = batch.tokens[:, told.start + 1 : told.stop + 1][wanted]
            return nn.functional.cross_entropy(logits, labels)
        choices, probs = batch.choices[:, told][wanted], batch.probs[:, told][wanted]
        surprise = logits.logsumexp(-1, keepdim=True) - logits.gather(-1, choices)
        return (probs * surprise).sum() / probs.sum()

    def save(self, directory: Path) -> None:
        """Write the modules, as they are numbered behind the target's layers."""
        dtype = getattr(torch, self._settings.export_dtype)
        first = self._teacher.lm.num_layers if self._settings.layout == "deepseek" else 0
        modules = [copy.deepcopy(module).to(dtype) for module in self.module]
        save_modules(modules, directory, self._settings.layout, first)
