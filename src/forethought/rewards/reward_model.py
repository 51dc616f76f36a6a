"""``RewardModel``: rows of token ids in, scores out. What ``RewardWorker`` runs.

A decoder gives a score at each token, by a head on its hidden states:

============================================  ====================================================
``...ForTokenClassification``                 probability of the second of two labels
``...ForSequenceClassification``              the same, or the only logit; read at the last token
``Qwen2ForProcessRewardModel``                probability of the second label of a head of two
                                              layers, ``score`` (Qwen2.5-Math-PRM)
``Qwen2ForPrmModel``                          sigmoid of the value head ``v_head.summary``
                                              (Skywork-o1-Open-PRM)
``...ForCausalLM``, if asked for              probability of ``+`` against ``-`` as the next token
                                              (Math-Shepherd)
============================================  ====================================================

The heads of the third and fourth are read by the names of their weights: no code of a checkpoint
runs. A score depends on the tokens before it alone, so keys, values and scores of rows stay in a
``RewardPrefixCache``, and what a later row has in common with an earlier one is not computed again.
Encoders (as BERT) score whole rows.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import transformers
from torch import Tensor

from forethought.errors import ContextLengthError, ModelError, ParameterError
from forethought.model.loaded_weights import check_report, check_values
from forethought.model_dir import (
    check_config,
    check_model_dir,
    check_tokenizer_files,
    check_weight_files,
    first_words,
    read_json,
)
from forethought.rewards.reward_cache import RewardPrefixCache
from forethought.rewards.reward_forward import (
    Head,
    TorchRewardForward,
    native_forward,
    padded,
)
from forethought.rewards.step_format import STEP_FORMATS
from forethought.transformers_loading import one_module_at_a_time, without_progress_bars

_KIND = "reward model"
_UNREAD = re.compile(r"^(lm_head|cls)\.|(^|\.)pooler\.|^(score|v_head)\.")
"""Heads of another purpose that a checkpoint may have kept, and those that are read here."""
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_OWN_HEADS = {"Qwen2ForProcessRewardModel": "chat", "Qwen2ForPrmModel": "skywork"}
"""Architectures whose head is read by the names of its weights -> step format."""
_PLUS_MINUS = "math_shepherd"
"""The step format whose scores are those of a causal model's next token."""


class RewardQuery(NamedTuple):
    """The input of a reward task; equal queries are scored once."""

    tokens: tuple[int, ...] | None
    question: str | None
    answer: str | None
    positions: tuple[int, ...] | None


class ScoringRow(NamedTuple):
    """One input of the model."""

    ids: list[int]
    types: list[int] | None
    """Token types, of models with a type for question and for answer."""


class RewardScore(NamedTuple):
    """The result of a query."""

    score: float
    step_scores: list[float]
    length: int
    """Tokens of the input."""
    prefilled: int
    """Tokens of it that were run for this task; the others were scored before, or with another
    task of the same pass."""


