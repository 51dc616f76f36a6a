"""Texts to train on, as token ids: a prompt and an answer; and the target answering prompts itself.

A file has one JSON object per line, in one of three formats::

    {"token_ids": [5, 9, 2, 7], "prompt_length": 2}
    {"prompt": "Name a prime.", "response": "7"}
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}

Prompts given as text are rendered with the target's chat template, if it has one.

Self-distillation (:func:`self_distil`) writes such a file: the target answers the prompts, ``PART``
at a time, and an interrupted run resumes after the last complete part. A share of the answers may
be cut at a random position and probed for the final answer as Dynasor-CoT does
(:func:`probe_prompts`), since a drafter is also used on such text.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from forethought.config.base import StrictModel
from forethought.config.sampling import SamplingParams
from forethought.errors import ParameterError, UsageError
from forethought.llm.tokenizer import Tokenizer
from forethought.methods.parts.probe import (
    ANSWER_SUFFIX,
    ANSWER_SUFFIX_WITH_MARKER,
    PROBE_SUFFIX,
    THINK_END,
)
from forethought.strict_json import read_json
from forethought.training.prompts import OnTexts
from forethought.training.teacher import Teacher

logger = logging.getLogger(__name__)

PART = 64
"""Number of prompts that are answered and written together."""
PROBE_TOKENS = 12
"""Maximum tokens of the answer to a probe."""


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and its answer."""

    token_ids: list[int]
    prompt_length: int
    """Number of tokens before the answer."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def prompt(self) -> list[int]:
        """Token ids of the prompt."""
        return self.token_ids[: self.prompt_length]

    def to_line(self) -> str:
        """Its line in a file of texts."""
        return json.dumps({"token_ids": self.token_ids, "prompt_length": self.prompt_length})


def load_texts(path: Path, tokenizer: Tokenizer, max_len: int) -> list[Text]:
    """The texts of a file, truncated to ``max_len`` tokens; those without answer are dropped.

    Raises UsageError if the file cannot be read, or a line has none of the formats.
    """
    texts = [
        _text(record, tokenizer, f"{path}:{number}")
        for number, record in read_records(path, "texts")
    ]
    cut = [Text(text.token_ids[:max_len], text.prompt_length) for text in texts]
    answered = [text for text in cut if 0 < text.prompt_length < len(text)]
    if not answered:
        raise UsageError(
            f"nothing to learn from in {path}",
            f"none of its {len(texts)} texts has an answer within {max_len} tokens",
            "Give prompts with answers",
        )
    return answered


def load_prompts(path: Path, tokenizer: Tokenizer) -> list[list[int]]:
    """Prompts, one per line: text, or an object with ``prompt``, ``messages`` or ``token_ids``.

    Raises UsageError if the file cannot be read or holds no prompt.
    """
    prompts = []
    for number, record in read_records(path, "prompts"):
        where = f"{path}:{number}"
        if isinstance(record, str):
            record = {"prompt": record}
        if "token_ids" in record:
            ids = _ids(record, where)
            prompts.append(ids[: record.get("prompt_length", len(ids))])
        elif "messages" in record:
            turns = [turn for turn in record["messages"] if turn.get("role") != "assistant"]
            prompts.append(_render(turns, tokenizer))
        elif isinstance(record.get("prompt"), str):
            prompts.append(_render([{"role": "user", "content": record["prompt"]}], tokenizer))
        else:
            raise _bad(where, "prompt, messages or token_ids")
    return prompts


def save_texts(texts: Iterable[Text], path: Path) -> None:
    """Append texts to a file."""
    with path.open("a", encoding="utf-8") as stream:
        stream.writelines(text.to_line() + "\n" for text in texts)


def _text(record: Any, tokenizer: Tokenizer, where: str) -> Text:
    if isinstance(record, dict):
        if "token_ids" in record and isinstance(record.get("prompt_length"), int):
            return Text(_ids(record, where), record["prompt_length"])
        if isinstance(record.get("prompt"), str) and isinstance(record.get("response"), str):
            turns = [{"role": "user", "content": record["prompt"]}]
            return _answered(turns, record["response"], tokenizer)
        turns = record.get("messages") or []
        if len(turns) > 1 and turns[-1].get("role") == "assistant":
            return _answered(turns[:-1], turns[-1]["content"], tokenizer)
    raise _bad(where, "token_ids and prompt_length, prompt and response, or messages with a reply")


def _answered(turns: Sequence[dict[str, Any]], response: str, tokenizer: Tokenizer) -> Text:
    prompt = _render(turns, tokenizer)
    end = tokenizer.hf.eos_token_id
    answer = tokenizer.encode_more(response) + ([] if end is None else [end])
    return Text(prompt + answer, len(prompt))


def _render(turns: Sequence[dict[str, Any]], tokenizer: Tokenizer) -> list[int]:
    """Token ids as ``LLM.chat`` renders turns; without a chat template, their contents by line."""
    if tokenizer.hf.chat_template:
        return tokenizer.encode_more(tokenizer.render(turns))
    return tokenizer.encode("\n".join(str(turn["content"]) for turn in turns))


def read_records(path: Path, kind: str) -> list[tuple[int, Any]]:
    """Line numbers and records, each an object or a line of text. ``kind`` is their name in
    messages.

    Raises UsageError if the file cannot be read or is empty, or a line from ``{`` on is not JSON.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the {kind} in {path}", str(error), "Give a file") from error
    records: list[tuple[int, Any]] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                records.append((number, read_json(line) if line.startswith("{") else line))
            except (ValueError, RecursionError) as error:
                raise UsageError(
                    f"{path}:{number} is not JSON", str(error), "Fix the line"
                ) from error
    if not records:
        raise UsageError(f"no {kind} in {path}", "the file is empty", "Write one per line")
    return records


def _ids(record: dict[str, Any], where: str) -> list[int]:
    ids = record["token_ids"]
    if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids) or not ids:
        raise _bad(where, "token_ids as a list of integers")
    return ids


