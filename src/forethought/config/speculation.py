"""``speculative_config``: the fields that all drafters have in common, and how they are read.

Names, defaults and ``decoding_type`` strings are those of TensorRT-LLM, so that a
``speculative_config`` block of one of its YAML files can be used unchanged. After construction both
lengths are set; impossible or ambiguous ones are refused. The drafters' own classes are in
``config.drafters``.

The bounds below are far beyond useful values, and small enough that no table or search of a drafter
grows without limit. The engine's limits come on top: it refuses drafts longer than the context when
it is built, and a step shortens drafts to the KV slots it has left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import pydantic
from pydantic import AliasChoices, Field

from forethought.assets import is_reasoner
from forethought.config.base import StrictModel
from forethought.config.drafter_table import decoding_types, find_drafter
from forethought.config.foreign_arguments import DRAFTING_ARGUMENTS, ForeignArgument
from forethought.config.registry import Registry
from forethought.config.tree import all_nodes, missing_path
from forethought.errors import ParameterError
from forethought.model_dir import find_model_dir

MAX_LEVELS = 256
"""Levels of a draft."""
MAX_NODES = 1024
"""Tokens of a draft, all branches together; also children of a node, and beams of a search."""
MAX_NGRAM = 64
"""Tokens of an n-gram; a pool stores as many n-grams per token of a text."""
MAX_SUFFIX = 1024
"""Tokens that a suffix is compared over."""
MAX_FACTOR = 256.0
"""Drafted tokens per token of a suffix that matched."""
MAX_ENTRIES = 1 << 24
"""Continuations, outputs or tokens that are kept: about 10 GB of them."""
MAX_WINDOW = 1 << 16
"""Drafts over which an acceptance gate averages."""

LENGTHS = frozenset({"max_draft_len", "length_control", "draft_len_schedule"})
"""Fields that say how long drafts are."""

Levels = Annotated[int, Field(ge=0, le=MAX_LEVELS)]
Nodes = Annotated[int, Field(ge=0, le=MAX_NODES)]


def find_config_class(kind: Any) -> type[DecodingBaseConfig]:
    """The class that a ``decoding_type`` names. Raises as ``find_drafter``."""
    config_class: type[DecodingBaseConfig] = Registry("decoding_type", {}).resolve(
        find_drafter(kind).config
    )
    return config_class


def named_config(name: str, model: object = None, **fields: Any) -> DecodingBaseConfig:
    """The configuration of a drafter that is given by its name alone, as ``--speculative`` does.

    Its longest drafts are those of the table of drafters, and goodput control chooses the length of
    each, unless ``fields`` say how long drafts are. For the embedded reasoner (``model`` None) it
    drafts with the weights that are shipped for it.

    Raises:
        UnknownNameError: there is no such drafter.
        ParameterError: it needs more than its name, or a field is wrong.
    """
    spec = find_drafter(name)
    defaults = dict(spec.option_defaults)
    if LENGTHS.isdisjoint(fields):
        defaults["length_control"] = "goodput"
    if find_config_class(name).uses_model is not False and "speculative_model" not in fields:
        folder = spec.embedded_dir() if is_reasoner(model) else None
        if folder is not None:
            defaults |= {"speculative_model": folder, **spec.embedded_defaults}
    config: DecodingBaseConfig = DecodingBaseConfig.from_dict(
        {"decoding_type": spec.decoding_type, **defaults, **fields}
    )
    return config


def missing_decoding_type() -> ParameterError:
    """The error for a configuration without ``decoding_type``."""
    return ParameterError(
        "speculative_config needs decoding_type",
        "nothing says how to draft",
        f"Use one of {', '.join(decoding_types())}",
    )


class DecodingBaseConfig(StrictModel):
    """The fields of every drafter. ``from_dict`` builds the class that ``decoding_type`` names."""

    foreign_arguments: ClassVar[Mapping[str, ForeignArgument]] = DRAFTING_ARGUMENTS
    decoding_type: ClassVar[str] = ""
    """Its name in a dictionary or YAML file, where case, ``_`` and ``-`` do not matter."""
    uses_model: ClassVar[bool | None] = False
    """Whether ``speculative_model`` is required; None: it is optional."""
    branches: ClassVar[bool] = False
    """Whether a draft may be a tree, with more tokens than levels."""
    length_aliases: ClassVar[tuple[str, ...]] = ()
    """Fields that are other names of ``max_draft_len``."""

    name: str = Field(default="", min_length=1)
    """Its name in ``SpeculationParams.drafter`` and in metrics."""
    max_draft_len: Levels = 0
    """Levels of a draft: the tokens that a step can accept; at most ``MAX_LEVELS``."""
    max_total_draft_tokens: Nodes = 0
    """Tokens of a draft at most, all branches together: KV slots are reserved for them. Left out:
    ``max_draft_len``, or the size of the tree; at most ``MAX_NODES``."""
    speculative_model: Path | None = Field(
        default=None, validation_alias=AliasChoices("speculative_model", "speculative_model_dir")
    )
    """Local Hugging Face directory, or Hub id, of the draft model or of heads."""
    revision: str | None = Field(default=None, min_length=1)
    """Branch, tag or commit of a ``speculative_model`` of the Hub; None: its main branch."""
    max_concurrency: int | None = Field(default=None, ge=1)
    """No drafts in a step with more running sequences than this, decoding or still prefilling;
    waiting ones are not counted. None: no such limit."""
    draft_len_schedule: dict[int, int] | None = None
    """Running sequences, counted as for ``max_concurrency`` -> draft length; see
    ``draft_len_schedule_bounds``. Kept sorted."""
    draft_len_schedule_bounds: Literal["upper", "lower"] | None = None
    """Meaning of the keys. ``upper``, the default and TensorRT-LLM's today: up to this many
    sequences, and no drafts with more than the largest key. ``lower``, TensorRT-LLM's at first:
    from this many sequences on; the smallest key is 1."""
    acceptance_rate_window_size: int = Field(default=0, ge=0, le=MAX_WINDOW)
    """Number of latest verified drafts, of all requests together, over which the acceptance gate
    averages; it may close once it has seen as many since it opened. 0: there is no gate."""
    acceptance_rate_threshold: float | None = Field(default=None, ge=0.0, le=1.0)
    """The gate closes when the accepted share of the drafted levels falls below this."""
    length_control: Literal["fixed", "goodput"] = "fixed"
    """``fixed``: as long as the fields above allow. ``goodput``: the length, possibly 0, that
    gives most tokens per second, as measured while running."""
    synthetic_acceptance: float | None = Field(default=None, ge=0.0, le=1.0)
    """For measuring speed: each level of a draft is accepted with this probability, whatever its
    tokens. Outputs are then meaningless, and marked as such."""
    synthetic_acceptance_length: float | None = Field(default=None, ge=1.0)
    """The same by length: each step generates this many tokens on average, the target's own
    included: with 2.6 one drafted token is always accepted, and a second one in 60 % of the steps.
    As vLLM's field of this name and SGLang's ``SGLANG_SIMULATE_ACC_LEN``; TensorRT-LLM's
    ``TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS`` is less by the target's token. Shorter drafts
    than that are accepted whole."""

    if not TYPE_CHECKING:  # checkers and editors see pydantic's own, which knows the fields

        def __init__(self, *args: Any, **values: Any) -> None:
            kind = values.pop("decoding_type", None)  # of a dump
            if kind is not None:
                self._expect(kind)
            super().__init__(*args, **values)

    @pydantic.model_serializer(mode="wrap")
    def _dump_decoding_type(self, dump: pydantic.SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A dump contains ``decoding_type``, so that it can be loaded again."""
        return {"decoding_type": self.decoding_type, **dump(self)}

    @pydantic.model_validator(mode="after")
    def _settle(self) -> DecodingBaseConfig:
        if not self.decoding_type:
            raise missing_decoding_type()
        self._settle_lengths()
        self._settle_schedule()
        self._check_synthetic()
        if self.uses_model and self.speculative_model is None:
            raise self._refuse("speculative_model", None, "the drafter needs a model")
        if self.uses_model is False and self.speculative_model is not None:
            raise self._refuse(
                "speculative_model", self.speculative_model, "the drafter has no model"
            )
        if self.revision is not None and self.speculative_model is None:
            raise self._refuse("revision", self.revision, "there is no speculative_model")
        if bool(self.acceptance_rate_window_size) != (self.acceptance_rate_threshold is not None):
            raise self._refuse(
                "acceptance_rate_window_size",
                self.acceptance_rate_window_size,
                f"acceptance_rate_threshold is {self.acceptance_rate_threshold}; a gate needs both",
            )
        return self

    def with_local_model(self) -> Self:
        """A copy with ``speculative_model`` as a directory, downloaded if it is a Hub id.

        Raises UsageError as :func:`~forethought.model_dir.find_model_dir`.
        """
        if self.speculative_model is None:
            return self
        directory = find_model_dir(self.speculative_model, self.revision)
        return self.model_copy(update={"speculative_model": directory, "revision": None})

    def _settle_lengths(self) -> None:
        if self.max_draft_len < 1:
            raise self._refuse("max_draft_len", self.max_draft_len, "a draft has at least 1 level")
        total = self.max_total_draft_tokens or self.max_draft_len
        if total < self.max_draft_len or (total > self.max_draft_len and not self.branches):
            raise self._refuse(
                "max_total_draft_tokens",
                total,
                f"max_draft_len is {self.max_draft_len}"
                + ("" if self.branches else ", and its drafts do not branch"),
            )
        if total > MAX_NODES or self.max_draft_len > MAX_LEVELS:
            name = "max_total_draft_tokens" if total > MAX_NODES else "max_draft_len"
            reason = f"a draft has at most {MAX_LEVELS} levels and {MAX_NODES} tokens"
            raise self._refuse(name, max(total, getattr(self, name)), reason)
        self._set("max_total_draft_tokens", total)

    @property
    def drafts_chains(self) -> bool:
        """Whether no draft of it branches, however short."""
        return self.max_total_draft_tokens == self.max_draft_len

    def _settle_tree(self, name: str, paths: tuple[tuple[int, ...], ...]) -> None:
        """Take both lengths from the tree in the field ``name``; refuse contradicting ones."""
        if not paths or not all(paths) or min(map(min, paths)) < 0:
            raise self._refuse(name, paths, "paths are lists of ranks from 0")
        if len(set(paths)) < len(paths):
            raise self._refuse(name, paths, "a path is listed twice")
        self._expect_closed(name, paths)
        size = len(all_nodes(paths))
        lengths = {"max_draft_len": max(map(len, paths)), "max_total_draft_tokens": size}
        for length, value in lengths.items():
            if getattr(self, length) not in (0, value):
                raise self._refuse(length, getattr(self, length), f"{name} make it {value}")
            self._set(length, value)

    def _expect_closed(self, name: str, paths: tuple[tuple[int, ...], ...]) -> None:
        """Refuse a list that is neither all nodes of a tree nor its leaves only."""
        missing = missing_path(paths)
        if missing is not None:
            reason = (
                f"{list(missing)} is missing, a prefix of others: list all nodes, or the "
                "leaves only if none of them is a path of one rank"
            )
            raise self._refuse(name, [list(path) for path in paths], reason)

    def _settle_schedule(self) -> None:
        schedule, bounds = self.draft_len_schedule, self.draft_len_schedule_bounds
        if schedule is None and bounds is not None:
            reason = "there is no draft_len_schedule whose keys it describes"
            raise self._refuse("draft_len_schedule_bounds", bounds, reason)
        if schedule is None:
            return
        self._set("draft_len_schedule_bounds", bounds or "upper")
        if self.max_concurrency is not None or self.length_control != "fixed":
            other = "length_control" if self.max_concurrency is None else "max_concurrency"
            raise self._refuse(
                other, getattr(self, other), "draft_len_schedule determines the length"
            )
        if not schedule or min(schedule) < 1 or (bounds == "lower" and min(schedule) > 1):
            first = "the smallest of these lower bounds must be 1" if bounds == "lower" else ""
            reason = first or "it must have batch sizes from 1 as keys"
            raise self._refuse("draft_len_schedule", schedule, reason)
        if any(not 0 <= length <= self.max_draft_len for length in schedule.values()):
            reason = f"lengths are between 0 and max_draft_len, {self.max_draft_len}"
            raise self._refuse("draft_len_schedule", schedule, reason)
        self._set("draft_len_schedule", dict(sorted(schedule.items())))

    def _check_synthetic(self) -> None:
        length = self.synthetic_acceptance_length
        if length is None:
            return
        if self.synthetic_acceptance is not None:
            reason = "synthetic_acceptance is given, the probability per level"
            raise self._refuse("synthetic_acceptance_length", length, reason)
        if length > self.max_draft_len + 1:
            reason = f"a step has at most max_draft_len + 1 tokens, {self.max_draft_len + 1}"
            raise self._refuse("synthetic_acceptance_length", length, reason)

    def _set(self, name: str, value: Any) -> None:
        self.__dict__[name] = value

    def _refuse(self, name: str, value: Any, reason: str) -> ParameterError:
        owner = type(self).__name__
        return ParameterError(
            f"invalid {name} in {owner}", f"got {value!r}, but {reason}", f"Change {name}"
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Any:
        """Build a configuration from a dictionary, whose ``decoding_type`` names the class, unless
        this is called on that class.

        Raises:
            UnknownNameError: there is no such ``decoding_type``.
            ParameterError: an unknown name, or a value of the wrong type or outside its range.
        """
        fields = dict(values)
        kind = fields.pop("decoding_type", None) or fields.pop("method", None)  # vLLM's name of it
        kind = kind or cls.decoding_type
        if not kind:
            raise missing_decoding_type()
        return cls._expect(kind)(**fields)

    @classmethod
    def _expect(cls, kind: Any) -> type[DecodingBaseConfig]:
        """The class that ``kind`` names, which must be this class or derived from it."""
        config_class = find_config_class(kind)
        if not issubclass(config_class, cls):
            raise ParameterError(
                f"invalid decoding_type in {cls.__name__}",
                f"got {kind!r}, which is {config_class.__name__}",
                f"Call {config_class.__name__}.from_dict, or leave decoding_type out",
            )
        return config_class


def read_configs(value: Any, model: object = None) -> tuple[DecodingBaseConfig, ...]:
    """The configurations in a ``speculative_config``, in order.

    Args:
        value: a configuration, a dictionary for ``from_dict``, a drafter's name, a list of these,
            or None.
        model: that they draft for; None: the embedded reasoner.

    Raises:
        UsageError: something else, a bad dictionary, or two with one name.
    """
    items: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
    configs = [_read(item, model) for item in items if item is not None]
    names = [config.name for config in configs]
    if len(set(names)) < len(names):
        raise ParameterError(
            "two entries of speculative_config have one name",
            f"their names are {', '.join(names)}",
            "Set name, by which requests choose a drafter",
        )
    return tuple(configs)


def _read(item: Any, model: object) -> DecodingBaseConfig:
    if isinstance(item, str):
        return named_config(item, model)
    if isinstance(item, Mapping):
        config: DecodingBaseConfig = DecodingBaseConfig.from_dict(item)
        return config
    if not isinstance(item, DecodingBaseConfig):
        raise ParameterError(
            "invalid speculative_config",
            f"got {item!r}",
            "Give a drafter's name such as 'ngram', a configuration such as NGramDecodingConfig(), "
            "a dictionary, or a list of them",
        )
    return item
