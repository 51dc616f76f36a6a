"""Drafting with Medusa's heads: which state they read, which tokens stand where in the tree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engines import drain, engine, expect_empty, load, outputs
from forethought.config.medusa import MEDUSA_CHOICES, MedusaDecodingConfig
from forethought.config.sampling import SamplingParams
from forethought.config.speculation import MAX_LEVELS
from forethought.errors import ParameterError
from forethought.kv.storage import KvStorage
from forethought.model.runner import ModelRunner
from forethought.speculative.drafter import DraftKind, DraftRequest, Target
from forethought.speculative.drafters.medusa import MedusaDrafter
from forethought.speculative.registry import build
from medusa_heads import make_heads, random_heads
from models import greedy, prompts, tiny, transformers_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
PATHS = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
ALL_NODES = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
LEAVES = [[0, 0, 0], [0, 1], [1, 0]]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_heads(tmp_path_factory.mktemp("heads"))


class Watch:
    """Keeps every draft that a drafter makes, with the tokens that it was made behind."""

    def __init__(self, machine: Any) -> None:
        [self._equipped] = machine.speculation.drafters
        self._inner = self._equipped.drafter.prepare_draft_tokens
        self._equipped.drafter.prepare_draft_tokens = self._prepare
        self.seen: list[tuple[list[int], DraftRequest, Any]] = []

    def _prepare(self, scheduled: Any, manager: Any = None) -> None:
        self._inner(scheduled, manager)
        for request in scheduled.generation_requests:
            self.seen.append((list(request.tokens), request, request.draft))


def final_state(tokens: list[int]) -> torch.Tensor:
    """Transformers' own state behind the final norm, at the last of the tokens: [hidden]."""
    with torch.inference_mode():
        found = transformers_model(tiny("llama")).model(torch.tensor([tokens]))
    return found.last_hidden_state[0, -1].clone()


def test_heads_read_the_state_from_which_the_root_was_drawn(heads: Path) -> None:
    """Off by one position, either way, they would draft something else."""
    config = MedusaDecodingConfig(speculative_model=heads, medusa_choices=PATHS)
    machine = engine(speculative=[config])
    watch = Watch(machine)
    machine.add(prompts((9,))[0], GREEDY.replace(max_tokens=6))
    drain(machine)
    assert watch.seen
    for tokens, _, draft in watch.seen:
        ranked = make_heads(3)(final_state(tokens[:-1])).topk(3).indices.tolist()
        paths = [path for path in PATHS if len(path) <= draft.depth]
        assert list(draft.tokens) == [ranked[len(path) - 1][path[-1]] for path in paths]
        assert draft.kind is DraftKind.POINT


@pytest.mark.parametrize(
    "choices", [ALL_NODES, LEAVES, str(ALL_NODES)], ids=["all", "leaves", "text"]
)
def test_both_spellings_of_a_tree_make_the_same_drafts(choices: Any, heads: Path) -> None:
    config = MedusaDecodingConfig(speculative_model=heads, medusa_choices=choices)
    assert (config.max_draft_len, config.max_total_draft_tokens) == (3, 6)
    machine = engine(speculative=[config])
    watch = Watch(machine)
    machine.add(prompts((9,))[0], GREEDY)
    drain(machine)
    assert watch.seen[0][2].parents == (-1, -1, 0, 0, 1, 2)


@pytest.mark.parametrize(
    "architecture", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "gpt2", "opt"]
)
def test_any_model_and_a_whole_batch_decode_exactly(architecture: str, heads: Path) -> None:
    config = MedusaDecodingConfig(speculative_model=heads)
    plain, drafting = (engine(architecture, pages=128, speculative=s) for s in ([], [config]))
    found = []
    for machine in (plain, drafting):
        sequences = [machine.add(each, GREEDY)[0] for each in prompts((1, 4, 9, 17))]
        drain(machine)
        found.append(outputs(sequences))
        expect_empty(machine)
    assert found[0] == found[1]