def _bad(where: str, what: str) -> UsageError:
    return UsageError(f"nothing to read at {where}", f"it lacks {what}", "See --help")


class DistillationSettings(StrictModel):
    """How the target answers prompts."""

    seed: int = Field(default=0, ge=0)
    temperatures: tuple[float, ...] = Field(default=(0.0, 0.8), min_length=1)
    """Used in turn: a drafter serves greedy and sampled requests."""
    max_tokens: int = Field(default=512, ge=1)
    """Most tokens of an answer."""
    probe_share: float = Field(default=0.0, ge=0.0, le=1.0)
    """Number of probes, as a share of the texts; see :func:`probe_prompts`."""

    def for_probes(self) -> DistillationSettings:
        """How probes are answered: greedily and briefly."""
        return DistillationSettings(seed=self.seed, temperatures=(0.0,), max_tokens=PROBE_TOKENS)


def self_distil(
    teacher: Teacher,
    prompts: Sequence[list[int]],
    path: Path,
    settings: DistillationSettings,
    on_texts: OnTexts | None = None,
) -> list[Text]:
    """Texts with the target's answers to all prompts; those that ``path`` lacks are generated.

    Raises ParameterError if it has answers to other prompts, UsageError if it cannot be parsed.
    """
    done = _resume(prompts, path) if path.exists() else 0
    if on_texts is not None and done < len(prompts):
        on_texts("answers", done, len(prompts))
    while done < len(prompts):
        part = prompts[done : done + PART]
        answers = teacher.generate(part, [_params(settings, done + n) for n in range(len(part))])
        pairs = zip(part, answers.token_ids, strict=True)
        save_texts([Text(prompt + answer, len(prompt)) for prompt, answer in pairs], path)
        done += len(part)
        logger.info("%d of %d prompts answered", done, len(prompts))
        if on_texts is not None:
            on_texts("answers", done, len(prompts))
    return load_texts(path, teacher.tokenizer, teacher.lm.max_positions)


def _resume(prompts: Sequence[list[int]], path: Path) -> int:
    """Number of prompts that are answered; an incomplete part is removed from the file."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):  # an interrupted write
        lines.pop()
    if len(lines) < len(prompts):
        lines = lines[: len(lines) // PART * PART]
        path.write_text("".join(lines), encoding="utf-8")
    for prompt, line in zip(prompts, lines, strict=False):
        try:
            record = json.loads(line)
            answered = record["token_ids"][: record["prompt_length"]]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"cannot go on from the texts in {path}",
                f"a line is broken ({type(error).__name__}: {error})",
                "Remove the file to have the prompts answered anew",
            ) from error
        if answered != prompt:
            raise ParameterError(
                f"the texts in {path} are answers to other prompts",
                "a run in the same directory had others",
                "Give the same prompts, or another directory",
            )
    return len(lines)


def _params(settings: DistillationSettings, number: int) -> SamplingParams:
    return SamplingParams(
        temperature=settings.temperatures[number % len(settings.temperatures)],
        max_tokens=settings.max_tokens,
        seed=(settings.seed << 32) + number,
    )


def probe_prompts(
    texts: Sequence[Text], teacher: Teacher, settings: DistillationSettings
) -> list[list[int]]:
    """Prompts that interrupt a share of the texts and ask for the final answer.

    Each is a text cut at a random position of its answer, followed by :func:`probe_suffix`; those
    that leave no space for ``PROBE_TOKENS`` in the context are dropped. They depend on the texts
    and the seed alone.
    """
    rng, tokenizer = random.Random(f"{settings.seed}:probes"), teacher.tokenizer
    max_len, prompts = teacher.lm.max_positions - PROBE_TOKENS, []
    for text in rng.sample(texts, int(len(texts) * settings.probe_share)):
        beginning = text.token_ids[: rng.randint(text.prompt_length, len(text))]
        suffix = probe_suffix(tokenizer.decode(beginning[text.prompt_length :]), rng)
        prompt = beginning + tokenizer.encode_more(suffix)
        if len(prompt) <= max_len:
            prompts.append(prompt)
    return prompts


def probe_suffix(text: str, rng: random.Random) -> str:
    """A suffix with which Dynasor-CoT elicits an answer after ``text``, mostly that of a probe."""
    if THINK_END in text:
        return ANSWER_SUFFIX
    return PROBE_SUFFIX if rng.random() < 0.85 else ANSWER_SUFFIX_WITH_MARKER
