"""The configurations of all drafters: one class each, named and spelled as in TensorRT-LLM.

They need neither torch nor the drafters' weights; of Medusa's heads the ``config.json`` and the
names of the tensors are read, which show how many heads there are. The algorithms are described in
``speculative/drafters/<name>.py``; ``config.drafter_table`` lists the drafters.
"""

from __future__ import annotations

from dataclasses import is_dataclass
from operator import index
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import AliasChoices, BeforeValidator, Field

from forethought.config.quantization import Quantization
from forethought.config.registry import Registry
from forethought.config.speculation import (
    MAX_ENTRIES,
    MAX_FACTOR,
    MAX_LEVELS,
    MAX_NGRAM,
    MAX_NODES,
    MAX_SUFFIX,
    DecodingBaseConfig,
    Levels,
    Nodes,
)
from forethought.config.tree import TreePaths
from forethought.errors import ParameterError, UsageError

FORMER_TREE_NAME = BeforeValidator(lambda value: "most_probable" if value == "likeliest" else value)
"""``likeliest``: the older name, accepted for one release."""


class NGramDecodingConfig(DecodingBaseConfig):
    """Drafts are the tokens that followed an earlier occurrence of the last n-gram.

    Prompt lookup decoding: needs no model. See ``speculative.drafters.ngram``.
    """

    decoding_type: ClassVar[str] = "NGram"

    name: str = Field(default="ngram", min_length=1)
    max_draft_len: Levels = 5
    max_matching_ngram_size: int = Field(default=2, ge=1, le=MAX_NGRAM)
    """Tokens of the longest n-gram that is looked up; the longest with a match is used."""
    is_keep_all: bool = True
    """Keep every continuation of an n-gram; else only one, the longest."""
    is_use_oldest: bool = True
    """Propose the oldest continuation of an n-gram; else the newest. Without ``is_keep_all`` there
    is one for each n-gram, and this has no effect."""
    is_public_pool: bool = True
    """Look up the tokens of all requests of one ``cache_salt``; else only the request's own."""
    max_pool_size: int = Field(default=1 << 17, ge=1, le=MAX_ENTRIES)
    """Continuations in all pools, of about 0.4 KB each; the least recently used are evicted."""


class AutoDecodingConfig(DecodingBaseConfig):
    """An ``NGramDecodingConfig`` with lengths chosen by the engine's batch size.

    TensorRT-LLM's heuristic: n-grams of 3 and drafts of 5 up to 4 sequences at once, else n-grams
    of 5 and drafts of 3; none with more than 32 running. Other fields are passed on.
    """

    decoding_type: ClassVar[str] = "AUTO"

    name: str = Field(default="ngram", min_length=1)

    def resolve(self, max_batch_size: int) -> NGramDecodingConfig:
        """The configuration for an engine that runs ``max_batch_size`` sequences at once.

        Raises ParameterError if a given field contradicts the lengths.
        """
        few = max_batch_size <= 4
        chosen: dict[str, Any] = {
            "max_draft_len": 5 if few else 3,
            "max_matching_ngram_size": 3 if few else 5,
        }
        if self.draft_len_schedule is None and self.length_control == "fixed":
            chosen["max_concurrency"] = 32
        fields = type(self).model_fields.items()
        non_default = {
            name: value
            for name, field in fields
            if (value := getattr(self, name)) != field.get_default()
        }
        return NGramDecodingConfig(**{**chosen, **non_default})

    def _settle_lengths(self) -> None:
        """Left to ``resolve``."""

    def _settle_schedule(self) -> None:
        """Left to ``resolve``."""


