"""A variant of decoding that is measured: a drafter with a draft length, or plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forethought.config.drafters import (
    AutoDecodingConfig,
    DraftTargetDecodingConfig,
    NGramDecodingConfig,
    SuffixDecodingConfig,
)
from forethought.config.sampling import SpeculationParams
from forethought.config.speculation import DecodingBaseConfig
from forethought.errors import ParameterError


@dataclass(frozen=True, slots=True)
class Variant:
    """A drafter and its draft length."""

    drafter: str | None = None
    """By its name; None: plain decoding."""
    max_draft_len: int = 0
    """Levels of a draft."""

    @property
    def label(self) -> str:
        """Its name in reports."""
        return f"{self.drafter} {self.max_draft_len}" if self.drafter else "plain"

    @property
    def speculation(self) -> SpeculationParams:
        """The request parameter that selects it."""
        if self.drafter is None:
            return SpeculationParams(enabled=False)
        return SpeculationParams(max_draft_len=self.max_draft_len, drafter=self.drafter)


PLAIN = Variant()
"""The baseline."""


def default_configs(draft_model: Path | None = None) -> list[DecodingBaseConfig]:
    """The drafters without a model, one with goodput length control, and that of
    ``draft_model``.
    """
    configs: list[DecodingBaseConfig] = [
        NGramDecodingConfig(max_draft_len=8, max_matching_ngram_size=4, is_use_oldest=False),
        SuffixDecodingConfig(max_draft_len=8, max_spec_factor=4.0),
        SuffixDecodingConfig(
            name="suffix_goodput", max_draft_len=8, max_spec_factor=4.0, length_control="goodput"
        ),
    ]
    if draft_model is not None:
        model = DraftTargetDecodingConfig(max_draft_len=8, speculative_model=draft_model)
        configs.append(model)
    return configs


def settled(
    configs: Sequence[DecodingBaseConfig], max_batch_size: int, draft_model: Path | None = None
) -> tuple[DecodingBaseConfig, ...]:
    """The given drafters, or the default ones, with every length settled.

    A given drafter under goodput control has itself at fixed lengths beside it.

    Args:
        max_batch_size: of the engine, which ``AutoDecodingConfig`` goes by.
        draft_model: for the default ones.
    """
    return tuple(
        config.resolve(max_batch_size) if isinstance(config, AutoDecodingConfig) else config
        for config in _with_fixed(configs) or default_configs(draft_model)
    )


def _with_fixed(configs: Sequence[DecodingBaseConfig]) -> list[DecodingBaseConfig]:
    variants = []
    for config in configs:
        variants.append(config)
        if config.length_control == "goodput":
            fixed = {"name": f"{config.name}_fixed", "length_control": "fixed"}
            variants.append(config.model_copy(update=fixed))
    return variants


def variants_of(
    configs: Sequence[DecodingBaseConfig], lengths: Sequence[int] | None = None
) -> list[Variant]:
    """What to measure of the engine's drafters, plain decoding not among it.

    Args:
        lengths: draft lengths to try; None: each drafter's longest, its half and its quarter. A
            drafter that chooses its length itself, or drafts trees, is tried at its longest only.

    Raises:
        ParameterError: a length that no drafter can make.
    """
    longest = max(config.max_draft_len for config in configs)
    for length in lengths or ():
        if not 1 <= length <= longest:
            raise ParameterError(
                f"invalid draft length {length}",
                f"the longest drafts have {longest} levels",
                f"Use 1 to {longest}, or a configuration with a larger max_draft_len",
            )
    variants: dict[Variant, None] = {}  # as a set that keeps its order
    for config in configs:
        longest = config.max_draft_len
        fixed = config.length_control == "fixed" and config.drafts_chains
        tried = [longest // 4, longest // 2, longest] if lengths is None else lengths
        for length in tried if fixed else [longest]:
            if 1 <= length <= longest:
                variants[Variant(config.name, length)] = None
    return list(variants)


def written(
    variant: Variant, configs: Sequence[DecodingBaseConfig], max_concurrency: int | None = None
) -> dict[str, object] | None:
    """The ``speculative_config`` block of a YAML file for a variant; None for plain decoding.

    ``max_concurrency`` is written unless it is None or a schedule decides.
    """
    if variant == PLAIN:
        return None
    config = next(config for config in configs if config.name == variant.drafter)
    fields = {name: _plain(getattr(config, name)) for name in sorted(config.model_fields_set)}
    for name in config.length_aliases:
        fields.pop(name, None)
    fields["max_draft_len"] = variant.max_draft_len
    if config.drafts_chains:
        fields.pop("max_total_draft_tokens", None)  # as long as the draft
    schedule = config.draft_len_schedule
    if schedule is not None:
        cut = {batch: min(length, variant.max_draft_len) for batch, length in schedule.items()}
        fields["draft_len_schedule"] = cut
    elif max_concurrency is not None:
        fields["max_concurrency"] = max_concurrency
    return {"decoding_type": config.decoding_type, **fields}


def _plain(value: Any) -> object:
    """A value of YAML and JSON; a class of the user's as ``module:name``."""
    if isinstance(value, bool | int | float | str | dict | None):
        return value
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return f"{type(value).__module__}:{type(value).__qualname__}"
