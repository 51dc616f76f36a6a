"""Drafts from Medusa's heads: how they are configured.

Of the heads it reads the ``config.json`` and the names of the tensors, which say how many heads
there are; the weights are loaded by the drafter.
"""

from __future__ import annotations

import json
import pickletools
import re
import struct
import zipfile
from pathlib import Path
from typing import Any, ClassVar, Literal

import pydantic
from pydantic import Field

from forethought.decoding.base import DecodingBaseConfig
from forethought.decoding.bounds import MOST_LEVELS
from forethought.decoding.tree_paths import TreePaths, all_nodes
from forethought.errors import ModelError
from forethought.model_dir import find_model_dir

MEDUSA_CHOICES: tuple[tuple[int, ...], ...] = all_nodes(
    [
        *((0, 0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 2, 0), (0, 3)),
        *((1, 0, 0), (1, 1), (2, 0, 0), (3, 0), (4,), (5,)),
    ]
)
"""A tree of 24 nodes: the best one where a head's first choices are right in 60, 14,
7, 4, 2 and 2 of 100 places, and each further head in 12 % fewer."""

USUAL_NODES = 15
"""Of a tree of the likeliest: with the root, as many rows as CPUs multiply at little cost."""


class MedusaDecodingConfig(DecodingBaseConfig):
    """Drafts come from heads beside the target's own, each of which guesses one token further on.

    Medusa (Cai et al., 2024). See ``speculative.drafters.medusa``.
    """

    decoding_type: ClassVar[str] = "Medusa"
    uses_model: ClassVar[bool] = True
    branches: ClassVar[bool] = True

    name: str = Field(default="medusa", min_length=1)
    medusa_choices: TreePaths | None = None
    """The tree: paths of ranks, ``[1, 0]`` being the likeliest token of the second head after the
    second likeliest of the first. See ``decoding.tree_paths``. None: as the heads' ``config.json``
    says, or one that suits most heads."""
    tree: Literal["choices", "likeliest"] = "choices"
    """``choices``: the same tree every time, as published. ``likeliest``: of what the heads hold
    the likeliest together as they stand, as deep as there are heads, and of 15 tokens unless
    ``max_total_draft_tokens`` says otherwise. It gets further with fewer tokens."""
    min_draft_probability: float = Field(default=0.0, ge=0.0, lt=1.0)
    """What the heads hold less likely than this, together with all before it, is left out of such a
    tree: verifying costs something, too."""
    num_medusa_heads: int | None = Field(default=None, ge=1, le=MOST_LEVELS)
    """How many heads to use; None: as many as there are."""
    posterior_threshold: float | None = Field(default=None, gt=0.0, le=1.0)
    """Accept what is typical of the target instead of what it would have drawn: tokens of at least
    this probability, or fewer where it is unsure. Changes the outputs of sampled requests, and
    marks them. None: exact. Medusa's authors use 0.09."""
    posterior_alpha: float | None = Field(default=None, gt=0.0)
    """How far unsureness lowers that threshold, ``posterior_alpha * exp(-entropy)`` being enough;
    None: the square root of ``posterior_threshold``."""

    def _settle_lengths(self) -> None:
        """Settle the tree as well, from which they follow."""
        if self.posterior_alpha is not None and self.posterior_threshold is None:
            reason = "posterior_threshold is not given, and without it acceptance is exact"
            raise self._refuse("posterior_alpha", self.posterior_alpha, reason)
        if self.posterior_threshold is not None and self.posterior_alpha is None:
            self._set("posterior_alpha", self.posterior_threshold**0.5)
        if self.tree == "likeliest":
            self._settle_likeliest()
        else:
            self._settle_choices()
        super()._settle_lengths()

    def _settle_likeliest(self) -> None:
        """As deep as there are heads, unless less is wanted."""
        if self.medusa_choices is not None:
            reason = "tree is 'likeliest', which is another one every time"
            raise self._refuse("medusa_choices", self.medusa_choices, reason)
        heads = self.num_medusa_heads
        if heads is not None and self.max_draft_len > heads:
            reason = f"num_medusa_heads is {heads}"
            raise self._refuse("max_draft_len", self.max_draft_len, reason)
        depth = self.max_draft_len or self._heads() or max(map(len, MEDUSA_CHOICES))
        self._set("max_draft_len", depth)
        usual = max(USUAL_NODES, self.max_draft_len)
        self._set("max_total_draft_tokens", self.max_total_draft_tokens or usual)

    def _settle_choices(self) -> None:
        """Depth and size are those of the tree, which is cut to the heads that are used."""
        if self.min_draft_probability:
            reason = "tree is 'choices', whose nodes are all tried"
            raise self._refuse("min_draft_probability", self.min_draft_probability, reason)
        given = self.medusa_choices
        if given is None:
            self._set("medusa_choices", self._default_tree())
        elif self.num_medusa_heads is not None and max(map(len, given)) > self.num_medusa_heads:
            reason = f"a path of it is longer than num_medusa_heads, {self.num_medusa_heads}"
            raise self._refuse("medusa_choices", given, reason)
        assert self.medusa_choices is not None
        self._settle_tree("medusa_choices", self.medusa_choices)

    @property
    def has_usual_tree(self) -> bool:
        """Whether the tree is the one that it chooses itself where none is given."""
        return self.tree == "choices" and "medusa_choices" not in self.model_fields_set

    def _default_tree(self) -> tuple[tuple[int, ...], ...]:
        """What the heads' own configuration says, within the wanted depth and heads."""
        stored = self._stored().get("medusa_choices") or MEDUSA_CHOICES
        try:
            tree = pydantic.TypeAdapter(TreePaths).validate_python(stored)
        except pydantic.ValidationError as error:
            reason = f"the config.json in {self.speculative_model} holds no list of paths"
            raise self._refuse("medusa_choices", stored, reason) from error
        if all(tree):
            self._expect_closed("medusa_choices", tree)
        limits = [limit for limit in (self._heads(), self.max_draft_len) if limit]
        most = min(limits, default=MOST_LEVELS)
        return tuple(path for path in all_nodes(tree) if len(path) <= most)

    @property
    def drafts_chains(self) -> bool:
        """Whether no draft of it branches, however short."""
        return self.tree == "choices" and super().drafts_chains

    def _heads(self) -> int | None:
        """How many are used: what is wanted, of what the weights hold; None if nobody knows.

        Published configs are often wrong about it, and count where the weights cannot be read.
        """
        directory = self._directory()
        found = None if directory is None else stored_heads(directory)
        if found is None:
            stored = self._stored()
            said = stored.get("medusa_num_heads", stored.get("num_heads"))
            found = said if isinstance(said, int) and said > 0 else None
        limits = [limit for limit in (self.num_medusa_heads, found, MOST_LEVELS) if limit]
        return min(limits) if len(limits) > 1 else None

    def _stored(self) -> dict[str, Any]:
        """The heads' ``config.json``; whether there has to be one is for who loads them to say."""
        directory = self._directory()
        if directory is None:
            return {}
        try:
            text = (directory / "config.json").read_text(encoding="utf-8")
            return dict(json.loads(text))
        except (OSError, ValueError):
            return {}

    def _directory(self) -> Path | None:
        """Where the heads lie; None: nothing says where, or loading them will say what is wrong."""
        if self.speculative_model is None:
            return None
        try:
            return find_model_dir(self.speculative_model, self.revision)
        except ModelError:
            return None


_HEAD = re.compile(r"(?:model\.)?(?:medusa_heads?\.)?(?:blocks\.|lm_heads\.)?(\d+)\.")
"""Begins the names of a head's tensors, in the authors' layout and in vLLM's."""


def stored_heads(directory: Path) -> int | None:
    """How many heads the weights in a directory are those of, by the names of the tensors.

    Reads a few kilobytes; None: there are no weights, or of a format that cannot be read so.
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
    """Of a safetensors file, whose header is JSON, or of what ``torch.save`` wrote.

    The latter is a zip archive with a pickle of the names and the places of the tensors, which is
    searched for its strings and not executed.
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
        return [found for _, found, _ in operations if isinstance(found, str)]