class SuffixDecodingConfig(DecodingBaseConfig):
    """Drafts are the most probable continuations of the longest suffix that has occurred before.

    SuffixDecoding (Oliaro et al., 2024), over the request itself, the other samples of its prompt,
    and the outputs of earlier requests. See ``speculative.drafters.suffix``.
    """

    decoding_type: ClassVar[str] = "Suffix"
    branches: ClassVar[bool] = True

    name: str = Field(default="suffix", min_length=1)
    max_draft_len: Levels = 16
    max_tree_depth: int = Field(default=24, ge=1, le=MAX_SUFFIX)
    """Tokens of a suffix that are compared at most."""
    max_spec_factor: float = Field(default=1.0, gt=0.0, le=MAX_FACTOR)
    """A match of n tokens is followed by at most this times n drafted tokens."""
    min_token_prob: float = Field(default=0.1, ge=0.0, le=1.0)
    """The draft ends where the continuation's estimated probability falls below this."""
    max_cached_requests: int = Field(default=10_000, ge=0, le=MAX_ENTRIES)
    """Past outputs that are kept, each for its own ``cache_salt``; 0: none."""
    max_cached_tokens: int = Field(default=1 << 17, ge=0, le=MAX_ENTRIES)
    """Tokens of past outputs, of about 0.6 KB each; the oldest outputs are evicted."""


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
    """``greedy``: the most probable tokens. ``sampled``: sampled from the draft model's
    distribution where the request itself is sampled."""
    draft_choices: TreePaths | None = None
    """A tree instead of a chain: paths of ranks; ``[1, 0]`` is the most probable token after the
    second most probable one. See ``config.speculation``."""
    quantization: Quantization | None = None
    """Store the draft model's weights in 8 or 4 bits, rounded at load; None: as its checkpoint has
    them, whatever the target's."""

    def _settle_lengths(self) -> None:
        """A tree determines both lengths; other values beside it are refused."""
        if self.draft_choices is not None:
            self._settle_tree("draft_choices", self.draft_choices)
        elif self.max_total_draft_tokens > self.max_draft_len > 0:
            reason = "without draft_choices a draft is a chain"
            raise self._refuse("max_total_draft_tokens", self.max_total_draft_tokens, reason)
        super()._settle_lengths()


class PearlDecodingConfig(DecodingBaseConfig):
    """A draft model drafts the next block while the target verifies the current one.

    PEARL (Liu et al., 2024); faster where the two run on different devices. See
    ``speculative.drafters.pearl``.
    """

    decoding_type: ClassVar[str] = "Pearl"
    uses_model: ClassVar[bool] = True

    name: str = Field(default="pearl", min_length=1)
    max_draft_len: Levels = 4
    """Tokens of a block, which PEARL calls gamma."""
    draft_device: str | None = None
    """Device of the draft model; None: the target's."""
    quantization: Quantization | None = None
    """Store the draft model's weights in 8 or 4 bits; None: as its checkpoint has them."""
    overlap: bool = True
    """Draft in a separate thread; False: draft the same blocks in turn with the target."""


class EagleDecodingConfig(DecodingBaseConfig):
    """Drafts come from a head that reads the target's hidden states.

    EAGLE-1, 2 and 3 (Li et al., 2024 to 2025); the checkpoint determines which. Drafts are
    chains, static trees, or EAGLE-2's dynamic trees. See ``speculative.drafters.eagle``.
    """

    decoding_type: ClassVar[str] = "Eagle"
    uses_model: ClassVar[bool] = True
    branches: ClassVar[bool] = True
    length_aliases: ClassVar[tuple[str, ...]] = ("num_eagle_layers",)

    name: str = Field(default="eagle", min_length=1)
    eagle_choices: TreePaths | None = None
    """A static tree: paths of ranks; ``[1, 0]`` is the most probable token after the second most
    probable one. See ``config.speculation``."""
    use_dynamic_tree: bool = False
    """Expand the nodes that are most probable under the head, up to ``max_total_draft_tokens``."""
    dynamic_tree_max_topK: int | None = Field(default=None, ge=1, le=MAX_NODES)
    """Children per expanded node of a dynamic tree, and expanded nodes per level."""
    eagle3_layers_to_capture: tuple[int, ...] | None = None
    """Layers of the target whose outputs an EAGLE-3 head reads; -1: the output of the final norm.
    None: those in its checkpoint, or ``1, L // 2 - 1, L - 4`` of L layers, at least 7."""
    num_eagle_layers: int | None = Field(default=None, ge=1, le=MAX_LEVELS)
    """Another name of ``max_draft_len`` in older files; the two must agree."""
    eagle3_one_model: bool = True
    """Accepted without effect: there is one engine, and the head always drafts in it."""
    greedy_sampling: Literal[True] = True
    """Acceptance is exact, greedy or sampled; ``False`` would mean typical acceptance."""
    eagle3_model_arch: Literal["llama3"] = "llama3"
    """Heads consist of a Llama layer."""

    @pydantic.field_validator("eagle3_layers_to_capture", mode="before")
    @classmethod
    def _sorted_layers(cls, value: Any) -> Any:
        """Sort the layers: heads read them in rising order, the final norm last."""
        if isinstance(value, set | frozenset | list | tuple) and len(set(value)) == len(value):
            return tuple(sorted(value, key=lambda layer: (layer == -1, layer)))
        return value

    @property
    def drafts_chains(self) -> bool:
        """Whether no draft of it branches, however short."""
        return not self.use_dynamic_tree and super().drafts_chains

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
        """Check the width; the size is at most width times depth."""
        width = self.dynamic_tree_max_topK
        if self.use_dynamic_tree != (width is not None):
            reason = "use_dynamic_tree and dynamic_tree_max_topK are given together or not at all"
            raise self._refuse("dynamic_tree_max_topK", width, reason)
        if width is None:
            if self.eagle_choices is None and self.max_total_draft_tokens > self.max_draft_len:
                reason = "without eagle_choices or use_dynamic_tree a draft is a chain"
                raise self._refuse("max_total_draft_tokens", self.max_total_draft_tokens, reason)
            return
        largest = width * self.max_draft_len
        if self.max_total_draft_tokens > largest:
            reason = f"dynamic_tree_max_topK times max_draft_len is {largest}"
            raise self._refuse("max_total_draft_tokens", self.max_total_draft_tokens, reason)
        self._set("max_total_draft_tokens", self.max_total_draft_tokens or largest)


