"""ReDrafter's recipe: what is learned where, and that learning it makes drafts longer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forethought.assets import heads_dir, problems, reasoner_dir
from forethought.config.drafters import ReDrafterDecodingConfig
from forethought.config.sampling import SamplingParams
from forethought.model.hidden_states import FINAL
from forethought.speculative.heads.redrafter import ReDrafterHead, ReDrafterShape
from forethought.training.batches import TrainingBatch, TrainingBatches
from forethought.training.recipes.redrafter import ReDrafterRecipe, ReDrafterSettings
from forethought.training.recipes.table import recipe
from forethought.training.teacher import Teacher
from forethought.training.texts import Text
from forethought.training.trainer import DRAFTER, Trainer, seeded
from models import VOCAB, prompts

HIDDEN = 32
PROMPTS = prompts((4, 7, 9, 5, 6, 8))
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SETTINGS = ReDrafterSettings(
    steps=6, rate=0.01, batch_tokens=256, blocks=1, draft_len=3, share=1.0, export_dtype="float32"
)


def made(settings: ReDrafterSettings, texts: list[Text], teacher: Teacher) -> ReDrafterRecipe:
    with seeded(settings.seed):
        return ReDrafterRecipe.build(settings, texts, teacher)


def made_batch(tokens: list[int], taught_from: int, **fields: Any) -> TrainingBatch:
    """One text whose every next token has probability 1."""
    width = len(tokens)
    return TrainingBatch(
        tokens=torch.tensor([tokens]),
        taught=torch.arange(width)[None] >= taught_from,
        lengths=torch.tensor([width]),
        states=fields.get("states", {FINAL: torch.zeros(1, width, HIDDEN)}),
        choices=torch.tensor([[*tokens[1:], 0]])[..., None],
        probs=torch.ones(1, width, 1),
    )


def loss_of(head: ReDrafterHead, batch: TrainingBatch, teacher: Teacher, draft_len: int) -> float:
    settings = SETTINGS.model_copy(update={"draft_len": draft_len})
    batches = TrainingBatches([Text([1, 2], 1)], teacher, [FINAL], tokens=64, seed=0)
    with torch.no_grad():
        return float(ReDrafterRecipe(settings, batches, head, teacher).loss(batch))


def blank_head() -> ReDrafterHead:
    head = ReDrafterHead(ReDrafterShape(HIDDEN, VOCAB, 2 * HIDDEN, blocks=0))
    for weight in head.parameters():
        torch.nn.init.zeros_(weight)
    return head


def test_each_token_is_read_before_the_one_behind_it_is_drafted(teacher: Teacher) -> None:
    head = blank_head()  # behind token t it is sure of t + 1, as in a text that counts
    taken_in = torch.nn.functional.silu(teacher.lm.embed(torch.arange(VOCAB)))
    head.rnn_w.weight.data.copy_(torch.eye(HIDDEN))
    nearest = torch.nn.functional.normalize(taken_in, dim=-1)
    head.lm_head[0].weight.data[:, HIDDEN:] = 500.0 * nearest.roll(1, 0)
    counting = list(range(20, 50))
    assert loss_of(head, made_batch(counting, 4), teacher, 5) < 0.01
    assert loss_of(head, made_batch(counting[::2], 4), teacher, 5) > 5.0


@pytest.mark.parametrize(("offset", "low"), [(2, True), (1, False), (3, False)])
def test_the_first_drafted_token_is_two_positions_behind_the_state(
    teacher: Teacher, offset: int, low: bool
) -> None:
    """The token between them is the root, which is known when a draft is made."""
    width = 24
    states = {FINAL: torch.eye(width, HIDDEN)[None]}  # a state says where it stands
    head = blank_head()
    for position in range(width - offset):  # the head predicts the token at this offset
        head.lm_head[0].weight.data[40 + position + offset, position] = 50.0
    batch = made_batch(list(range(40, 40 + width)), 3, states=states)
    assert (loss_of(head, batch, teacher, 1) < 0.01) == low


def test_only_what_the_target_chose_is_learned_and_nothing_behind_the_end(
    teacher: Teacher,
) -> None:
    head = blank_head()
    with torch.no_grad():
        head.lm_head[0].weight.normal_()
        head.rnn_w.weight.normal_()
    tokens = list(range(20, 40))
    alone = loss_of(head, made_batch(tokens, 12), teacher, 3)
    changed = made_batch([7, 8, 9, *tokens[3:]], 12)
    assert loss_of(head, changed, teacher, 3) == pytest.approx(alone, rel=1e-4)
    longer = made_batch([*tokens, 5, 6, 7], 12)
    cut = TrainingBatch(
        tokens=longer.tokens,
        taught=longer.taught & (torch.arange(23) < 20),
        lengths=torch.tensor([20]),
        states=longer.states,
        choices=longer.choices,
        probs=longer.probs,
    )
    assert loss_of(head, cut, teacher, 3) == pytest.approx(alone, rel=1e-4)


def test_a_step_lowers_the_loss(teacher: Teacher, texts: list[Text], tmp_path: Path) -> None:
    chosen = made(SETTINGS, texts, teacher)
    batch = chosen.batch(0)
    before = chosen.loss(batch).item()
    Trainer(chosen, SETTINGS, tmp_path).run(until=1)
    assert chosen.loss(batch).item() < before


def test_a_run_that_was_interrupted_ends_with_the_weights_of_one_that_was_not(
    teacher: Teacher, texts: list[Text], tmp_path: Path
) -> None:
    for name, stops in (("whole", [None]), ("parts", [2, 5, None])):
        for stop in stops:
            Trainer(made(SETTINGS, texts, teacher), SETTINGS, tmp_path / name).run(until=stop)
    weights = [
        ReDrafterHead.load(tmp_path / name / DRAFTER, HIDDEN, VOCAB).state_dict()
        for name in ("whole", "parts")
    ]
    for name in weights[0]:
        assert torch.equal(weights[0][name], weights[1][name])


def test_after_a_tiny_run_more_than_one_drafted_token_per_step_is_accepted(
    teacher: Teacher, texts: list[Text], tmp_path: Path
) -> None:
    """Overfitted answers with broad distributions; new weights have none accepted."""
    settings = SETTINGS.model_copy(update={"steps": 150, "draft_len": 4, "check_every": 1000})

    def accepted(directory: Path) -> float:
        config = ReDrafterDecodingConfig(speculative_model=directory, draft_len_per_beam=4)
        metrics = teacher.generate(PROMPTS, [GREEDY] * len(PROMPTS), config).metrics
        return metrics.accepted / metrics.steps

    chosen = made(settings, texts, teacher)
    chosen.save(tmp_path / "new")
    assert accepted(tmp_path / "new") < 0.2
    Trainer(chosen, settings, tmp_path).run()
    assert accepted(tmp_path / DRAFTER) > 1.3


def test_the_recipe_is_found_by_its_name(tmp_path: Path) -> None:
    found = recipe("redrafter")
    assert found.Settings is ReDrafterSettings
    assert found.decoding(tmp_path) == ReDrafterDecodingConfig(speculative_model=tmp_path)


def test_the_shipped_head_makes_more_than_2_8_tokens_per_step() -> None:
    """Six shipped problems at temperature 0 in float32, up to 200 tokens of each."""
    directory = heads_dir("redrafter")
    assert sum(each.stat().st_size for each in directory.iterdir()) < 3_000_000
    target = Teacher.load(reasoner_dir(), dtype="float32", device="cpu")
    render, encode = target.tokenizer.render, target.tokenizer.encode_more
    asked = [
        encode(render([{"role": "user", "content": problem["question"]}]))
        for problem in problems()[:6]
    ]
    params = [SamplingParams(temperature=0.0, max_tokens=200)] * 6
    config = ReDrafterDecodingConfig(speculative_model=directory)
    found = target.generate(asked, params, config)
    assert found.token_ids == target.generate(asked, params).token_ids
    assert (found.metrics.mean_acceptance_length or 0.0) > 2.8