def test_heads_that_are_right_are_accepted(tmp_path: Path) -> None:
    """Heads that repeat the target's own token, on a text that repeats one, are mostly right."""
    lm = load("llama")
    made = make_heads(3)
    weight = lm.unembed(torch.eye(32)).T
    for head in made:
        torch.nn.init.zeros_(head[0].linear.weight)
        torch.nn.init.zeros_(head[0].linear.bias)
        head[-1].weight.data.copy_(weight)
    made.save(tmp_path)
    config = MedusaDecodingConfig(speculative_model=tmp_path, medusa_choices=[[0, 0, 0]])
    bias = GREEDY.replace(logit_bias={7: 100.0})
    machine = engine(speculative=[config])
    [sequence] = machine.add([5, 6], bias)
    drain(machine)
    assert sequence.output == [7] * 30
    plain = engine()
    [same] = plain.add([5, 6], bias)
    drain(plain)
    assert sequence.output == same.output


def test_a_request_may_want_shorter_drafts(heads: Path) -> None:
    config = MedusaDecodingConfig(speculative_model=heads, medusa_choices=PATHS)
    lm = load("llama")
    storage = KvStorage(lm.layer_shapes, 4, 4, lm.dtype, lm.device)
    drafter = build(config, Target(ModelRunner(lm, storage), 64))
    assert [drafter.nodes(depth) for depth in range(5)] == [0, 3, 6, 7, 7]
    machine = engine(speculative=[config])
    watch = Watch(machine)
    params = GREEDY.replace(speculation={"max_draft_len": 2})
    [sequence] = machine.add(prompts((9,))[0], params)
    drain(machine)
    assert {len(draft) for _, _, draft in watch.seen[:-2]} == {6}
    assert sequence.output == greedy(tiny("llama"), prompts((9,)), 30)[0]


def test_the_most_probable_tree_is_as_deep_as_there_are_heads(heads: Path, tmp_path: Path) -> None:
    def sizes(directory: Path = heads, **fields: Any) -> tuple[int, int]:
        config = MedusaDecodingConfig(speculative_model=directory, tree="most_probable", **fields)
        return config.max_draft_len, config.max_total_draft_tokens

    assert sizes() == (3, 15)
    assert sizes(max_draft_len=2) == sizes(num_medusa_heads=2) == (2, 15)
    assert sizes(max_total_draft_tokens=6) == (3, 6)
    assert sizes(tmp_path) == (5, 15)  # nobody says how many heads there are
    make_heads(3).save(tmp_path, config={"medusa_num_heads": 5})
    lm = load("llama")
    target = Target(ModelRunner(lm, KvStorage(lm.layer_shapes, 4, 4, lm.dtype, lm.device)), 64)
    drafter = build(MedusaDecodingConfig(speculative_model=tmp_path, tree="most_probable"), target)
    assert [drafter.nodes(depth) for depth in (0, 1, 5)] == [0, 15, 15]


@pytest.mark.parametrize("said", [999, 0, -1, 2.5, "3", None])
def test_a_config_that_misstates_the_heads_does_no_harm(said: Any, tmp_path: Path) -> None:
    make_heads(3).save(tmp_path, config={"medusa_num_heads": said})
    lm = load("llama")
    target = Target(ModelRunner(lm, KvStorage(lm.layer_shapes, 4, 4, lm.dtype, lm.device)), 64)
    for tree in ("choices", "most_probable"):
        config = MedusaDecodingConfig(speculative_model=tmp_path, tree=tree)
        assert config.max_draft_len <= MAX_LEVELS
        assert build(config, target).nodes(9) > 0
    deep = {"speculative_model": tmp_path, "tree": "most_probable"}
    assert build(MedusaDecodingConfig(max_draft_len=3, **deep), target).nodes(3) == 15
    with pytest.raises(ParameterError, match=r"max_draft_len.*got 4.*holds 3 heads"):
        MedusaDecodingConfig(max_draft_len=4, **deep)


