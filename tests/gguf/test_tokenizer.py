"""The tokenizer of a file splits texts as the model's own does: compared with tokenizers that the
tokenizers library trained, with transformers' classes, and with sentencepiece's algorithm.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers.models.gemma.tokenization_gemma import GemmaTokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX
from transformers.tokenization_utils_base import generate_merges

import gguf
from forethought.errors import ModelError
from forethought.gguf.file import GgufFile
from forethought.gguf.metadata import Metadata
from forethought.gguf.pre_tokenizer import PRE_TOKENIZERS
from forethought.gguf.tokenizer import TokenType, Vocabulary, tokenizer_files
from forethought.llm.tokenizer import Tokenizer
from gguf_files import add_tokenizer, byte_letters, write_model

SPACE = "\u2581"
CORPUS = [
    "It's 1234 and 7 o'clock; they'll've gone, I'D say.\n\n\tdef f(x):  return x**2  # done\r\n",
    "Grüße an Zoë – naïve café! 他在1999年写了三本书。 नमस्ते दुनिया, e\u0301tude",
    "x  5   y\n\n 7 b <think>hm</think> http://a.b/c?d=1&e=22   \n",
    "The quick brown fox jumps over the lazy dog, the end of the theory of the other one.",
]
TEXTS = [
    *CORPUS,
    "",
    " ",
    "  a",
    "a ",
    "x  5",
    "a\n\n 7 b",
    "\n\n\n",
    "'S 'll 12345678",
    "ÀÉ ÏÐ\u00a0z",
]


def files(
    folder: Path,
    vocabulary: Callable[[gguf.GGUFWriter, int], None],
    case: str = "llama",
    **changes: Any,
) -> dict[str, Any]:
    """The content of the files of the tokenizer of a model."""
    named = {key.replace("__", "."): value for key, value in changes.items()}
    path = write_model(folder / "model.gguf", case, changes=named, vocabulary=vocabulary)
    return tokenizer_files(Vocabulary(Metadata(GgufFile.open(path))))


def loaded(contents: dict[str, Any], folder: Path) -> Tokenizer:
    """The tokenizer as the engine loads it."""
    directory = folder / "tokenizer"
    directory.mkdir(exist_ok=True)
    for name, content in contents.items():
        (directory / name).write_text(json.dumps(content))
    return Tokenizer.load(directory)


def encoder(contents: dict[str, Any]) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(contents["tokenizer.json"]))


def trained(split: Any, normalizer: Any = None, **options: Any) -> tokenizers.Tokenizer:
    """A byte-level tokenizer of 400 tokens that the library trains with a split."""
    tokenizer = tokenizers.Tokenizer(models.BPE(**options))
    tokenizer.pre_tokenizer, tokenizer.decoder = split, decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=byte_letters(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


def add_trained(
    tokenizer: tokenizers.Tokenizer, pre: str | None
) -> Callable[[gguf.GGUFWriter, int], None]:
    """Adds the vocabulary and the merges of a tokenizer."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=lambda token: int(model["vocab"][token]))
    merges = [" ".join(pair) for pair in model["merges"]]
    kinds = [TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(tokens) - 3)
    return lambda writer, size: add_tokenizer(writer, "gpt2", tokens, kinds, pre=pre, merges=merges)


def splits_by(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


DIGITS = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
)


@pytest.mark.parametrize(
    ("pre", "reference"),
    [
        ("gpt-2", lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=False))),
        ("smollm", lambda: trained(DIGITS)),
        ("qwen2", lambda: trained(splits_by(PRETOKENIZE_REGEX), normalizers.NFC())),
    ],
)
def test_a_byte_level_tokenizer_is_the_one_that_was_trained(
    pre: str, reference: Callable[[], tokenizers.Tokenizer], tmp_path: Path
) -> None:
    expected = reference()
    contents = files(tmp_path, add_trained(expected, pre), llama__context_length=77)
    result = encoder(contents)
    for text in TEXTS:
        assert result.encode(text).tokens == expected.encode(text).tokens
        assert result.decode(result.encode(text).ids) == expected.decode(expected.encode(text).ids)
    assert result.get_vocab() == expected.get_vocab()
    config = contents["tokenizer_config.json"]
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == (
        "<s>",
        "</s>",
        "<pad>",
    )
    assert config["model_max_length"] == 77


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_the_split_of_every_name_is_one_that_the_library_can_make(pre: str, tmp_path: Path) -> None:
    contents = files(tmp_path, add_trained(trained(DIGITS), pre))
    result = encoder(contents)
    for text in TEXTS:
        ids = result.encode(text, add_special_tokens=False).ids
        normalizes = PRE_TOKENIZERS[pre].normalizes
        whole = normalizers.NFC().normalize_str(text) if normalizes else text
        assert result.decode(ids, skip_special_tokens=False) == whole