Eagle3DecodingConfig = EagleDecodingConfig
"""TensorRT-LLM's name in newer files."""


class MTPDecodingConfig(DecodingBaseConfig):
    """Drafts come from further layers that were trained with the target: multi-token prediction.

    DeepSeek-V3 (2024) and later models. The modules are in the target's own directory
    unless ``speculative_model`` names another. See ``speculative.drafters.mtp``.
    """

    decoding_type: ClassVar[str] = "MTP"
    uses_model: ClassVar[bool | None] = None

    name: str = Field(default="mtp", min_length=1)
    num_nextn_predict_layers: int | None = Field(default=None, ge=1, le=MAX_LEVELS)
    """Number of modules to use at most; None: all. Where ``max_draft_len`` is left out, it is this
    number, or 1, as in TensorRT-LLM's files."""
    use_mtp_vanilla: bool = False
    """Each level of a draft has a KV cache of its own, even if one module serves all levels. With
    several modules this is always so; otherwise a single one is replayed on its own outputs."""
    fed_back_state: Literal["normed", "unnormed"] = Field(
        default="normed", validation_alias=AliasChoices("fed_back_state", "recycled_state")
    )
    """Hidden state that is fed back in place of the target's: the output of the module's last norm,
    or its input. Depends on how the module was trained; other engines use either one."""
    use_relaxed_acceptance_for_thinking: bool = False
    """While a greedy request is in its thinking phase, accept tokens that are almost as probable as
    the target's first choice. Changes the output, which is marked as lossy."""
    relaxed_topk: int = Field(default=1, ge=1)
    """Rank of an accepted token at most: it is among the top k."""
    relaxed_delta: float = Field(default=0.0, ge=0.0)
    """Difference to the most probable token at most."""
    relaxed_rule: Literal["probability", "log_probability"] | None = None
    """Quantity that ``relaxed_delta`` is a difference of: TensorRT-LLM's kernels compare
    probabilities, its documentation log-probabilities. Left out: ``log_probability``, the
    documented and stricter one: what it accepts, ``probability`` accepts as well."""
    begin_thinking_phase_token: int = Field(
        default=128798,
        ge=0,
        validation_alias=AliasChoices("begin_thinking_phase_token", "BEGIN_THINKING_PHASE_TOKEN"),
    )
    """Token id that begins the thinking phase; the default is DeepSeek-R1's."""
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


DEFAULT_NODES = 15
"""Size of a most-probable tree: 16 tokens with the root, which CPUs multiply at little cost."""