@pytest.mark.parametrize("floor", [0.0, 0.06])
def test_what_the_heads_hold_unlikely_is_left_out(floor: float, heads: Path) -> None:
    config = MedusaDecodingConfig(
        speculative_model=heads, tree="most_probable", min_draft_probability=floor
    )
    machine = engine(speculative=[config])
    watch = Watch(machine)
    machine.add(prompts((9,))[0], GREEDY.replace(max_tokens=8))
    drain(machine)
    for tokens, request, draft in watch.seen:
        distributions = make_heads(3)(final_state(tokens[:-1])).detach().softmax(-1)
        chances = []
        for node, token in enumerate(draft.tokens):
            parent = draft.parents[node]
            level = 0 if parent < 0 else chances[parent][0] + 1
            before = 1.0 if parent < 0 else chances[parent][1]
            chances.append((level, before * float(distributions[level, token])))
        assert all(chance >= floor for _, chance in chances)
        if len(draft.tokens) < request.max_nodes:  # and nothing else is
            assert draft.parents.count(-1) == int((distributions[0] >= floor).sum())
    assert (len(watch.seen[0][2].tokens) < 15) == bool(floor)


def test_a_tree_deeper_than_the_heads_is_refused_and_the_default_one_is_cut(
    heads: Path, tmp_path: Path
) -> None:
    lm = load("llama")
    target = Target(ModelRunner(lm, KvStorage(lm.layer_shapes, 4, 4, lm.dtype, lm.device)), 64)
    deep = MedusaDecodingConfig(speculative_model=heads, medusa_choices=[[0] * 4])
    with pytest.raises(ParameterError, match=r"medusa_choices have 4 levels.*holds 3 heads"):
        build(deep, target)
    make_heads(3).save(tmp_path, config={"medusa_num_heads": 5})
    unread = MedusaDecodingConfig(speculative_model=tmp_path / "not yet")
    assert unread.max_draft_len == 5
    drafter = build(unread.model_copy(update={"speculative_model": tmp_path}), target)
    assert isinstance(drafter, MedusaDrafter)
    assert drafter.nodes(5) == drafter.nodes(3) == 21


@pytest.mark.parametrize("layout", ["authors", "vllm", "pytorch", "pytorch, vllm"])
@pytest.mark.parametrize("said", [1, 2, 5])
def test_the_weights_say_how_many_heads_there_are_whatever_the_config_says(
    layout: str, said: int, tmp_path: Path
) -> None:
    names = "vllm" if "vllm" in layout else "authors"
    config = {"medusa_num_heads": said, "num_heads": said}
    make_heads(3).save(tmp_path, names, config)  # type: ignore[arg-type]
    if "pytorch" in layout:
        [file] = tmp_path.glob("*.safetensors")
        torch.save(load_file(file), tmp_path / "medusa_lm_head.pt")
        file.unlink()
    static = MedusaDecodingConfig(speculative_model=tmp_path)
    assert (static.max_draft_len, static.max_total_draft_tokens) == (3, 21)
    loose = MedusaDecodingConfig(speculative_model=tmp_path, tree="most_probable")
    assert (loose.max_draft_len, loose.max_total_draft_tokens) == (3, 15)
    assert MedusaDecodingConfig(speculative_model=tmp_path, num_medusa_heads=2).max_draft_len == 2
    assert MedusaDecodingConfig(speculative_model=tmp_path, num_medusa_heads=9).max_draft_len == 3
    machine = engine(speculative=[static])
    watch = Watch(machine)
    [sequence] = machine.add(prompts((9,))[0], GREEDY)
    drain(machine)
    assert max(draft.depth for _, _, draft in watch.seen) == 3
    assert sequence.output == greedy(tiny("llama"), prompts((9,)), 30)[0]


def test_where_the_weights_cannot_be_read_the_config_counts_the_heads(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 2}')
    assert MedusaDecodingConfig(speculative_model=tmp_path).max_draft_len == 2
    for name in ("a.pt", "a.safetensors"):
        (tmp_path / name).write_bytes(b"no weights at all")
        assert MedusaDecodingConfig(speculative_model=tmp_path).max_draft_len == 2


