"""Configuration of Medusa's heads."""

from __future__ import annotations

import json
import pickletools
import re
import struct
import zipfile
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Field

from forethought.config.drafters import DEFAULT_NODES, FORMER_TREE_NAME
from forethought.config.speculation import (
    MAX_LEVELS,
    DecodingBaseConfig,
)
from forethought.config.tree import TreePaths, all_nodes
from forethought.errors import ModelError
from forethought.model_dir import find_model_dir

MEDUSA_CHOICES: tuple[tuple[int, ...], ...] = all_nodes(
    [
        *((0, 0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 2, 0), (0, 3)),
        *((1, 0, 0), (1, 1), (2, 0, 0), (3, 0), (4,), (5,)),
    ]
)
"""A tree of 24 nodes: the best one if a head's top-ranked tokens are right at 60, 14, 7, 4, 2 and 2
of 100 positions, and each further head at 12 % fewer."""


class MedusaDecodingConfig(DecodingBaseConfig):
    """Drafts come from heads beside the target's own, each predicting one token further on.

    Medusa (Cai et al., 2024). See ``speculative.drafters.medusa``.
    """

    decoding_type: ClassVar[str] = "Medusa"
    uses_model: ClassVar[bool] = True
    branches: ClassVar[bool] = True

    name: str = Field(default="medusa", min_length=1)
    medusa_choices: TreePaths | None = None
    """The tree: paths of ranks; ``[1, 0]`` is the most probable token of the second head after the
    second most probable one of the first. See ``config.speculation``. None: the one in the heads'
    ``config.json``, or ``MEDUSA_CHOICES``."""
    tree: Annotated[Literal["choices", "most_probable"], FORMER_TREE_NAME] = "choices"
    """``choices``: a static tree, as published. ``most_probable``: in each step the nodes with the
    highest probability under the heads, as deep as there are heads; 15 tokens unless
    ``max_total_draft_tokens`` is given. It accepts more per verified token."""
    min_draft_probability: float = Field(default=0.0, ge=0.0, lt=1.0)
    """With ``most_probable``: leave out nodes whose path has less than this under the heads."""
    num_medusa_heads: int | None = Field(default=None, ge=1, le=MAX_LEVELS)
    """Number of heads to use; None: all."""
    posterior_threshold: float | None = Field(default=None, gt=0.0, le=1.0)
    """Typical acceptance: accept tokens of at least this probability under the target, or of less
    where its entropy is high. Changes the outputs of sampled requests, which are marked as lossy.
    None: exact acceptance. Medusa's authors use 0.09."""
    posterior_alpha: float | None = Field(default=None, gt=0.0)
    """Lowers that threshold to ``posterior_alpha * exp(-entropy)`` where this is less;
    None: the square root of ``posterior_threshold``."""

    def _settle_lengths(self) -> None:
        if self.posterior_alpha is not None and self.posterior_threshold is None:
            reason = "posterior_threshold is not given, and without it acceptance is exact"
            raise self._refuse("posterior_alpha", self.posterior_alpha, reason)
        if self.posterior_threshold is not None and self.posterior_alpha is None:
            self._set("posterior_alpha", self.posterior_threshold**0.5)
        if self.tree == "most_probable":
            self._settle_top()
        else:
            self._settle_choices()
        super()._settle_lengths()

    def _settle_top(self) -> None:
        """As deep as there are heads, unless ``max_draft_len`` is given."""
        if self.medusa_choices is not None:
            reason = "tree is 'most_probable', which builds another tree in each step"
            raise self._refuse("medusa_choices", self.medusa_choices, reason)
        heads = self.num_medusa_heads
        if heads is not None and self.max_draft_len > heads:
            reason = f"num_medusa_heads is {heads}"
            raise self._refuse("max_draft_len", self.max_draft_len, reason)
        directory = self._directory() if self.max_draft_len else None
        heads = None if directory is None else stored_heads(directory)
        if heads is not None and self.max_draft_len > heads:
            reason = f"{directory} holds {heads} heads, each for one token"
            raise self._refuse("max_draft_len", self.max_draft_len, reason)
        depth = self.max_draft_len or self._heads() or max(map(len, MEDUSA_CHOICES))
        self._set("max_draft_len", depth)
        default = max(DEFAULT_NODES, self.max_draft_len)
        self._set("max_total_draft_tokens", self.max_total_draft_tokens or default)

    def _settle_choices(self) -> None:
        """Take depth and size from the tree, which is truncated to the heads that are used."""
        if self.min_draft_probability:
            reason = "tree is 'choices', which always drafts all nodes"
            raise self._refuse("min_draft_probability", self.min_draft_probability, reason)
        choices = self.medusa_choices
        if choices is None:
            self._set("medusa_choices", self._default_tree())
        elif self.num_medusa_heads is not None and max(map(len, choices)) > self.num_medusa_heads:
            reason = f"a path of it is longer than num_medusa_heads, {self.num_medusa_heads}"
            raise self._refuse("medusa_choices", choices, reason)
        assert self.medusa_choices is not None
        self._settle_tree("medusa_choices", self.medusa_choices)

    @property
    def has_default_tree(self) -> bool:
        """Whether no tree was given, so that the default one is used."""
        return self.tree == "choices" and "medusa_choices" not in self.model_fields_set

    def _default_tree(self) -> tuple[tuple[int, ...], ...]:
        """The tree in the heads' ``config.json``, within ``max_draft_len`` and the heads used."""
        stored = self._stored().get("medusa_choices") or MEDUSA_CHOICES
        try:
            tree = pydantic.TypeAdapter(TreePaths).validate_python(stored)
        except pydantic.ValidationError as error:
            reason = f"the config.json in {self.speculative_model} holds no list of paths"
            raise self._refuse("medusa_choices", stored, reason) from error
        if all(tree):
            self._expect_closed("medusa_choices", tree)
        limits = [limit for limit in (self._heads(), self.max_draft_len) if limit]
        depth = min(limits, default=MAX_LEVELS)
        return tuple(path for path in all_nodes(tree) if len(path) <= depth)

    @property
    def drafts_chains(self) -> bool:
        """Whether no draft of it branches, however short."""
        return self.tree == "choices" and super().drafts_chains

    def _heads(self) -> int | None:
        """Number of heads that are used; None: not known before they are loaded.

        By the weights, since published configs are often wrong; by ``config.json`` where the
        weights cannot be read.
        """
        directory = self._directory()
        num_stored = None if directory is None else stored_heads(directory)
        if num_stored is None:
            stored = self._stored()
            listed = stored.get("medusa_num_heads", stored.get("num_heads"))
            num_stored = listed if isinstance(listed, int) and listed > 0 else None
        limits = [limit for limit in (self.num_medusa_heads, num_stored, MAX_LEVELS) if limit]
        return min(limits) if len(limits) > 1 else None

    def _stored(self) -> dict[str, Any]:
        """The heads' ``config.json``; empty if it cannot be read, which loading them reports."""
        directory = self._directory()
        if directory is None:
            return {}
        try:
            text = (directory / "config.json").read_text(encoding="utf-8")
            return dict(json.loads(text))
        except (OSError, ValueError):
            return {}

    def _directory(self) -> Path | None:
        """Directory of the heads; None: not given, or not found, which loading them reports."""
        if self.speculative_model is None:
            return None
        try:
            return find_model_dir(self.speculative_model, self.revision)
        except ModelError:
            return None


