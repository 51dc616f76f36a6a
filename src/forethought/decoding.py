"""How to guess ahead: one configuration class per way of drafting.

Names, defaults and ``decoding_type`` strings are those of TensorRT-LLM, so that a
``speculative_config`` block of a YAML file that was written for it is read here as it stands. After
construction every length is settled; an impossible or ambiguous one is refused. Knows nothing about
how drafts are made.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import AliasChoices, BeforeValidator, Field

from forethought.errors import ParameterError, UnknownNameError, UsageError
from forethought.registry import Registry
from forethought.strict_model import StrictModel


def _from_text(value: Any) -> Any:
    """A list of paths may be written as the text of one."""
    try:
        return ast.literal_eval(value) if isinstance(value, str) else value
    except (ValueError, SyntaxError) as error:
        raise ValueError("it is not the text of a list of lists") from error


TreePaths = Annotated[tuple[tuple[int, ...], ...], BeforeValidator(_from_text)]
"""A static tree: see ``speculative.tree.TreeChoices``."""


class DecodingBaseConfig(StrictModel):
    """What all ways of drafting have in common. ``from_dict`` finds the class that is meant."""

    decoding_type: ClassVar[str] = ""
    """What a dictionary or YAML file calls it; case, ``_`` and ``-`` do not matter there."""
    uses_model: ClassVar[bool | None] = False
    """Whether it needs ``speculative_model``; None: it can do without."""
    branches: ClassVar[bool] = False
    """Whether a draft may be a tree: have more tokens than levels."""

    name: str = Field(default="", min_length=1)
    """What ``SpeculationParams.drafter`` and the metrics call it."""
    max_draft_len: int = Field(default=0, ge=0)
    """Most levels of a draft: most tokens that a step can accept."""
    max_total_draft_tokens: int = Field(default=0, ge=0)
    """Most tokens of a draft, all branches together: for these the KV cache is reserved. Left out:
    ``max_draft_len``, or the size of the tree."""
    speculative_model: Path | None = Field(
        default=None, validation_alias=AliasChoices("speculative_model", "speculative_model_dir")
    )
    """Local Hugging Face directory of the draft model."""
    max_concurrency: int | None = Field(default=None, ge=1)
    """No drafts in a step with more running sequences than this; None: no such limit."""
    draft_len_schedule: dict[int, int] | None = None
    """Running sequences -> draft length; see ``draft_len_schedule_bounds``. Kept sorted."""
    draft_len_schedule_bounds: Literal["upper", "lower"] | None = None
    """How the keys are meant, which must be said. ``upper``: up to so many sequences, and no drafts
    with more than the largest key. ``lower``: from so many sequences on; the smallest key is 1."""
    acceptance_rate_window_size: int = Field(default=0, ge=0)
    """Verified drafts over which the gate averages; 0: there is no gate."""
    acceptance_rate_threshold: float | None = Field(default=None, ge=0.0, le=1.0)
    """The gate closes when a smaller share of the drafted tokens than this is accepted."""
    length_control: Literal["fixed", "goodput"] = "fixed"
    """``fixed``: as long as the fields above allow. ``goodput``: as long as pays in tokens per
    second, as measured while running, which may be 0."""
    synthetic_acceptance: float | None = Field(default=None, ge=0.0, le=1.0)
    """For studies of speed: each level of a draft is accepted with this probability, whatever it
    holds. Outputs are then meaningless, and marked."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _none_is_left_out(cls, values: Any) -> Any:
        """``null`` in YAML leaves a field at its default."""
        if not isinstance(values, Mapping):
            return values
        return {name: value for name, value in values.items() if value is not None}

    @pydantic.model_validator(mode="after")
    def _settle(self) -> DecodingBaseConfig:
        if not self.decoding_type:
            raise _undecided()
        self._settle_lengths()
        self._settle_schedule()
        if self.uses_model and self.speculative_model is None:
            raise self._refuse("speculative_model", None, "drafts come from a model of their own")
        if self.uses_model is False and self.speculative_model is not None:
            raise self._refuse("speculative_model", self.speculative_model, "it has no draft model")
        if bool(self.acceptance_rate_window_size) != (self.acceptance_rate_threshold is not None):
            raise self._refuse(
                "acceptance_rate_window_size",
                self.acceptance_rate_window_size,
                f"acceptance_rate_threshold is {self.acceptance_rate_threshold}; a gate needs both",
            )
        return self

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
        self._set("max_total_draft_tokens", total)

    def _settle_tree(self, name: str, paths: tuple[tuple[int, ...], ...]) -> None:
        """Take depth and size from the tree in the field ``name``; refuse others beside it."""
        if not paths or not all(paths) or min(map(min, paths)) < 0:
            raise self._refuse(name, paths, "paths are lists of ranks from 0")
        if len(set(paths)) < len(paths):
            raise self._refuse(name, paths, "a path stands there twice")
        size = len({path[:end] for path in paths for end in range(1, len(path) + 1)})
        lengths = {"max_draft_len": max(map(len, paths)), "max_total_draft_tokens": size}
        for length, value in lengths.items():
            if getattr(self, length) not in (0, value):
                raise self._refuse(length, getattr(self, length), f"{name} make it {value}")
            self._set(length, value)

    def _settle_schedule(self) -> None:
        schedule, bounds = self.draft_len_schedule, self.draft_len_schedule_bounds
        if (schedule is None) != (bounds is None):
            raise self._refuse(
                "draft_len_schedule_bounds",
                bounds,
                "it says whether the keys of draft_len_schedule are 'upper' or 'lower' bounds of "
                "the number of running sequences: give both or neither",
            )
        if schedule is None:
            return
        if self.max_concurrency is not None or self.length_control != "fixed":
            other = "length_control" if self.max_concurrency is None else "max_concurrency"
            raise self._refuse(other, getattr(self, other), "draft_len_schedule decides already")
        if not schedule or min(schedule) < 1 or (bounds == "lower" and min(schedule) > 1):
            first = "the smallest of these lower bounds must be 1" if bounds == "lower" else ""
            reason = first or "it must have batch sizes from 1 as keys"
            raise self._refuse("draft_len_schedule", schedule, reason)
        if any(not 0 <= length <= self.max_draft_len for length in schedule.values()):
            reason = f"lengths lie between 0 and max_draft_len, {self.max_draft_len}"
            raise self._refuse("draft_len_schedule", schedule, reason)
        self._set("draft_len_schedule", dict(sorted(schedule.items())))

    def _set(self, name: str, value: Any) -> None:
        """Settle a field during construction, after which it is frozen."""
        self.__dict__[name] = value

    def _refuse(self, name: str, value: Any, reason: str) -> ParameterError:
        owner = type(self).__name__
        return ParameterError(
            f"invalid {name} in {owner}", f"got {value!r}, but {reason}", f"Change {name}"
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Any:
        """The configuration that ``values`` describe.

        Args:
            values: field names and values; ``decoding_type`` names the class, unless it is called
                on that class.

        Raises:
            UnknownNameError: there is no such ``decoding_type``.
            ParameterError: an unknown name, or a value of the wrong type or outside its range.
        """
        fields = dict(values)
        kind = fields.pop("decoding_type", cls.decoding_type)
        if not kind:
            raise _undecided()
        found = _find(kind)
        if not issubclass(found, cls):
            raise ParameterError(
                f"invalid decoding_type in {cls.__name__}",
                f"got {kind!r}, which is {found.__name__}",
                f"Call {found.__name__}.from_dict, or leave decoding_type out",
            )
        return found(**fields)


class NGramDecodingConfig(DecodingBaseConfig):
    """Drafts are what followed the last few tokens when they stood there before.

    Prompt lookup decoding: needs no model. See ``speculative.drafters.ngram``.
    """

    decoding_type: ClassVar[str] = "NGram"

    name: str = Field(default="ngram", min_length=1)
    max_draft_len: int = Field(default=5, ge=0)
    max_matching_ngram_size: int = Field(default=2, ge=1)
    """Most tokens at the end that are looked up; the longest that is found wins."""
    is_keep_all: bool = True
    """Keep every continuation of a pattern; else only one, the longest."""
    is_use_oldest: bool = True
    """Propose the oldest continuation of a pattern; else the newest."""
    is_public_pool: bool = True
    """Requests look up what others have said, within one ``cache_salt``; else only their own."""
    max_pool_size: int = Field(default=1 << 17, ge=1)
    """Most continuations in all pools, of about 0.4 KB each; the least recently used leave."""


class SuffixDecodingConfig(DecodingBaseConfig):
    """Drafts are the likeliest continuations of the longest suffix that was seen before.

    SuffixDecoding (Oliaro et al., 2024), over what was said in the request itself, by the other
    samples of its prompt, and by earlier requests. See ``speculative.drafters.suffix``.
    """

    decoding_type: ClassVar[str] = "Suffix"
    branches: ClassVar[bool] = True

    name: str = Field(default="suffix", min_length=1)
    max_draft_len: int = Field(default=16, ge=0)
    max_tree_depth: int = Field(default=24, ge=1)
    """Most tokens of a suffix that are compared."""
    max_spec_factor: float = Field(default=1.0, gt=0.0)
    """A suffix of n tokens is followed by at most this times n drafted ones."""
    min_token_prob: float = Field(default=0.1, ge=0.0, le=1.0)
    """The draft ends where the continuation's estimated probability falls below this."""
    max_cached_requests: int = Field(default=10_000, ge=0)
    """Most past outputs that are remembered, each for its own ``cache_salt``; 0: none."""
    max_cached_tokens: int = Field(default=1 << 17, ge=0)
    """Most tokens of them, of about 0.6 KB each; the oldest outputs leave."""


class DraftTargetDecodingConfig(DecodingBaseConfig):
    """Drafts come from a smaller model with the same vocabulary.

    Speculative decoding (Leviathan et al., 2023; Chen et al., 2023). See
    ``speculative.drafters.draft_target``.
    """

    decoding_type: ClassVar[str] = "Draft_Target"
    uses_model: ClassVar[bool] = True
    branches: ClassVar[bool] = True

    name: str = Field(default="draft_target", min_length=1)
    draft_sampling: Literal["greedy", "sampled"] = "greedy"
    """``greedy``: the likeliest tokens. ``sampled``: drawn from the draft model's law where the
    request is sampled itself."""
    draft_choices: TreePaths | None = None
    """A tree instead of a chain: paths of ranks, ``[1, 0]`` being the likeliest token after the
    second likeliest. All paths, or those to the leaves only; a list, or the text of one."""

    def _settle_lengths(self) -> None:
        """With a tree, its depth and size are the lengths; others beside it are refused."""
        if self.draft_choices is not None:
            self._settle_tree("draft_choices", self.draft_choices)
        elif self.max_total_draft_tokens > self.max_draft_len > 0:
            reason = "without draft_choices a draft is a chain"
            raise self._refuse("max_total_draft_tokens", self.max_total_draft_tokens, reason)
        super()._settle_lengths()


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
    second likeliest of the first. All paths, or those to the leaves only; a list, or the text of
    one. None: as the heads' ``config.json`` says, or one that suits most heads."""
    num_medusa_heads: int | None = Field(default=None, ge=1)
    """How many heads to use; None: as many as there are."""
    posterior_threshold: float | None = Field(default=None, gt=0.0, le=1.0)
    """Accept what is typical of the target instead of what it would have drawn: tokens of at least
    this probability, or fewer where it is unsure. Changes the outputs of sampled requests, and
    marks them. None: exact. Medusa's authors use 0.09."""
    posterior_alpha: float | None = Field(default=None, gt=0.0)
    """How far unsureness lowers that threshold, ``posterior_alpha * exp(-entropy)`` being enough;
    None: the square root of ``posterior_threshold``."""

    def _settle_lengths(self) -> None:
        """Depth and size are those of the tree, which is cut to the heads that are used."""
        if self.posterior_alpha is not None and self.posterior_threshold is None:
            reason = "posterior_threshold is not given, and without it acceptance is exact"
            raise self._refuse("posterior_alpha", self.posterior_alpha, reason)
        if self.posterior_threshold is not None and self.posterior_alpha is None:
            self._set("posterior_alpha", self.posterior_threshold**0.5)
        given = self.medusa_choices
        if given is None:
            self._set("medusa_choices", self._default_tree())
        elif self.num_medusa_heads is not None and max(map(len, given)) > self.num_medusa_heads:
            reason = f"a path of it is longer than num_medusa_heads, {self.num_medusa_heads}"
            raise self._refuse("medusa_choices", given, reason)
        assert self.medusa_choices is not None
        self._settle_tree("medusa_choices", self.medusa_choices)
        super()._settle_lengths()

    def _default_tree(self) -> tuple[tuple[int, ...], ...]:
        """What the heads' own configuration says, within the wanted depth and heads."""
        stored = self._stored()
        tree = stored.get("medusa_choices") or MEDUSA_CHOICES
        heads = self.num_medusa_heads or stored.get("medusa_num_heads") or stored.get("num_heads")
        limits = [limit for limit in (heads, self.max_draft_len) if limit]
        return tuple(dict.fromkeys(tuple(path[: min(limits, default=None)]) for path in tree))

    def _stored(self) -> dict[str, Any]:
        """The heads' ``config.json``; whether there has to be one is for who loads them to say."""
        if self.speculative_model is None:
            return {}
        try:
            text = (self.speculative_model / "config.json").read_text(encoding="utf-8")
            return dict(json.loads(text))
        except (OSError, ValueError):
            return {}


MEDUSA_CHOICES: tuple[tuple[int, ...], ...] = (
    *((0, 0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 2, 0), (0, 3)),
    *((1, 0, 0), (1, 1), (2, 0, 0), (3, 0), (4,), (5,)),
)
"""The leaves of a tree of 24 nodes: the best one where a head's first choices are right in 60, 14,
7, 4, 2 and 2 of 100 places, and each further head in 12 % fewer."""


class ReDrafterDecodingConfig(DecodingBaseConfig):
    """Drafts come from a small recurrent network that searches ahead with beams.

    ReDrafter (Cheng et al., 2024). See ``speculative.drafters.redrafter``.
    """

    decoding_type: ClassVar[str] = "ReDrafter"
    uses_model: ClassVar[bool] = True
    branches: ClassVar[bool] = True

    name: str = Field(default="redrafter", min_length=1)
    num_beams: int = Field(default=10, ge=1)
    """Continuations that are kept at each length of the search."""
    draft_len_per_beam: int = Field(default=4, ge=1)
    """Most tokens of one; ``max_draft_len`` is another name for it."""
    tree: Literal["likeliest", "beams"] = "likeliest"
    """``beams``: what is left at the end of the search, as published. ``likeliest``: what was
    likely at any length, which gets further with fewer tokens: 15 unless
    ``max_total_draft_tokens`` says otherwise."""

    def _settle_lengths(self) -> None:
        """The depth is that of a beam; the size at most that of beams with nothing in common."""
        given = "draft_len_per_beam" in self.model_fields_set
        if not given and self.max_draft_len:
            self._set("draft_len_per_beam", self.max_draft_len)
        length = self.draft_len_per_beam
        if self.max_draft_len not in (0, length):
            reason = f"draft_len_per_beam makes it {length}"
            raise self._refuse("max_draft_len", self.max_draft_len, reason)
        self._set("max_draft_len", length)
        most = self.num_beams * length
        if self.max_total_draft_tokens > most:
            reason = f"{self.num_beams} beams of {length} have no more than {most}"
            raise self._refuse("max_total_draft_tokens", self.max_total_draft_tokens, reason)
        usual = most if self.tree == "beams" else min(most, max(length, 15))
        self._set("max_total_draft_tokens", self.max_total_draft_tokens or usual)
        super()._settle_lengths()


class EagleDecodingConfig(DecodingBaseConfig):
    """Drafts come from a head that reads the target's hidden states.

    EAGLE-1, 2 and 3 (Li et al., 2024 to 2025); which head it is, its checkpoint says. Drafts are
    chains, static trees, or EAGLE-2's dynamic trees. See ``speculative.drafters.eagle``.
    """

    decoding_type: ClassVar[str] = "Eagle"
    uses_model: ClassVar[bool] = True
    branches: ClassVar[bool] = True

    name: str = Field(default="eagle", min_length=1)
    eagle_choices: TreePaths | None = None
    """A static tree: paths of ranks, ``[1, 0]`` being the likeliest token after the second
    likeliest. All paths, or those to the leaves only; a list, or the text of one."""
    use_dynamic_tree: bool = False
    """Grow each tree where the head is sure of itself, within ``max_total_draft_tokens``."""
    dynamic_tree_max_topK: int | None = Field(default=None, ge=1)
    """Children of a node of a dynamic tree, and nodes of a level that have any."""
    eagle3_layers_to_capture: tuple[int, ...] | None = None
    """Layers of the target whose outputs an EAGLE-3 head reads, -1 being behind the final norm.
    None: as its checkpoint says, or ``1, L // 2 - 1, L - 4`` of L layers."""
    num_eagle_layers: int | None = Field(default=None, ge=1)
    """Another name of ``max_draft_len`` in older files; the two must agree."""
    eagle3_one_model: bool = True
    """Read and without meaning: there is one engine, and the head drafts in it."""
    greedy_sampling: Literal[True] = True
    """Acceptance is exact here, greedy or sampled; ``False`` would mean typical acceptance."""
    eagle3_model_arch: Literal["llama3"] = "llama3"
    """Heads are made of Llama's layer."""

    @pydantic.field_validator("eagle3_layers_to_capture", mode="before")
    @classmethod
    def _rising(cls, value: Any) -> Any:
        """A set says which layers; heads read them in rising order, the final norm's last."""
        if isinstance(value, set | frozenset | list | tuple) and len(set(value)) == len(value):
            return tuple(sorted(value, key=lambda layer: (layer == -1, layer)))
        return value

    def _settle_lengths(self) -> None:
        if self.num_eagle_layers is not None:
            if self.max_draft_len not in (0, self.num_eagle_layers):
                reason = f"max_draft_len is {self.max_draft_len}"
                raise self._refuse("num_eagle_layers", self.num_eagle_layers, reason)
            self._set("max_draft_len", self.num_eagle_layers)
        if self.eagle_choices is not None:
            if self.use_dynamic_tree:
                reason = "eagle_choices are a static tree"
                raise self._refuse("use_dynamic_tree", True, reason)
            self._settle_tree("eagle_choices", self.eagle_choices)
        self._settle_dynamic_tree()
        captured = self.eagle3_layers_to_capture
        if captured is not None and (not captured or min(captured) < -1):
            reason = "layers are counted from 0, and -1 is the final norm"
            raise self._refuse("eagle3_layers_to_capture", captured, reason)
        super()._settle_lengths()

    def _settle_dynamic_tree(self) -> None:
        """Every node of a dynamic tree is one of the ``topK`` best of its level."""
        width = self.dynamic_tree_max_topK
        if self.use_dynamic_tree != (width is not None):
            reason = "use_dynamic_tree and dynamic_tree_max_topK are given together or not at all"
            raise self._refuse("dynamic_tree_max_topK", width, reason)
        if width is None:
            if self.eagle_choices is None and self.max_total_draft_tokens > self.max_draft_len:
                reason = "without eagle_choices or use_dynamic_tree a draft is a chain"
                raise self._refuse("max_total_draft_tokens", self.max_total_draft_tokens, reason)
            return
        most = width * self.max_draft_len
        if self.max_total_draft_tokens > most:
            reason = f"dynamic_tree_max_topK times max_draft_len is {most}"
            raise self._refuse("max_total_draft_tokens", self.max_total_draft_tokens, reason)
        self._set("max_total_draft_tokens", self.max_total_draft_tokens or most)


Eagle3DecodingConfig = EagleDecodingConfig
"""Its name in newer files."""


class MTPDecodingConfig(DecodingBaseConfig):
    """Drafts come from further layers that were trained with the target: multi-token prediction.

    DeepSeek-V3 (2024) and those who followed it. The modules lie in the target's own directory
    unless ``speculative_model`` names another. See ``speculative.drafters.mtp``.
    """

    decoding_type: ClassVar[str] = "MTP"
    uses_model: ClassVar[bool | None] = None

    name: str = Field(default="mtp", min_length=1)
    num_nextn_predict_layers: int | None = Field(default=None, ge=1)
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
    """What ``relaxed_delta`` is a difference of, which must be said: TensorRT-LLM's kernels compare
    probabilities, its documentation speaks of their logarithms."""
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
            reason = "it says what relaxed_delta is a difference of: probability or log_probability"
            raise self._refuse("relaxed_rule", None, reason)
        relaxed = {"relaxed_topk", "relaxed_delta", "relaxed_rule"} & self.model_fields_set
        if relaxed and not self.use_relaxed_acceptance_for_thinking:
            name = min(relaxed)
            reason = "without use_relaxed_acceptance_for_thinking acceptance is exact"
            raise self._refuse(name, getattr(self, name), reason)
        super()._settle_lengths()


class PearlDecodingConfig(DecodingBaseConfig):
    """A draft model drafts the next block while the target verifies this one.

    PEARL (Liu et al., 2024); pays where the two run on different devices. See
    ``speculative.drafters.pearl``.
    """

    decoding_type: ClassVar[str] = "Pearl"
    uses_model: ClassVar[bool] = True

    name: str = Field(default="pearl", min_length=1)
    max_draft_len: int = Field(default=4, ge=0)
    """Tokens of a block, which PEARL calls gamma."""
    draft_device: str | None = None
    """Where the draft model runs; None: where the target does."""
    overlap: bool = True
    """Draft in a thread of its own; False drafts the same blocks in turn with the target."""


class UserProvidedDecodingConfig(DecodingBaseConfig):
    """Drafts come from the caller's own ``Drafter``; see ``speculative.drafter``."""

    decoding_type: ClassVar[str] = "User_Provided"
    branches: ClassVar[bool] = True

    name: str = Field(default="user_provided", min_length=1)
    drafter: Any
    """A ``Drafter``: an instance, or ``"module:Name"`` of a class without arguments."""
    resource_manager: Any = None
    """A ``ResourceManager``, or ``"module:Name"`` of one, told of each request's life."""

    @pydantic.field_validator("drafter", "resource_manager", mode="after")
    @classmethod
    def _load(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        kind = str(info.field_name)
        try:
            made = Registry(kind, {}).create(value) if isinstance(value, str | type) else value
        except UsageError:
            raise
        except Exception as error:  # of the caller's own code
            raise ValueError(f"it cannot be made: {type(error).__name__}: {error}") from error
        method = "prepare_draft_tokens" if kind == "drafter" else "get_max_resource_count"
        if not callable(getattr(made, method, None)):
            raise ValueError(f"it has no method {method}")
        return made


class AutoDecodingConfig(DecodingBaseConfig):
    """An ``NGramDecodingConfig`` whose sizes follow the engine's. Other fields are handed on to it.

    n-grams of 3 and drafts of 5 up to 4 sequences at once, else n-grams of 5 and drafts of 3; none
    with more than 32 running: TensorRT-LLM's heuristic.
    """

    decoding_type: ClassVar[str] = "AUTO"

    name: str = Field(default="ngram", min_length=1)

    def resolve(self, max_batch_size: int) -> NGramDecodingConfig:
        """What it stands for.

        Args:
            max_batch_size: sequences that the engine runs at once.

        Raises:
            ParameterError: a field of this one cannot go with the sizes.
        """
        few = max_batch_size <= 4
        chosen: dict[str, Any] = {
            "max_draft_len": 5 if few else 3,
            "max_matching_ngram_size": 3 if few else 5,
        }
        if self.draft_len_schedule is None and self.length_control == "fixed":
            chosen["max_concurrency"] = 32
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return NGramDecodingConfig(**{**chosen, **given})

    def _settle_lengths(self) -> None:
        """``resolve`` will."""

    def _settle_schedule(self) -> None:
        """``resolve`` will."""


_CLASSES: Mapping[str, type[DecodingBaseConfig]] = {
    config.decoding_type: config
    for config in (
        AutoDecodingConfig,
        DraftTargetDecodingConfig,
        EagleDecodingConfig,
        MedusaDecodingConfig,
        MTPDecodingConfig,
        NGramDecodingConfig,
        PearlDecodingConfig,
        ReDrafterDecodingConfig,
        SuffixDecodingConfig,
        UserProvidedDecodingConfig,
    )
}


_ALIASES: Mapping[str, type[DecodingBaseConfig]] = {"Eagle3": EagleDecodingConfig}
"""Other strings that ``decoding_type`` may be."""


def _find(kind: Any) -> type[DecodingBaseConfig]:
    """The class that a ``decoding_type`` names."""
    spelled = _plain(str(kind))
    for name, config in (*_CLASSES.items(), *_ALIASES.items()):
        if _plain(name) == spelled:
            return config
    raise UnknownNameError("decoding_type", str(kind), _CLASSES)


def _undecided() -> ParameterError:
    return ParameterError(
        "speculative_config needs decoding_type",
        "nothing says how to draft",
        f"Use one of {', '.join(sorted(_CLASSES))}",
    )


def _plain(kind: str) -> str:
    return kind.casefold().replace("_", "").replace("-", "")


def read_configs(value: Any) -> tuple[DecodingBaseConfig, ...]:
    """One configuration or several, however they are written, in order.

    Args:
        value: a configuration, a dictionary for ``from_dict``, a list of them, or None.

    Raises:
        UsageError: something else, a bad dictionary, or two with one name.
    """
    items: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
    configs = [_read(item) for item in items if item is not None]
    names = [config.name for config in configs]
    if len(set(names)) < len(names):
        raise ParameterError(
            "two entries of speculative_config have one name",
            f"their names are {', '.join(names)}",
            "Set name, by which requests choose a drafter",
        )
    return tuple(configs)


def _read(item: Any) -> DecodingBaseConfig:
    if isinstance(item, Mapping):
        config: DecodingBaseConfig = DecodingBaseConfig.from_dict(item)
        return config
    if not isinstance(item, DecodingBaseConfig):
        raise ParameterError(
            "invalid speculative_config",
            f"got {item!r}",
            "Give a configuration such as NGramDecodingConfig(), a dictionary, or a list of them",
        )
    return item