class RewardModel:
    """A reward model. Not to be used by two threads at once.

    Args:
        directory: local Hugging Face directory.
        dtype: of the weights.
        device: where they are.
        step_format: how it reads the steps of an answer, by name; None: as its config says.
        max_cached_tokens: tokens with keys, values and scores kept between calls.
        forward: ``"auto"``: the layers of a decoder in C++, where that can be done; ``"torch"``:
            the module of transformers.

    Attributes:
        by_step: whether it scores steps rather than whole answers.
        step_format: name of the format in which it reads steps; None if it scores none.
        scores_are_logits: whether the score of an answer is the logit of a label alone, and the
            model says nothing against its sigmoid as the probability.
        max_length: tokens of a row; None: its config has no limit.
        tokenizer: the model's.

    Raises:
        ModelError: the directory holds no reward model that can be read.
        ParameterError: an unknown dtype, device or step format.
    """

    def __init__(
        self,
        directory: Path,
        dtype: str = "auto",
        device: str = "auto",
        step_format: str | None = None,
        max_cached_tokens: int = 0,
        forward: Literal["auto", "torch"] = "auto",
    ) -> None:
        if dtype not in _DTYPES:
            raise ParameterError(
                "invalid dtype", f"got {dtype!r}", f"Allowed: {', '.join(_DTYPES)}"
            )
        self.device = _device(device)
        check_model_dir(directory, "reward model")
        self.step_format = find_step_format(directory, step_format)
        self.by_step = self.step_format is not None
        network = _load(directory, self.step_format, dtype)
        self.tokenizer = _tokenizer(directory)
        if self.step_format == _PLUS_MINUS:
            network = _plus_minus(network, self.tokenizer, directory)
        self._network, self._head = network.model.to(self.device).eval(), network.head
        config = self._network.config.get_text_config()
        self.scores_are_logits = not self.by_step and _has_sigmoid(self._network.config)
        self.max_length = _max_length(self._network, config)
        self._vocabulary = self._network.get_input_embeddings().num_embeddings
        self._has_types = "token_type_ids" in inspect.signature(self._network.forward).parameters
        self._prefixes: RewardPrefixCache | None = None
        if self._head is not None and _keeps_all_states(config):
            native = native_forward(self._network, self._head) if forward == "auto" else None
            segments = native or TorchRewardForward(self._network, self._head)
            self._prefixes = RewardPrefixCache(segments, max_cached_tokens)

    def encode(self, query: RewardQuery) -> ScoringRow:
        """The input row of a query.

        Raises:
            ParameterError: it has no input, or lacks steps that the model scores, or has steps that
                it does not score.
            ContextLengthError: it is too long.
        """
        if (query.positions is not None) != self.by_step:
            raise _wrong_kind(self.by_step)
        row = self._tokenised(query) if query.tokens is None else ScoringRow([*query.tokens], None)
        length = len(row.ids)
        if not length or not all(0 <= token < self._vocabulary for token in row.ids):
            raise ParameterError(
                "invalid input_tokens",
                f"they are to be at least one id from 0 to {self._vocabulary - 1}",
                "Tokenise with the worker's tokenizer",
            )
        if not all(0 <= position < length for position in query.positions or ()):
            raise ParameterError(
                "invalid step_positions",
                f"got {list(query.positions or ())} for {length} tokens",
                "Give indices into input_tokens",
            )
        if self.max_length is not None and length > self.max_length:
            raise ContextLengthError(
                "the answer is too long for the reward model",
                f"it is {length} tokens with its question, and the context holds {self.max_length}",
                "Generate fewer tokens, or choose a model with a longer context",
            )
        return row

    def score(
        self, rows: Sequence[ScoringRow], queries: Sequence[RewardQuery]
    ) -> list[RewardScore]:
        """Score all rows; a score does not depend on the other rows."""
        with torch.inference_mode():
            if self._prefixes is None or any(row.types for row in rows):
                scored = [(scores, len(row.ids)) for row, scores in self._whole(rows)]
            else:
                scored = self._prefixes.score([row.ids for row in rows])
        results = []
        for row, query, (scores, prefilled) in zip(rows, queries, scored, strict=True):
            steps = [scores[position] for position in query.positions or ()]
            score = math.prod(steps) if self.by_step else scores[-1]
            results.append(RewardScore(score, steps, len(row.ids), prefilled))
        return results

    def _tokenised(self, query: RewardQuery) -> ScoringRow:
        question, answer = query.question, query.answer
        if question is None:
            raise ParameterError(
                "the task has nothing to score",
                "input_str and input_tokens are None",
                "Give text; token ids of another model cannot be scored",
            )
        if answer is not None and self.tokenizer.chat_template:
            turns = [("user", question), ("assistant", answer)]
            messages = [{"role": role, "content": content} for role, content in turns]
            text = self.tokenizer.apply_chat_template(messages, tokenize=False)
            encoding = self.tokenizer(text, add_special_tokens=False, verbose=False)
        else:
            encoding = self.tokenizer(question, answer, verbose=False)
        types = encoding.get("token_type_ids") if self._has_types else None
        return ScoringRow(list(encoding["input_ids"]), types)

    # ---- forward passes -----------------------------------------------------------------------

    def _whole(self, rows: Sequence[ScoringRow]) -> list[tuple[ScoringRow, list[float]]]:
        """Each row with its scores: one per token, or one at all of an encoder of answers."""
        width = max(len(row.ids) for row in rows)
        inputs = {
            "input_ids": padded([row.ids for row in rows], width, self.device),
            "attention_mask": padded([[1] * len(row.ids) for row in rows], width, self.device),
        }
        if any(row.types for row in rows):
            types = [row.types or [0] * len(row.ids) for row in rows]
            inputs["token_type_ids"] = padded(types, width, self.device)
        if self._head is not None:
            hidden = self._network(**inputs, use_cache=False).last_hidden_state
            scores = self._head(hidden).tolist()
        else:
            scores = _label_scores(self._network(**inputs).logits).tolist()
        if isinstance(scores[0], float):
            return [(row, [score]) for row, score in zip(rows, scores, strict=True)]
        return [
            (row, row_scores[: len(row.ids)]) for row, row_scores in zip(rows, scores, strict=True)
        ]


# ---- loading -----------------------------------------------------------------------------------