def test_the_splits_are_those_that_transformers_has_for_their_names() -> None:
    table = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    compared = 0
    for name, pattern in table.GGUF_PRE_TOKENIZER_SPLITS.items():
        if name in PRE_TOKENIZERS:
            reference, own = splits_by(pattern), PRE_TOKENIZERS[name].patterns
            assert len(own) == 1
            result = splits_by(own[0])
            for text in TEXTS:
                assert result.pre_tokenize_str(text) == reference.pre_tokenize_str(text), name
            compared += 1
    assert compared >= 12


def test_digits_split_as_unicode_numbers_do() -> None:
    pattern, *_ = PRE_TOKENIZERS["smollm"].patterns
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    for text in [*TEXTS, "a1٣²Ⅻ½四9"]:
        expected = pre_tokenizers.Digits(individual_digits=True).pre_tokenize_str(text)
        assert split.pre_tokenize_str(text) == expected


def test_an_unknown_split_or_none_is_refused_by_name(tmp_path: Path) -> None:
    expected = trained(DIGITS)
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.pre is 'newest'\); known are gpt-2"):
        files(tmp_path, add_trained(expected, "newest"))
    with pytest.raises(ModelError, match=r"it has no tokenizer\.ggml\.pre"):
        files(tmp_path, add_trained(expected, None))
    with pytest.raises(ModelError, match="pre is 'default'"):
        files(tmp_path, add_trained(expected, "default"))


def test_other_kinds_of_tokenizers_are_refused_by_name(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter, size: int) -> None:
        add_tokenizer(writer, "t5", ["a"], [1], scores=[0.0])

    with pytest.raises(ModelError, match="of the model 't5'; gpt2 and llama are read"):
        files(tmp_path, add)


def plain_bytes(
    tokens: Sequence[str] = (), kinds: Sequence[int] = (), merges: Sequence[str] = ("t h",)
) -> Callable[[gguf.GGUFWriter, int], None]:
    """Bytes, ``th``, and further tokens from id 260 on."""

    def add(writer: gguf.GGUFWriter, size: int) -> None:
        texts = ["<pad>", "<s>", "</s>", *byte_letters(), "th", *tokens]
        types = [TokenType.CONTROL] * 3 + [TokenType.NORMAL] * 257 + list(kinds)
        add_tokenizer(writer, "gpt2", texts, types, pre="qwen2", merges=merges)

    return add


def test_control_tokens_are_special_and_user_defined_ones_are_found_whole(tmp_path: Path) -> None:
    tokens = ["<|im_end|>", "<think>", "  ", "[PAD263]", "[PAD9]"]
    kinds = [
        *(TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.USER_DEFINED),
        *(TokenType.UNUSED, TokenType.UNUSED),
    ]
    tokenizer = loaded(files(tmp_path, plain_bytes(tokens, kinds)), tmp_path)
    ids = tokenizer.encode("a<think>b<|im_end|>  ")
    assert [ids[1], ids[3], ids[4]] == [261, 260, 262]
    assert len(ids) == 5
    assert tokenizer.special_ids == {0, 1, 2, 260}
    assert tokenizer.decode(ids) == "a<think>b  "
    vocabulary = tokenizer.hf.get_vocab()
    assert "[PAD263]" not in vocabulary
    assert vocabulary["[PAD9]"] == 264
    assert len(tokenizer.encode("[PAD263]")) == 8


@pytest.mark.parametrize(
    ("begins", "ends", "expected"),
    [
        (True, True, [1, 100, 2]),
        (True, None, [1, 100]),
        (False, True, [100, 2]),
        (None, None, [100]),
        (False, False, [100]),
    ],
)
def test_texts_begin_and_end_with_the_tokens_that_the_file_says(
    begins: bool | None, ends: bool | None, expected: list[int], tmp_path: Path
) -> None:
    add = plain_bytes()
    changes = {"tokenizer__ggml__add_bos_token": begins, "tokenizer__ggml__add_eos_token": ends}
    tokenizer = loaded(files(tmp_path, add, **changes), tmp_path)
    assert tokenizer.encode("a") == expected
    assert tokenizer.hf.encode("a", add_special_tokens=False) == [100]


def test_a_text_of_llama_3_begins_with_a_token_where_the_file_does_not_say(tmp_path: Path) -> None:
    tokenizer = loaded(files(tmp_path, add_trained(trained(DIGITS), "llama-bpe")), tmp_path)
    assert tokenizer.encode("the")[0] == 1


