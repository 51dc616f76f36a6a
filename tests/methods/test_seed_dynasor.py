"""Dynasor-CoT as TensorRT-LLM's blog on scaffolding has it, typed in: only the imports differ, and
the two helper methods that the blog leaves out are written here. It must run as it stands.
"""

from enum import Enum
from typing import List  # noqa: UP035

import pytest
from transformers import AutoTokenizer

from forethought import LLM
from forethought.methods import MajorityVoteController
from forethought.scaffolding import EngineWorker, ScaffoldingLlm, ScriptedWorker
from forethought.scaffolding.controller import Controller
from forethought.scaffolding.task import GenerationTask
from tokens import speaking

# fmt: off
# ruff: noqa: UP006, E501


class DynasorGenerationController(Controller):

    class WorkerTag(Enum):
        GENERATION = "generation_with_dynasor_cot"

    def __init__(
        self,
        generation_dir,
        max_tokens=8192,
        certainty_threshold=3,
        chunk_size=64,
        streaming=False,
    ):
        super().__init__()
        self.generation_dir = generation_dir
        self.max_tokens = max_tokens
        self.certainty_threshold = certainty_threshold
        self.chunk_size = chunk_size
        self.uncertain_words = ["wait", "hold", "but", "okay", "no", "hmm"]
        self.probe_suffix = "... Oh, I suddenly got the answer to the whole problem, **Final Answer**\n\n\\[ \\boxed{"
        self.answer_suffix = "\n\n... Oh, I have got the answer to the whole problem\n**Final Answer:**\n\\[\n \\boxed{"
        self.answer_suffix_with_marker = "\n\n...</think>\n Oh, I have got the answer to the whole problem\n**Final Answer:**\n\\[\n \\boxed{"
        self.tokenizer = AutoTokenizer.from_pretrained(
            self.generation_dir,
            legacy=False,
            padding_side='left',
            truncation_side='left',
            trust_remote_code=False,
            use_fast=True,
        )
        self.streaming = streaming

    def process(self, tasks: List[GenerationTask], **kwargs):
        initial_prompt = tasks[0].input_str

        proposer_task = GenerationTask()
        proposer_task.max_tokens = self.chunk_size
        proposer_task.temperature = 0.6
        proposer_task.top_p = 0.95
        proposer_task.worker_tag = self.WorkerTag.GENERATION

        probe_task = GenerationTask()
        probe_task.max_tokens = 20
        probe_task.temperature = 0.6
        probe_task.top_p = 0.95
        probe_task.worker_tag = self.WorkerTag.GENERATION

        probe_answers = []
        probe_responses = []

        initial_prompt_token_num = len(
            self.tokenizer.encode(initial_prompt, add_special_tokens=False))
        probe_suffix_token_num = len(
            self.tokenizer.encode(self.probe_suffix, add_special_tokens=False))

        current_prompt = initial_prompt

        for _ in range(initial_prompt_token_num + probe_suffix_token_num,
                    self.max_tokens, self.chunk_size):
            proposer_task.input_str = current_prompt
            probe_task.input_str = current_prompt + self.probe_suffix

            yield [proposer_task, probe_task]

            probe_text = probe_task.output_str

            answer = self.obtain_answer(probe_text)
            probe_answers.append(answer)
            probe_responses.append(probe_text)

            if self.should_early_stop(probe_answers, probe_responses):
                tasks[0].result = probe_task.result
                if "</think>" in current_prompt:
                    tasks[0].output_str = (current_prompt + self.answer_suffix +
                                        probe_answers[-1] + "}\n\\]")
                    return
                else:
                    tasks[0].output_str = (current_prompt +
                                        self.answer_suffix_with_marker +
                                        probe_answers[-1] + "}\n\\]")
                    return

            current_prompt += proposer_task.output_str

        tasks[0].result = proposer_task.result
        tasks[0].output_str = current_prompt
        return

    # ---- not in the blog ------------------------------------------------------------------------

    def obtain_answer(self, text):
        depth = 0
        for place, character in enumerate(text):
            depth += {"{": 1, "}": -1}.get(character, 0)
            if depth < 0:
                return text[:place]
        return ""

    def should_early_stop(self, probe_answers, probe_responses):
        last = probe_answers[-self.certainty_threshold:]
        said = probe_responses[-self.certainty_threshold:]
        certain = not any(word in text.lower() for text in said for word in self.uncertain_words)
        return (len(last) == self.certainty_threshold and bool(last[0])
                and len(set(last)) == 1 and certain)