class _Network(NamedTuple):
    """A model, and how a score is made of its hidden states [..., hidden] -> [...] float32; None
    if the model has its head inside."""

    model: Any
    head: Head | None


def _max_length(network: Any, config: Any) -> int | None:
    """Tokens that a row may have. RoBERTa's first positions stand for padding."""
    length = getattr(config, "max_position_embeddings", None) or None
    embeddings = getattr(network.base_model, "embeddings", None)
    padding = getattr(getattr(embeddings, "position_embeddings", None), "padding_idx", None)
    return length if length is None or padding is None else length - padding - 1


def is_reward_model(directory: Path) -> bool:
    """Whether ``directory`` is a reward model, as its config says."""
    try:
        find_step_format(directory)
    except (ModelError, ParameterError):
        return False
    return True


def find_step_format(directory: Path, chosen: str | None = None) -> str | None:
    """The step format of a reward model; None: it scores whole answers.

    Args:
        directory: of the model.
        chosen: by the user, in place of what the config says.

    Raises:
        ModelError: there is no checkpoint, or it is no reward model.
        ParameterError: the format does not exist, or this model does not have it.
    """
    config = _config(directory)
    name = str((config.get("architectures") or ["no architecture"])[0])
    format_name = chosen or config.get("step_format")
    if format_name is not None and format_name not in STEP_FORMATS:
        raise ParameterError(
            "invalid step_format", f"got {format_name!r}", f"Allowed: {', '.join(STEP_FORMATS)}"
        )
    if name in _OWN_HEADS:
        return format_name or _OWN_HEADS[name]
    if name.endswith("ForTokenClassification"):
        return format_name or "chat"
    is_causal = name.endswith("ForCausalLM")
    if is_causal and format_name == _PLUS_MINUS:
        return format_name
    if name.endswith("ForSequenceClassification") and format_name is None:
        return None
    if format_name is not None and name.endswith(("ForCausalLM", "ForSequenceClassification")):
        raise ParameterError(
            "invalid step_format", f"{name} cannot be read in {format_name!r}", "Leave it out"
        )
    raise ModelError(
        f"the model in {directory} is no reward model",
        f"its config names {name}",
        "Choose one whose architecture ends in ForSequenceClassification or "
        f"ForTokenClassification, or is {' or '.join(_OWN_HEADS)}"
        + (f"; one as Math-Shepherd's takes step_format={_PLUS_MINUS!r}" if is_causal else ""),
    )


def _config(directory: Path) -> dict[str, Any]:
    config = read_json(directory / "config.json", _KIND)
    check_config(config, directory, _KIND)
    named = config.get("architectures")
    if named is not None and not (isinstance(named, list) and all(type(n) is str for n in named)):
        raise _refused(directory, f"architectures of its config.json is {named!r:.60}, not names")
    return config


def _load(directory: Path, step_format: str | None, dtype: str) -> _Network:
    """The model without code of its own."""
    name = str(_config(directory)["architectures"][0])
    if name in _OWN_HEADS:
        return _with_own_head(directory, name, dtype)
    if step_format == _PLUS_MINUS:
        return _Network(_pretrained(transformers.AutoModelForCausalLM, directory, dtype), None)
    kind: Any = transformers.AutoModelForSequenceClassification
    if step_format is not None:
        kind = transformers.AutoModelForTokenClassification
    model = _pretrained(kind, directory, dtype)
    labels = model.config.num_labels
    if labels != 2 and (step_format is not None or labels != 1):
        raise ModelError(
            f"the model in {directory} gives no scores",
            f"it has {labels} labels",
            "Choose a classifier of two labels, or of sequences with one",
        )
    if not hasattr(model, "score"):  # an encoder
        return _Network(model, None)
    return _Network(model.base_model, lambda hidden: _label_scores(model.score(hidden)))


def _label_scores(logits: Tensor) -> Tensor:
    """[..., labels] -> [...] float32: the probability of the second label, or the only logit."""
    logits = logits.float()
    return logits.softmax(-1)[..., 1] if logits.shape[-1] == 2 else logits[..., 0]


def _has_sigmoid(config: Any) -> bool:
    """Whether a classifier has one label, whose logit sentence-transformers takes the sigmoid of:
    unless the config names another function.
    """
    further = getattr(config, "sentence_transformers", None)
    named = further.get("activation_fn") if isinstance(further, dict) else None
    named = named or getattr(config, "sbert_ce_default_activation_function", None)
    return config.num_labels == 1 and not str(named or "").endswith("Identity")


class _Backbone(transformers.Qwen2Model):  # type: ignore[misc]
    _keys_to_ignore_on_load_unexpected = (r"^score\.", r"^v_head\.", r"^lm_head\.")