class ReDrafterDecodingConfig(DecodingBaseConfig):
    """Drafts come from a small recurrent network, by beam search.

    ReDrafter (Cheng et al., 2024). See ``speculative.drafters.redrafter``.
    """

    decoding_type: ClassVar[str] = "ReDrafter"
    uses_model: ClassVar[bool] = True
    branches: ClassVar[bool] = True
    length_aliases: ClassVar[tuple[str, ...]] = ("draft_len_per_beam",)

    name: str = Field(default="redrafter", min_length=1)
    num_beams: int = Field(default=10, ge=1, le=MAX_NODES)
    """Beams that are kept at each length of the search."""
    draft_len_per_beam: int = Field(default=4, ge=1, le=MAX_LEVELS)
    """Tokens of a beam at most; another name of ``max_draft_len``."""
    tree: Annotated[Literal["most_probable", "beams"], FORMER_TREE_NAME] = "most_probable"
    """``beams``: the beams of the last length, as published. ``most_probable``: those of any length
    with the highest probability, which accepts more per verified token: 15 tokens unless
    ``max_total_draft_tokens`` is given."""
    min_draft_probability: float = Field(default=0.0, ge=0.0, lt=1.0)
    """With ``most_probable``: leave out beams that are less probable than this under the head."""

    @property
    def drafts_chains(self) -> bool:
        """Whether no draft of it branches, however short."""
        return self.num_beams == 1

    def _settle_lengths(self) -> None:
        """The depth is a beam's length; the size at most that of beams without common prefix."""
        is_given = "draft_len_per_beam" in self.model_fields_set
        if not is_given and self.max_draft_len:
            self._set("draft_len_per_beam", self.max_draft_len)
        if self.min_draft_probability and self.tree == "beams":
            reason = "tree is 'beams', which are always all drafted"
            raise self._refuse("min_draft_probability", self.min_draft_probability, reason)
        length = self.draft_len_per_beam
        if self.max_draft_len not in (0, length):
            reason = f"draft_len_per_beam makes it {length}"
            raise self._refuse("max_draft_len", self.max_draft_len, reason)
        self._set("max_draft_len", length)
        largest = self.num_beams * length
        if self.max_total_draft_tokens > largest:
            reason = f"{self.num_beams} beams of {length} have no more than {largest}"
            raise self._refuse("max_total_draft_tokens", self.max_total_draft_tokens, reason)
        default = largest if self.tree == "beams" else min(largest, max(length, DEFAULT_NODES))
        self._set("max_total_draft_tokens", self.max_total_draft_tokens or default)
        super()._settle_lengths()


class UserProvidedDecodingConfig(DecodingBaseConfig):
    """Drafts come from the caller's own ``Drafter``; see ``speculative.drafter``."""

    decoding_type: ClassVar[str] = "User_Provided"
    branches: ClassVar[bool] = True

    name: str = Field(default="user_provided", min_length=1)
    max_total_draft_tokens: Nodes = 0
    """Tokens of a draft at most, all branches together. Left out: the drafter's
    ``nodes(max_draft_len)``."""
    drafter: Any
    """A ``Drafter``: an instance, or ``"module:Name"`` of a class without arguments."""
    resource_manager: Any = None
    """A ``ResourceManager``, or ``"module:Name"`` of one; called as requests come and go."""

    _names: dict[str, str] = pydantic.PrivateAttr(default_factory=dict)
    """Field -> name that it was given by, if any; dumps contain it."""

    if not TYPE_CHECKING:  # see DecodingBaseConfig

        def __init__(self, *args: Any, **values: Any) -> None:
            super().__init__(*args, **values)
            for name in ("drafter", "resource_manager"):
                if isinstance(values.get(name), str):
                    self._names[name] = values[name]

    @pydantic.field_validator("drafter", "resource_manager", mode="after")
    @classmethod
    def _load(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        kind = str(info.field_name)
        try:
            instance = Registry(kind, {}).create(value) if isinstance(value, str | type) else value
        except UsageError:
            raise
        except Exception as error:  # the caller's own code may raise anything
            raise ValueError(f"it cannot be created: {type(error).__name__}: {error}") from error
        method = "prepare_draft_tokens" if kind == "drafter" else "get_max_resource_count"
        if not callable(getattr(instance, method, None)):
            raise ValueError(f"it has no method {method}")
        return instance

    @pydantic.field_serializer("drafter", "resource_manager")
    def _dump(self, value: Any, info: pydantic.FieldSerializationInfo) -> Any:
        """The name it was given by; a Python dump keeps an object without a name."""
        keeps_object = info.mode == "python" and not is_dataclass(
            value
        )  # which pydantic would dump field by field
        if value is None or (keeps_object and info.field_name not in self._names):
            return value
        if info.field_name not in self._names:
            raise ParameterError(
                f"{info.field_name} cannot be dumped",
                f"it is an object of {type(value).__name__}, given without a name",
                'Give it as "module:Name", of a class without arguments',
            )
        return self._names[info.field_name]

    def _settle_lengths(self) -> None:
        """The size is the drafter's ``nodes``, unless ``max_total_draft_tokens`` is given."""
        if not self.max_total_draft_tokens and self.max_draft_len:
            self._set("max_total_draft_tokens", self._own_size())
        super()._settle_lengths()

    def _own_size(self) -> int:
        try:
            size = index(self.drafter.nodes(self.max_draft_len))
        except (
            Exception
        ):  # the caller's own code may raise anything; the engine handles it when it drafts
            return self.max_draft_len
        return min(max(size, self.max_draft_len), MAX_NODES)