# fmt: on

PROMPT = "How many? "
CHAIN = "".join(f"step {i:02}; " for i in range(60))
TAG = DynasorGenerationController.WorkerTag.GENERATION


def controller(**settings):
    return DynasorGenerationController(speaking(), **{"chunk_size": 8, **settings})


def says(asked, index):
    """A chain, and the answer 42 from its fourth chunk on; each fifth sample finds 7."""
    known, probed, _ = asked.removeprefix(PROMPT).partition("... Oh, I suddenly")
    if probed:
        return f"{42 if len(known) >= 24 else len(known)}" + "}, sure"
    return CHAIN[len(known) :]


def solve(controller, worker, prompts=PROMPT, **options):
    with ScaffoldingLlm(prototype_controller=controller, workers={TAG: worker}) as llm:
        return llm.generate(prompts, **options)


def test_it_runs_alone_and_exits_when_probes_agree():
    result = solve(controller(), ScriptedWorker(says))
    expected = PROMPT + CHAIN[:40] + controller().answer_suffix_with_marker + "42}\n\\]"
    assert result.outputs[0].text == result.output.output_str == expected
    assert result.output.tokens == [ord(c) for c in "42}, sure"]  # those of the probe, as there


def test_it_runs_under_a_majority_vote():
    vote = MajorityVoteController(generation_controller=controller(), default_sample_num=3)
    results = solve(vote, ScriptedWorker(says), [PROMPT, PROMPT])
    for result in results:
        assert result.outputs[0].text.endswith("42}\n\\]")
        assert result.output.meta["majority_vote"]["answer"] == "42"


def test_cloning_it_never_copies_its_tokenizer():
    original = controller()
    assert original.clone().tokenizer is original.tokenizer


@pytest.fixture(scope="module")
def worker():
    llm = LLM(
        speaking(),
        dtype="float32",
        kv_cache_config={"max_tokens": 4096, "page_size": 4, "enable_block_reuse": False},
    )
    with EngineWorker(llm) as worker:
        yield worker


def test_it_runs_on_the_engine_and_its_strings_keep_their_tokens(worker):
    before = worker.llm.stats
    settings = controller(chunk_size=8, max_tokens=160)
    result = solve(settings, worker)
    assert result.outputs[0].text.startswith(PROMPT)
    spent = worker.llm.stats
    prompt = len(settings.tokenizer.encode(PROMPT, add_special_tokens=False))
    suffix = len(settings.tokenizer.encode(settings.probe_suffix, add_special_tokens=False))
    rounds = len(range(prompt + suffix, 160, 8))
    assert rounds >= 5
    # Each round computes the last token of the chunk before it, twice, and the suffix; were its
    # strings tokenised afresh, it would be the prompt and all that has been said.
    most = 2 * prompt + suffix + rounds * (suffix + 2)
    assert spent.prefilled - before.prefilled <= most
    assert spent.decoded - before.decoded <= rounds * (8 + 20)


def test_it_runs_on_the_engine_under_a_majority_vote(worker):
    vote = MajorityVoteController(controller(max_tokens=140), default_sample_num=3)
    results = solve(vote, worker, [PROMPT, "Why? "])
    for result in results:
        assert result.finished
        assert result.output.text.startswith(("How many? ", "Why? "))