def test_ranks_beyond_the_vocabulary_are_refused(heads: Path) -> None:
    config = MedusaDecodingConfig(speculative_model=heads, medusa_choices=[[0], [100]])
    assert engine(speculative=[config])
    config = MedusaDecodingConfig(speculative_model=heads, medusa_choices=[[0], [101]])
    with pytest.raises(ParameterError, match="the rank 101, and the drafter knows 101 tokens"):
        engine(speculative=[config])


def test_the_tree_is_that_of_the_heads_own_configuration_unless_another_is_given(
    heads: Path, tmp_path: Path
) -> None:
    make_heads(3).save(tmp_path, config={"medusa_choices": [[0], [0, 0], [1]]})
    assert MedusaDecodingConfig(speculative_model=tmp_path).max_total_draft_tokens == 3
    given = MedusaDecodingConfig(speculative_model=tmp_path, medusa_choices=PATHS)
    assert given.max_total_draft_tokens == 7
    make_heads(3).save(tmp_path / "open", config={"medusa_choices": [[0], [1, 0]]})
    with pytest.raises(ParameterError, match=r"\[1\] is missing"):
        MedusaDecodingConfig(speculative_model=tmp_path / "open")
    for broken in ([0, 1], "[[0]", [["a"]], [[]], {"a": 1}):
        make_heads(3).save(tmp_path / "broken", config={"medusa_choices": broken})
        with pytest.raises(ParameterError, match="invalid medusa_choices"):
            MedusaDecodingConfig(speculative_model=tmp_path / "broken")
    assert MedusaDecodingConfig(speculative_model=heads).max_draft_len == 3
    assert MedusaDecodingConfig(speculative_model=heads, num_medusa_heads=2).max_draft_len == 2
    assert MedusaDecodingConfig(speculative_model=heads, max_draft_len=1).max_draft_len == 1
    nowhere = MedusaDecodingConfig(speculative_model=tmp_path / "nowhere")
    assert nowhere.medusa_choices == MEDUSA_CHOICES
    assert (nowhere.max_draft_len, nowhere.max_total_draft_tokens) == (5, 24)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"medusa_choices": []}, "paths are lists of ranks"),
        ({"medusa_choices": [[0], [0]]}, "is listed twice"),
        ({"medusa_choices": [[0, -1]]}, "ranks from 0"),
        ({"medusa_choices": [[0], [1, 0]]}, r"\[1\] is missing, a prefix of others"),
        ({"medusa_choices": [[0, 0]], "num_medusa_heads": 1}, "longer than num_medusa_heads"),
        ({"medusa_choices": [[0, 0]], "max_draft_len": 3}, "medusa_choices make it 2"),
        ({"tree": "most_probable", "medusa_choices": [[0]]}, "another tree in each step"),
        (
            {"tree": "most_probable", "num_medusa_heads": 3, "max_draft_len": 4},
            "num_medusa_heads is 3",
        ),
        ({"tree": "most_probable", "max_total_draft_tokens": 2}, "max_draft_len is 3"),
        ({"min_draft_probability": 0.1}, "always drafts all nodes"),
        ({"posterior_alpha": 0.3}, "posterior_threshold is not given"),
        ({"posterior_threshold": 0.0}, "posterior_threshold"),
        ({"num_medusa_heads": 0}, "num_medusa_heads"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], message: str, heads: Path) -> None:
    with pytest.raises(ParameterError, match=message):
        MedusaDecodingConfig(speculative_model=heads, **fields)


def test_alpha_is_the_root_of_the_threshold_unless_it_is_given(heads: Path) -> None:
    config = MedusaDecodingConfig(speculative_model=heads, posterior_threshold=0.09)
    assert config.posterior_alpha == pytest.approx(0.3)
    exact = MedusaDecodingConfig(speculative_model=heads)
    assert (exact.posterior_threshold, exact.posterior_alpha) == (None, None)
