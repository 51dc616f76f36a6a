"""What drafts for the embedded reasoner as installed: trained weights, and how far each gets."""

from __future__ import annotations

from typing import Any

from forethought.assets import drafter_dir, heads_dir, problems
from forethought.config.drafters import (
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    MTPDecodingConfig,
    PearlDecodingConfig,
    ReDrafterDecodingConfig,
)
from forethought.config.medusa import MedusaDecodingConfig
from forethought.config.speculation import DecodingBaseConfig
from forethought.training.chat_tokenizer import prompt_text

QUESTIONS = [prompt_text(problem["question"]) for problem in problems()[:8]]
"""Prompts that neither the reasoner nor what drafts for it was trained on."""
_EAGLE: dict[str, Any] = {"speculative_model": heads_dir("eagle3")}
_MTP: dict[str, Any] = {"speculative_model": heads_dir("mtp")}
_MODEL: dict[str, Any] = {"speculative_model": drafter_dir()}


def shipped(name: str) -> tuple[DecodingBaseConfig, float]:
    """A configuration, and the tokens per step that it reaches at least in short answers."""
    config, floor = {
        "eagle 3": lambda: (EagleDecodingConfig(max_draft_len=5, **_EAGLE), 3.6),
        "eagle 3, static tree": lambda: (
            EagleDecodingConfig(eagle_choices=[[0, 0, 0, 0], [1, 0, 0], [0, 1], [2, 0]], **_EAGLE),
            3.4,
        ),
        "eagle 3, dynamic tree": lambda: (
            EagleDecodingConfig(
                max_draft_len=5,
                use_dynamic_tree=True,
                dynamic_tree_max_topK=4,
                max_total_draft_tokens=15,
                **_EAGLE,
            ),
            4.2,
        ),
        "medusa": lambda: (MedusaDecodingConfig(speculative_model=heads_dir("medusa")), 2.5),
        "medusa, most probable": lambda: (
            MedusaDecodingConfig(speculative_model=heads_dir("medusa"), tree="most_probable"),
            3.1,
        ),
        "mtp, replayed": lambda: (MTPDecodingConfig(max_draft_len=5, **_MTP), 3.7),
        "mtp, one per place": lambda: (
            MTPDecodingConfig(max_draft_len=5, use_mtp_vanilla=True, **_MTP),
            3.2,
        ),
        "redrafter": lambda: (
            ReDrafterDecodingConfig(speculative_model=heads_dir("redrafter")),
            2.9,
        ),
        "redrafter, beams": lambda: (
            ReDrafterDecodingConfig(speculative_model=heads_dir("redrafter"), tree="beams"),
            2.1,
        ),
        "draft model": lambda: (DraftTargetDecodingConfig(max_draft_len=5, **_MODEL), 3.6),
        "draft model, drawn": lambda: (
            DraftTargetDecodingConfig(max_draft_len=5, draft_sampling="sampled", **_MODEL),
            3.6,
        ),
        "pearl": lambda: (PearlDecodingConfig(max_draft_len=4, **_MODEL), 2.3),
    }[name]()
    return config, floor


SHIPPED = (
    "eagle 3",
    "eagle 3, static tree",
    "eagle 3, dynamic tree",
    "medusa",
    "medusa, most probable",
    "mtp, replayed",
    "mtp, one per place",
    "redrafter",
    "redrafter, beams",
    "draft model",
    "draft model, drawn",
    "pearl",
)
POINTS = tuple(name for name in SHIPPED if name != "draft model, drawn")
"""Those whose drafts have no chance of their own: a seed draws the tokens of plain decoding."""