def _with_own_head(directory: Path, name: str, dtype: str) -> _Network:
    if name == "Qwen2ForPrmModel":
        names = ["v_head.summary.weight", "v_head.summary.bias"]
    else:
        names = ["score.0.weight", "score.0.bias", "score.2.weight", "score.2.bias"]
    tensors = _read_tensors(directory, names)
    model = _pretrained(_Backbone, directory, dtype)
    weights = [tensor.to(model.dtype) for tensor in tensors]

    def linear(x: Tensor, layer: int) -> Tensor:
        weight, bias = (w.to(x.device) for w in weights[2 * layer : 2 * layer + 2])
        return torch.nn.functional.linear(x, weight, bias)

    if len(weights) == 2:
        return _Network(model, lambda hidden: linear(hidden, 0)[..., 0].float().sigmoid())
    return _Network(model, lambda hidden: _label_scores(linear(linear(hidden, 0).relu(), 1)))


def _plus_minus(network: _Network, tokenizer: Any, directory: Path) -> _Network:
    """A causal model as Math-Shepherd's: P(+) of the two next tokens + and -."""
    ids = tokenizer("+ -", add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) != 2:
        raise ModelError(
            f"the model in {directory} cannot be read in {_PLUS_MINUS!r}",
            f"its tokenizer makes {len(ids)} tokens of '+ -'",
            "Choose a model that was trained to say + or - after each step",
        )
    output = network.model.get_output_embeddings().weight[torch.tensor(ids)]  # [2, hidden]

    def head(hidden: Tensor) -> Tensor:
        logits = torch.nn.functional.linear(hidden, output.to(hidden.device))
        return logits.float().softmax(-1)[..., 0]

    return _Network(network.model.base_model, head)


def _pretrained(kind: Any, directory: Path, dtype: str) -> Any:
    check_weight_files(directory, _KIND)
    try:
        with without_progress_bars(), one_module_at_a_time():
            model, report = kind.from_pretrained(
                directory,
                dtype=dtype,
                local_files_only=True,
                ignore_mismatched_sizes=True,  # they are in the report
                output_loading_info=True,
            )
    except Exception as error:
        raise _unreadable(directory, error) from error
    names = [name for name in report["unexpected_keys"] if not _UNREAD.search(name)]
    check_report({**report, "unexpected_keys": names}, directory, _KIND)
    check_values(model.named_parameters(), directory, _KIND)
    return model


def _read_tensors(directory: Path, names: Sequence[str]) -> list[Tensor]:
    """Weights by name, from safetensors or, where there are none, torch's files."""
    tensors: dict[str, Tensor] = {}
    try:
        for file in _weight_files(directory):
            if file.suffix == ".safetensors":
                from safetensors import safe_open

                with safe_open(file, framework="pt") as stored:
                    here = set(names).intersection(stored.keys())
                    tensors |= {name: stored.get_tensor(name) for name in here}
            else:
                stored = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
                tensors |= {name: stored[name] for name in names if name in stored}
    except Exception as error:
        raise _unreadable(directory, error) from error
    missing = [name for name in names if name not in tensors]
    if missing:
        raise _refused(directory, f"its checkpoint lacks {', '.join(missing)}")
    check_values(tensors.items(), directory, _KIND)
    return [tensors[name] for name in names]


def _weight_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors")) or sorted(directory.glob("pytorch_model*.bin"))


def _tokenizer(directory: Path) -> Any:
    check_tokenizer_files(directory, _KIND)
    try:
        return transformers.AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise _unreadable(directory, error) from error


def _unreadable(directory: Path, error: Exception) -> ModelError:
    return _refused(directory, first_words(error))


def _refused(directory: Path, why: str) -> ModelError:
    return ModelError(
        f"cannot load the {_KIND} in {directory}", why, "Check that the directory is complete"
    )


def _keeps_all_states(config: Any) -> bool:
    """Whether the model's cache holds the keys and values of all tokens, in every layer."""
    layers = transformers.DynamicCache(config=config).layers
    return all(type(layer) is transformers.cache_utils.DynamicLayer for layer in layers)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ParameterError(
            "invalid device", f"got {name!r}", "Use 'auto', 'cpu' or 'cuda'"
        ) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ParameterError("invalid device", "there is no CUDA here", "Use 'auto' or 'cpu'")
    return device


def _wrong_kind(by_step: bool) -> ParameterError:
    if by_step:
        return ParameterError(
            "this reward model scores steps",
            "the task has no step_positions",
            "Use PRMController, or a model that classifies sequences",
        )
    return ParameterError(
        "this reward model scores whole answers",
        "the task has step_positions",
        "Use NativeRewardController, or a model that classifies tokens",
    )
