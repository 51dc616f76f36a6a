"""A reward model: rows of token ids in, scores out.

Knows nothing about tasks, threads and batches.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from forethought.errors import ContextLengthError, DependencyError, ModelError, ParameterError
from forethought.model_dir import check_model_dir
from forethought.silence import without_progress_bars

try:
    import torch
    import transformers
except ModuleNotFoundError as _error:
    raise DependencyError.missing(_error.name or "torch", "RewardWorker", "local") from _error

_HEADS = {"ForTokenClassification": True, "ForSequenceClassification": False}
"""End of an architecture's name -> whether it judges steps."""
_DTYPES = ("auto", "float32", "bfloat16", "float16")


class Inquiry(NamedTuple):
    """What a reward task asks; equal ones have the same answer."""

    tokens: tuple[int, ...] | None
    question: str | None
    answer: str | None
    positions: tuple[int, ...] | None


class Row(NamedTuple):
    """One input of the model."""

    ids: list[int]
    types: list[int] | None
    """Token types, of models that tell question and answer apart by them."""


class Verdict(NamedTuple):
    """What the model says."""

    score: float
    step_scores: list[float]
    length: int
    """Tokens of the input."""
    prefilled: int
    """Tokens of it that were run for this task: 0 if they were run for an equal one."""


class RewardModel:
    """A classifier: rows of token ids in, verdicts out. Not to be used by two threads at once.

    Args:
        directory: local Hugging Face directory.
        dtype: of the weights.
        device: where they are.

    Raises:
        ModelError: the directory holds no classifier that gives scores.
        ParameterError: an unknown dtype or device.
    """

    def __init__(self, directory: Path, dtype: str, device: str) -> None:
        if dtype not in _DTYPES:
            raise ParameterError(
                "invalid dtype", f"got {dtype!r}", f"Allowed: {', '.join(_DTYPES)}"
            )
        self.device = _device(device)
        check_model_dir(directory, "reward model")
        self.by_step = judges_steps(directory)
        self._model, self.tokenizer = _load(directory, self.by_step, dtype)
        config = self._model.config
        labels = config.num_labels
        if labels != 2 and (self.by_step or labels != 1):
            raise ModelError(
                f"the model in {directory} gives no scores",
                f"it tells {labels} labels apart",
                "Choose a classifier of two labels, or of sequences with one",
            )
        config.use_cache = False
        self._model.to(self.device).eval()
        text = config.get_text_config()
        self._context = getattr(text, "max_position_embeddings", None) or math.inf
        self._vocabulary = self._model.get_input_embeddings().num_embeddings

    def encode(self, inquiry: Inquiry) -> Row:
        """The input for an inquiry.

        Raises:
            ParameterError: there is none, or the model judges steps and none are named, or the
                other way round.
            ContextLengthError: it is too long.
        """
        if (inquiry.positions is not None) != self.by_step:
            raise _misdirected(self.by_step)
        row = self._tokenised(inquiry) if inquiry.tokens is None else Row([*inquiry.tokens], None)
        length = len(row.ids)
        if not length or not all(0 <= token < self._vocabulary for token in row.ids):
            raise ParameterError(
                "invalid input_tokens",
                f"they are to be at least one id from 0 to {self._vocabulary - 1}",
                "Tokenise with the worker's tokenizer",
            )
        if not all(0 <= position < length for position in inquiry.positions or ()):
            raise ParameterError(
                "invalid step_positions",
                f"got {list(inquiry.positions or ())} for {length} tokens",
                "Give places in input_tokens",
            )
        if length > self._context:
            raise ContextLengthError(
                "the answer is too long for the reward model",
                f"it is {length} tokens with its question, and the context holds {self._context}",
                "Generate fewer tokens, or choose a model with a longer context",
            )
        return row

    def judge(self, rows: Sequence[Row], inquiries: Sequence[Inquiry]) -> list[Verdict]:
        """Run the model once, over all rows.

        They are padded on the right and masked, so that no row is changed by its company.
        """
        with torch.inference_mode():
            logits = self._logits(rows).float()
        scores = logits.softmax(-1)[..., 1] if logits.shape[-1] == 2 else logits[..., 0]
        verdicts = []
        for row, inquiry, found in zip(rows, inquiries, scores.tolist(), strict=True):
            steps = [found[position] for position in inquiry.positions or ()]
            length = len(row.ids)
            score = math.prod(steps) if self.by_step else found
            verdicts.append(Verdict(score, steps, length, length))
        return verdicts

    def _tokenised(self, inquiry: Inquiry) -> Row:
        """Question and answer as the model was trained to see them."""
        question, answer = inquiry.question, inquiry.answer
        if question is None:
            raise ParameterError(
                "the task has nothing to judge",
                "input_str and input_tokens are None",
                "Give text; token ids of another model cannot be judged",
            )
        if answer is not None and self.tokenizer.chat_template:
            said = [("user", question), ("assistant", answer)]
            messages = [{"role": role, "content": content} for role, content in said]
            text = self.tokenizer.apply_chat_template(messages, tokenize=False)
            encoding = self.tokenizer(text, add_special_tokens=False, verbose=False)
        else:
            encoding = self.tokenizer(question, answer, verbose=False)
        return Row(list(encoding["input_ids"]), encoding.get("token_type_ids"))

    def _logits(self, rows: Sequence[Row]) -> Any:
        """Per row, or per row and position if steps are judged: [rows, (positions,) labels]."""
        inputs = {
            "input_ids": self._padded([row.ids for row in rows], self.tokenizer.pad_token_id or 0),
            "attention_mask": self._padded([[1] * len(row.ids) for row in rows], 0),
        }
        if any(row.types for row in rows):
            types = [row.types or [0] * len(row.ids) for row in rows]
            inputs["token_type_ids"] = self._padded(types, 0)
        if self.by_step or not hasattr(self._model, "score"):
            return self._model(**inputs).logits
        # A decoder's head reads the last token. Where that is, its own forward guesses from the
        # padding token, which it may not have, or which may end a text.
        hidden = self._model.base_model(**inputs).last_hidden_state
        last = torch.tensor([len(row.ids) - 1 for row in rows], device=self.device)
        return self._model.score(hidden[torch.arange(len(rows), device=self.device), last])

    def _padded(self, rows: Sequence[list[int]], value: int) -> Any:
        width = max(map(len, rows))
        filled = [row + [value] * (width - len(row)) for row in rows]
        return torch.tensor(filled, device=self.device)