_HEAD = re.compile(r"(?:model\.)?(?:medusa_heads?\.)?(?:blocks\.|lm_heads\.)?(\d+)\.")
"""Prefix of the names of a head's tensors, in the authors' layout and in vLLM's."""


def stored_heads(directory: Path) -> int | None:
    """Number of heads in the weights of a directory, by the names of the tensors.

    Reads a few kilobytes; None: there are no weights, or in a format without readable names.
    """
    files = sorted(directory.glob("*.safetensors"))
    files = files or sorted(directory.glob("pytorch_model*.bin")) or sorted(directory.glob("*.pt"))
    try:
        names = [name for file in files for name in _tensor_names(file)]
    except (OSError, ValueError, KeyError, struct.error, zipfile.BadZipFile):
        return None
    heads = [int(match[1]) for name in names if (match := _HEAD.match(name))]
    return 1 + max(heads) if heads else None


def _tensor_names(file: Path) -> list[str]:
    """Names of the tensors in a safetensors file, or in a file that ``torch.save`` wrote: a zip
    archive with a pickle, which is searched for its strings and not executed.
    """
    if file.suffix == ".safetensors":
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            if size > file.stat().st_size:
                raise ValueError(f"{file} is cut short")
            return [str(name) for name in json.loads(stream.read(size))]
    with zipfile.ZipFile(file) as archive:
        pickled = next((name for name in archive.namelist() if name.endswith("/data.pkl")), "")
        operations = pickletools.genops(archive.read(pickled))
        return [argument for _, argument, _ in operations if isinstance(argument, str)]