def test_a_token_that_begins_texts_and_is_not_there_is_refused(tmp_path: Path) -> None:
    add = plain_bytes()
    path = write_model(
        tmp_path / "model.gguf", vocabulary=add, changes={"tokenizer.ggml.add_bos_token": True}
    )
    file = GgufFile.open(path)
    del file.metadata["tokenizer.ggml.bos_token_id"]
    with pytest.raises(ModelError, match="bos_token_id"):
        tokenizer_files(Vocabulary(Metadata(file)))


@pytest.mark.parametrize("merge", ["t", "t h e", "zz h", "a b"])
def test_merges_that_do_not_fit_the_vocabulary_are_refused(merge: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.merges"):
        files(tmp_path, plain_bytes(merges=["t h", merge]))


def test_a_vocabulary_whose_types_are_too_few_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="token_type"):
        files(tmp_path, plain_bytes(["x1"], []))


def test_equal_tokens_keep_the_first_id(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    contents = files(tmp_path, plain_bytes(["th"], [TokenType.NORMAL]))
    assert contents["tokenizer.json"]["model"]["vocab"]["th"] == 259
    assert "1 tokens twice" in caplog.text


def test_templates_are_those_of_the_file(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    contents = files(tmp_path, plain_bytes(), tokenizer__chat_template=template)
    tokenizer = loaded(contents, tmp_path)
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.hf.apply_chat_template(chat, tokenize=False) == "<s>hi"
    contents = files(
        tmp_path,
        plain_bytes(),
        tokenizer__chat_template=template,
        tokenizer__chat_template__rag="R",
    )
    tokenizer = loaded(contents, tmp_path)
    assert tokenizer.hf.apply_chat_template(chat, chat_template="rag", tokenize=False) == "R"
    assert tokenizer.hf.apply_chat_template(chat, tokenize=False) == "<s>hi"
    assert "chat_template" not in files(tmp_path, plain_bytes())["tokenizer_config.json"]


PIECES = [
    *("t", "h", "e", "th", "the", f"{SPACE}the", SPACE, f"{SPACE}t", f"{SPACE}th", "o", "n"),
    *("on", "one", "ne", f"{SPACE}o", f"{SPACE}one", "r", "er", "her", "other", "ot", "x", "2"),
    *(f"{SPACE}{SPACE}", "\n", "oth", "he", "re", "ere", "there", f"{SPACE}x"),
]


def sentencepiece_vocabulary(
    tokens: Sequence[str] = (), kinds: Sequence[int] = (), seed: int = 0
) -> tuple[Callable[[gguf.GGUFWriter, int], None], dict[str, int], dict[int, float]]:
    """What adds a vocabulary of ``PIECES`` with scores in random order; its ids; its scores."""
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, *tokens]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    types += [TokenType.BYTE] * 256 + [TokenType.NORMAL] * len(PIECES)
    order = list(range(len(PIECES)))
    random.Random(seed).shuffle(order)
    scores = [0.0] * 259 + [-float(number) for number in order] + [-1000.0] * len(tokens)

    def add(writer: gguf.GGUFWriter, size: int) -> None:
        add_tokenizer(writer, "llama", texts, [*types, *kinds], scores=scores)
        writer.add_unk_token_id(0)

    ids = {text: number for number, text in enumerate(texts)}
    return add, ids, dict(enumerate(scores))


def merged_by_score(text: str, ids: dict[str, int], scores: dict[int, float]) -> list[int]:
    """The algorithm of sentencepiece: of all neighbours that make a token, those with the highest
    score are joined, the first of them first, until there are none. What is no token is bytes.
    """
    parts = list(text)
    while True:
        pairs = [
            (-scores[ids[a + b]], number)
            for number, (a, b) in enumerate(itertools.pairwise(parts))
            if ids.get(a + b, 0) >= 259
        ]
        if not pairs:
            break
        _, number = min(pairs)
        parts[number : number + 2] = ["".join(parts[number : number + 2])]
    result = []
    for part in parts:
        by_bytes = [3 + byte for byte in part.encode()]
        result += [ids[part]] if part in ids else by_bytes
    return result


@settings(max_examples=60)
@given(st.text(alphabet="theonrx2 \n\u00e9", max_size=12), st.integers(0, 5))
def test_scores_give_the_tokens_of_sentencepiece(
    tmp_path_factory: pytest.TempPathFactory, text: str, seed: int
) -> None:
    add, ids, scores = sentencepiece_vocabulary(seed=seed)
    result = encoder(files(tmp_path_factory.mktemp("spm"), add))
    expected = merged_by_score(SPACE + text.replace(" ", SPACE), ids, scores) if text else []
    assert result.encode(text).ids == [1, *expected]
    assert result.decode(result.encode(text).ids) == text


def test_merges_are_in_the_order_in_which_transformers_makes_them(tmp_path: Path) -> None:
    add, ids, scores = sentencepiece_vocabulary()
    pieces = {piece: ids[piece] for piece in PIECES}
    expected = generate_merges(pieces, {piece: scores[ids[piece]] for piece in PIECES})
    merges = files(tmp_path, add)["tokenizer.json"]["model"]["merges"]
    assert len(merges) > len(PIECES) // 2
    assert list(map(tuple, merges)) == expected


def test_no_space_comes_first_where_the_file_says_so(tmp_path: Path) -> None:
    add, ids, scores = sentencepiece_vocabulary()
    contents = files(tmp_path, add, tokenizer__ggml__add_space_prefix=False)
    result = encoder(contents)
    assert result.encode("the one").ids == [1, *merged_by_score(f"the{SPACE}one", ids, scores)]
    assert result.decode(result.encode(" the").ids) == " the"


def test_unknown_and_control_tokens_are_special_in_sentencepiece(tmp_path: Path) -> None:
    add, ids, _ = sentencepiece_vocabulary(
        ["<|end|>", "<tool>"], [TokenType.CONTROL, TokenType.USER_DEFINED]
    )
    tokenizer = loaded(files(tmp_path, add), tmp_path)
    assert tokenizer.special_ids == {0, 1, 2, ids["<|end|>"]}
    assert tokenizer.encode("x<tool>x<|end|>")[2] == ids["<tool>"]
    assert tokenizer.hf.unk_token == "<unk>"
    assert tokenizer.byte_values[3 + 0x41] == 0x41


def test_texts_after_the_control_tokens_of_mistral_get_no_space(tmp_path: Path) -> None:
    add, ids, scores = sentencepiece_vocabulary(
        ["[INST]", "[/INST]"], [TokenType.CONTROL, TokenType.CONTROL]
    )
    result = encoder(files(tmp_path, add))
    assert result.encode("[INST] the").ids == [
        *(1, ids["[INST]"]),
        *merged_by_score(f"{SPACE}the", ids, scores),
    ]
    assert result.encode("the").ids == [1, *merged_by_score(f"{SPACE}the", ids, scores)]


def test_the_special_tokens_of_phi_3_take_spaces_along(tmp_path: Path) -> None:
    add, ids, scores = sentencepiece_vocabulary(["<|user|>"], [TokenType.CONTROL])
    result = encoder(files(tmp_path, add, "phi3"))
    expected = [1, ids["<|user|>"], *merged_by_score(f"{SPACE}the", ids, scores)]
    assert result.encode("<|user|>\nthe").ids == expected
    assert not files(tmp_path, add)["tokenizer.json"]["added_tokens"][-1]["rstrip"]


def test_gemma_merges_in_the_order_of_its_tokens_and_joins_spaces(tmp_path: Path) -> None:
    runs = ["  ", "   "]
    tokens = ["<pad>", "<eos>", "<bos>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [*runs, *(piece for piece in PIECES if piece != 2 * SPACE)]
    kinds = [TokenType.CONTROL] * 3 + [TokenType.BYTE] * 256 + [TokenType.USER_DEFINED] * 2
    kinds += [TokenType.NORMAL] * (len(tokens) - len(kinds))

    def add(writer: gguf.GGUFWriter, size: int) -> None:
        add_tokenizer(writer, "llama", tokens, kinds, scores=[0.0] * len(tokens))

    changes = {"tokenizer__ggml__add_space_prefix": False}
    result = encoder(files(tmp_path, add, "gemma2", **changes))
    vocabulary = {
        token if token.strip() or "\n" in token else SPACE * len(token): number
        for number, token in enumerate(tokens)
    }
    mergeable = {token: number for token, number in vocabulary.items() if number >= 259}
    merges = [
        (token[:length], token[length:])
        for token in mergeable
        for length in range(len(token) - 1, 0, -1)
        if token[:length] in mergeable and token[length:] in mergeable
    ]
    expected = GemmaTokenizer(vocab=vocabulary, merges=merges, bos_token="<bos>", eos_token="<eos>")
    for text in ("the other one", "  the", "x  2   the\n", " there", "the    one"):
        ids = expected.encode(text, add_special_tokens=False)
        assert result.encode(text, add_special_tokens=False).ids == ids
        assert result.decode(ids) == text
