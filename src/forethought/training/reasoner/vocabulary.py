"""The reasoner's tokenizer: byte-level BPE of 512 tokens; every digit is a token of its own.

``<think>`` and ``</think>`` are single tokens that stay visible in decoded text; turn markers and
the end token are special. A number's leading space belongs to the word before it, so that
``23 + 15 = 38`` is eight tokens.
"""

import json
import random
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from forethought.methods.dynasor import ANSWER_SUFFIX, ANSWER_SUFFIX_WITH_MARKER, PROBE_SUFFIX
from forethought.training.reasoner.problems import sample_problem
from forethought.training.reasoner.traces import write_trace

SIZE = 512
END, USER, ASSISTANT = "<|end|>", "<|user|>", "<|assistant|>"
THINK, THINK_END = "<think>", "</think>"
WORDS = r"\d| ?[A-Za-z']+(?: (?=\d))?| ?[^\sA-Za-z\d']+(?: (?=\d)|\n)?|\s"

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{- '<|assistant|>' + message['content'].split('</think>')[-1].strip() + '<|end|>' -}}
{%- else -%}
{{- '<|user|>' + message['content'] -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|><think>\\n' -}}
{%- endif -%}
"""


def prompt_text(question: str) -> str:
    """The chat template applied to one question: ends with the think block opened."""
    return f"{USER}{question}{ASSISTANT}{THINK}\n"


def train_tokenizer(seed: int = 0, samples: int = 4000) -> Tokenizer:
    """Learn the merges from freshly generated problems, traces and elicitation suffixes."""
    rng = random.Random(seed)
    suffixes = (PROBE_SUFFIX, ANSWER_SUFFIX, ANSWER_SUFFIX_WITH_MARKER.replace(THINK_END, ""))
    texts = [*suffixes] * (samples // 4)
    for _ in range(samples):
        problem = sample_problem(rng)
        trace = write_trace(problem, rng, slip_rate=0.2).text.replace(THINK_END, "")
        texts += [problem.question, trace]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(text, special=True, normalized=False) for text in (END, USER, ASSISTANT)]
    visible = [AddedToken(text, special=False, normalized=False) for text in (THINK, THINK_END)]
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE - len(visible),
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(visible)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_positions: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into a directory."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
        "padding_side": "left",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