def _device(name: str) -> Any:
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


def is_reward_model(directory: Path) -> bool:
    """Whether ``directory`` is a reward model, as its config says."""
    try:
        return _architecture(directory).endswith(tuple(_HEADS))
    except ModelError:
        return False


def judges_steps(directory: Path) -> bool:
    """Whether the checkpoint classifies tokens rather than sequences.

    Raises:
        ModelError: there is no checkpoint, or it is no reward model.
    """
    name = _architecture(directory)
    for head, by_step in _HEADS.items():
        if name.endswith(head):
            return by_step
    raise ModelError(
        f"the model in {directory} is no reward model",
        f"its config names {name}",
        "Choose one whose architecture ends in ForSequenceClassification or ForTokenClassification",
    )


def _architecture(directory: Path) -> str:
    """The first of the architectures that the config names."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        return str((config.get("architectures") or ["no architecture"])[0])
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(
            f"no model at {directory}",
            f"its config.json cannot be read ({type(error).__name__})",
            "Give the path of a local Hugging Face model directory",
        ) from error


def _load(directory: Path, by_step: bool, dtype: str) -> tuple[Any, Any]:
    """Model and tokenizer."""
    kind: Any = transformers.AutoModelForSequenceClassification
    if by_step:
        kind = transformers.AutoModelForTokenClassification
    try:
        with without_progress_bars():
            model, report = kind.from_pretrained(
                directory, dtype=dtype, local_files_only=True, output_loading_info=True
            )
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(
            f"cannot load the reward model in {directory}",
            reason[0],
            "Check that the directory is complete",
        ) from error
    if report["missing_keys"]:
        raise ModelError(
            f"cannot load the reward model in {directory}",
            f"it lacks {', '.join(sorted(report['missing_keys'])[:3])}, which would be random",
            "Check that the directory is complete",
        )
    return model, tokenizer


def _misdirected(by_step: bool) -> ParameterError:
    if by_step:
        return ParameterError(
            "this reward model judges steps",
            "the task has no step_positions",
            "Use PRMController, or a model that classifies sequences",
        )
    return ParameterError(
        "this reward model judges whole answers",
        "the task has step_positions",
        "Use NativeRewardController, or a model that classifies tokens",
    )
