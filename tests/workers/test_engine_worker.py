"""``EngineWorker``: tasks are live sequences, and what continues keeps its exact tokens."""

import asyncio
import copy
import gc
import json
import pickle
import threading
import time

import pytest

from engines import expect_empty, held_back
from forethought import LLM, AsyncLLM, SamplingParams, assets
from forethought.config.guided import GuidedDecodingParams
from forethought.errors import BudgetExceeded, ContextLengthError, ParameterError, UsageError
from forethought.methods import DynasorGenerationController, MajorityVoteController
from forethought.outputs import GRAMMAR_COMPLETE, ThinkingOutput, ThoughtEnd
from forethought.scaffolding import (
    AsCompleted,
    Branch,
    Budget,
    ChatTask,
    ComputeTask,
    Controller,
    EngineWorker,
    FirstDone,
    GenerationTask,
    NativeGenerationController,
    OpenaiWorker,
    ScaffoldingLlm,
    ScriptedWorker,
    StreamGenerationTask,
    TRTLLMWorker,
    replay,
)
from tokens import byte_level, speaking, thinking

PROMPT = "Hello world, how are you?"
GREEDY = {"temperature": 0.0, "ignore_eos": True}
CACHE = {"max_tokens": 4096, "page_size": 4, "enable_block_reuse": False}  # counts are then exact
FIELDS = {"dtype": "float32", "kv_cache_config": CACHE}
LENGTH = len(byte_level()(PROMPT).input_ids)


@pytest.fixture(scope="module")
def direct():
    """Answers to compare with; its engine is lent to the worker of each test."""
    return LLM(speaking(), **FIELDS)


@pytest.fixture(scope="module")
def oracle():
    """The same model once more, never lent."""
    return LLM(speaking(), **FIELDS)


@pytest.fixture(scope="module")
def long(oracle):
    """What greedy decoding says to the prompt, in one piece."""
    return oracle.generate(PROMPT, SamplingParams(max_tokens=100, **GREEDY)).outputs[0]


@pytest.fixture
def worker(direct, long):
    """A worker that must leave no sequence behind."""
    worker = EngineWorker(direct, max_parked=2)
    try:
        yield worker
        deadline = time.perf_counter() + 60
        while sequences(worker) and time.perf_counter() < deadline:
            gc.collect()  # a session that only a traceback held
            time.sleep(0.01)
        assert not sequences(worker)
    finally:
        worker.shutdown()
    expect_empty(direct._frontend.engine)


def wait_until(condition, seconds=60.0):
    deadline = time.perf_counter() + seconds
    while not condition() and time.perf_counter() < deadline:
        time.sleep(0.005)
    assert condition()


def sequences(worker):
    scheduler = worker.llm._frontend.engine.scheduler
    return worker.llm._thread.call(lambda: list(scheduler)).result()


class Play(Controller):
    """Runs a generator function; what it returns is the output's ``meta``."""

    def __init__(self, play):
        super().__init__()
        self.play = play

    def process(self, tasks, **kwargs):
        found = yield from self.play(tasks[0])
        tasks[0].output_str, tasks[0].customized_result_fields["found"] = "", found


def answer(controller, worker, prompt=PROMPT, **options):
    with ScaffoldingLlm(controller, {"generation": worker}) as llm:
        return llm.generate(prompt, **options)


def played(worker, play, **options):
    return answer(Play(play), worker, **options).output.meta["found"]


def ask(prompt=None, kind=GenerationTask, **fields):
    return kind(input_str=prompt, worker_tag="generation", **{**GREEDY, **fields})


def cost(worker, before):
    now = worker.llm.stats
    return now.prefilled - before.prefilled, now.decoded - before.decoded


# ---- one task ----------------------------------------------------------------------------------


def test_a_generation_is_that_of_the_engine(worker, long):
    before = worker.llm.stats
    result = answer(NativeGenerationController(GREEDY), worker, sampling_params={"max_tokens": 30})
    output = result.output
    assert output.token_ids == long.token_ids[:30]
    assert long.text.startswith(output.text)
    assert output.finish_reason == "length"
    assert output.usage == result.usage
    assert (result.usage.prefilled, result.usage.decoded) == cost(worker, before)
    assert (result.usage.completion_tokens, result.usage.prompt_tokens) == (30, LENGTH)


def test_the_first_token_of_a_task_comes_before_its_last(worker):
    def play(task):
        answers = [ask(PROMPT, max_tokens=40, n=n) for n in (1, 2)]
        yield answers
        return [(answer.ttft_s, answer.latency_s) for answer in answers]

    for first, last in played(worker, play):
        assert 0 < first < last


def test_every_sampling_field_reaches_the_engine(worker):
    params = SamplingParams(
        max_tokens=9,
        min_tokens=3,
        n=2,
        seed=5,
        temperature=0.7,
        top_k=20,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        top_n_sigma=5.0,
        xtc_probability=0.1,
        xtc_threshold=0.2,
        dry_multiplier=0.5,
        dry_base=1.5,
        dry_allowed_length=1,
        dry_penalty_last_n=50,
        dry_sequence_breakers=(" ", "xy"),
        logit_bias={5: -2.0},
        stop=("qqq",),
        stop_token_ids=(7,),
        include_stop_str_in_output=True,
        ignore_eos=True,
        logprobs=2,
        skip_special_tokens=False,
    )

    def play(task):
        yield from NativeGenerationController(params).process([task])
        return task.llm_request_params, [sample.logprobs for sample in task.samples]

    sent, logprobs = played(worker, play)
    assert SamplingParams(**sent).replace(n=2) == params
    assert all(len(entries) >= 2 for sample in logprobs for entries in sample)


def test_a_task_says_what_has_the_shape_that_it_asks_for(worker):
    shape = GuidedDecodingParams(regex=r"\[([12](, [12]){0,2})?\]")  # JSON, of a limited length
    chat = ChatTask.create_from_prompt("hi")
    chat.guided_decoding = {"choice": ["yes!", "no!"]}

    def play(task):
        yield from NativeGenerationController({"guided_decoding": shape, "n": 3}).process([task])
        chat.worker_tag = task.worker_tag
        yield [chat]
        return [json.loads(sample.text) for sample in task.samples]

    lists = played(worker, play)
    assert len(lists) == 3
    assert all(isinstance(each, list) and set(each) <= {1, 2} for each in lists)
    assert chat.output_str in ("yes!", "no!")
    assert (chat.finish_reason, chat.stop_reason) == ("stop", GRAMMAR_COMPLETE)


def test_what_follows_a_complete_shape_continues_all_of_its_tokens(worker):
    """The token that completed it is in the text, unlike one that only ends a text."""

    def play(task):
        task.guided_decoding = {"choice": ["hello!"]}
        yield from NativeGenerationController().process([task])
        more = task.fork(" And", max_tokens=3, **GREEDY)
        yield [more]
        return task.output_tokens, more.request_handle.session.tokens

    said, tokens = played(worker, play)
    assert tokens[LENGTH : LENGTH + len(said)] == said
    assert byte_level().decode(tokens[LENGTH:]).startswith("hello! And")


def test_a_shape_that_cannot_be_followed_is_the_users_mistake(worker):
    shape = {"json": {"type": "objct"}}
    with pytest.raises(ParameterError, match="Invalid type: objct"):
        answer(NativeGenerationController({"guided_decoding": shape}), worker)


@pytest.mark.parametrize("name", ["best_of", "echo", "suffix", "user", "return_context_logits"])
def test_what_the_engine_cannot_honour_is_refused_by_name(worker, name):
    with pytest.raises(ParameterError, match=f"EngineWorker cannot honour {name}"):
        answer(NativeGenerationController({name: "x"}), worker)


def test_an_effort_that_only_servers_read_is_refused(worker):
    chat = ChatTask.create_from_prompt("hello")
    chat.reasoning_effort = "low"
    with pytest.raises(ParameterError, match="cannot honour reasoning_effort"):
        asyncio.run(worker.run_task(chat))


def test_bad_prompts_are_the_users_mistakes(worker):
    native = NativeGenerationController(GREEDY)
    with pytest.raises(ParameterError, match="empty prompt"):
        answer(native, worker, "")
    with pytest.raises(ContextLengthError):
        answer(native, worker, "Hello " * 500)
    with pytest.raises(ParameterError, match="invalid max_tokens"):
        answer(native, worker, sampling_params={"max_tokens": 0})

    def play(task):
        yield [ask(skip_tokenizer=True)]

    with pytest.raises(ParameterError, match="no token ids"):
        played(worker, play)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))],
    ids=["deepcopy", "pickle"],
)
def test_tasks_that_have_run_are_copied_without_what_the_engine_holds(worker, copied, long):
    def play(task):
        done = ask(PROMPT, max_tokens=6, num_logprobs=1, streaming_output_flag=True)
        stream = ask(PROMPT, StreamGenerationTask, max_tokens=6, streaming_step=2)
        yield [done, stream]
        fork = done.fork(" And", max_tokens=4, **GREEDY)
        siblings = [copied(each) for each in (done, stream, fork)]
        plain = [dict(vars(each)) for each in (*siblings, done, stream)]
        yield [stream, fork, *siblings[1:]]
        return plain, [sibling.output_tokens for sibling in siblings]

    (done, stream, fork, *originals), said = played(worker, play)
    assert [sibling["request_handle"] for sibling in (done, stream, fork)] == [None] * 3
    assert fork["fork_point"].handle is None
    for sibling, original in zip((done, stream), originals, strict=True):
        own = {name: original[name] for name in ("request_handle", "usage")}  # they go on
        assert {**sibling, **own} == original
    assert done["output_tokens"] == long.token_ids[:6]
    assert stream["output_tokens"] == long.token_ids[:2]  # and the copy of it starts anew
    assert said[1] == long.token_ids[:2]
    assert len(said[2]) == 4  # a fork goes on from its text


def test_token_ids_are_taken_as_they_are(worker, direct, long):
    ids = direct.tokenizer(PROMPT).input_ids
    result = answer(
        NativeGenerationController({**GREEDY, "max_tokens": 8}), worker, ids, sampling_params=None
    )
    assert result.output.token_ids == long.token_ids[:8]


def test_text_can_be_left_out(worker, long):
    def play(task):
        task = ask(PROMPT, max_tokens=4, skip_detokenizer=True)
        yield [task]
        return task.output_str, task.output_tokens

    assert played(worker, play) == (None, long.token_ids[:4])


def test_tokens_are_streamed_as_they_come(worker, direct, long, monkeypatch):
    engine, heard, unheard = direct._frontend.engine, threading.Event(), []
    step = engine.step

    def patient_step(max_steps):
        """Give the first token time to be heard; between steps the engine answers questions."""
        if not heard.wait(3.0):
            unheard.append(engine.stats.decoded)
        return step(max_steps)

    monkeypatch.setattr(engine, "step", patient_step)
    controller = NativeGenerationController({**GREEDY, "max_tokens": 20}, streaming=True)
    events = []
    with ScaffoldingLlm(controller, {"generation": worker}) as llm:
        for event in llm.generate_async(PROMPT).events():
            events.append(event.output)
            heard.set()
    assert len(unheard) < 20, "nothing was heard before the end"
    assert [t for event in events for t in event.token_ids] == long.token_ids[:20]
    assert long.text.startswith("".join(event.text for event in events))


def test_a_chat_goes_through_the_template(worker, direct):
    ids = direct.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], add_generation_prompt=True, tokenize=True
    )["input_ids"]

    def play(task):
        chat = ChatTask.create_from_prompt("Hello")
        chat.worker_tag, chat.temperature, chat.max_tokens = "generation", 0.0, 6
        chat.enable_token_counting = True
        plain = GenerationTask(input_tokens=ids, worker_tag="generation", **GREEDY, max_tokens=6)
        chat.ignore_eos = True
        yield [chat, plain]
        assert chat.last_assistant_content() == chat.output_str
        return chat.output_tokens == plain.output_tokens, chat.prompt_tokens_num, chat.end_flag

    assert played(worker, play) == (True, len(ids), True)


def test_tasks_can_be_run_without_a_scaffolding_llm(worker, long):
    async def main():
        task = ask(PROMPT, max_tokens=5)
        status = await worker.run_task(task)
        await worker.async_shutdown()
        return status.name, task.output_tokens

    assert asyncio.run(main()) == ("SUCCESS", long.token_ids[:5])


# ---- continuing --------------------------------------------------------------------------------


def test_strings_put_together_continue_the_exact_tokens(worker, long):
    def play(task):
        prompt, tokens = PROMPT, []
        for _ in range(10):
            piece = ask(prompt, max_tokens=7)
            yield [piece]
            tokens += piece.output_tokens
            prompt += piece.output_str
        return tokens

    before = worker.llm.stats
    assert played(worker, play) == long.token_ids[:70]
    prefilled, decoded = cost(worker, before)
    assert decoded == 70
    assert (
        prefilled <= LENGTH + 9
    )  # the prompt once, and at most the last token of each piece again


def test_of_several_earlier_texts_the_longest_is_continued(worker, long):
    def play(task):
        first = ask(PROMPT, max_tokens=5)
        yield [first]
        second = ask(PROMPT + first.output_str, max_tokens=5)
        yield [second]
        third = ask(PROMPT + first.output_str + second.output_str + "!", max_tokens=1)
        yield [third]
        return third.usage.prefilled

    assert played(worker, play) == 2  # the last token, not yet computed, and "!"


def test_a_text_cut_by_a_stop_string_is_continued_behind_the_cut(worker, oracle, long):
    stop = "sc"
    assert long.text.index(stop) > 10

    def play(task):
        first = ask(PROMPT, max_tokens=60, stop=stop)
        yield [first]
        assert first.stop_reason == stop
        second = ask(PROMPT + first.output_str, max_tokens=10, num_logprobs=0)
        yield [second]
        return first.output_str, second.output_tokens

    text, tokens = played(worker, play)
    ids = oracle.tokenizer(PROMPT).input_ids + whole_tokens(oracle, long.token_ids, text)
    expected = oracle.generate(ids, SamplingParams(max_tokens=10, **GREEDY))
    assert tokens == expected.outputs[0].token_ids


def whole_tokens(oracle, token_ids, text):
    """The tokens that are wholly in the beginning of a text, then the rest of it encoded."""
    spelled = [oracle.tokenizer.decode(token_ids[:count]) for count in range(len(token_ids))]
    count = max(n for n, head in enumerate(spelled) if text.startswith(head))
    rest = text[len(spelled[count]) :]
    return token_ids[:count] + oracle.tokenizer(rest).input_ids


def test_the_token_that_ended_a_text_is_not_continued(worker, direct, long):
    end = long.token_ids[9]
    kept = long.token_ids.index(end)

    def play(task):
        first = ask(PROMPT, max_tokens=60, stop_token_ids=[end])
        yield [first]
        assert first.output_tokens == long.token_ids[: kept + 1]
        second = ask(PROMPT + first.output_str, max_tokens=3)
        yield [second]
        third = first.fork("", max_tokens=3, stop_token_ids=[], **GREEDY)
        yield [third]
        return second.output_tokens, third.output_tokens

    second, third = played(worker, play)
    assert second == third == long.token_ids[kept : kept + 3]


def test_what_a_request_said_is_not_continued_by_another_request(worker):
    native = NativeGenerationController({**GREEDY, "max_tokens": 5})
    with ScaffoldingLlm(native, {"generation": worker}) as llm:
        first = llm.generate(PROMPT).output
        second = llm.generate(PROMPT + first.text)
    assert second.usage.cached + second.usage.prefilled == second.usage.prompt_tokens


def test_a_branch_continues_what_was_said_around_it_but_not_beside_it(worker, long):
    native = NativeGenerationController({**GREEDY, "max_tokens": 4})

    def play(task):
        first = ask(PROMPT, max_tokens=5)
        yield [first]
        inside = GenerationTask(input_str=PROMPT + first.output_str)
        branch = Branch(native, [inside])
        yield from drain(branch)
        beside = GenerationTask(input_str=inside.input_str + inside.output_str)
        yield from drain(Branch(native, [beside]))
        return inside.output_tokens, inside.usage.cached, beside.request_handle is not None

    tokens, cached, _ = played(worker, play)
    assert tokens == long.token_ids[5:9]
    assert cached == 0


def drain(*branches):
    with AsCompleted(branches) as running:
        while running:
            yield running


# ---- forks by handle ---------------------------------------------------------------------------


def test_a_fork_does_not_disturb_the_main_chain_and_costs_its_suffix_only(worker, oracle, long):
    suffix = " So? "
    ids = oracle.tokenizer(suffix).input_ids

    def play(task):
        main = ask(PROMPT, StreamGenerationTask, max_tokens=60, streaming_step=10)
        probes = []
        with AsCompleted([main]) as running:
            while running:
                done = yield running
                if done is main and not main.end_flag:
                    probes.append((main.output_tokens, main.fork(suffix, max_tokens=4, **GREEDY)))
                    running.add(main, probes[-1][1])
        return main.output_tokens, [(kept, p.output_tokens, p.usage) for kept, p in probes]

    before = worker.llm.stats
    tokens, probes = played(worker, play)
    prefilled, decoded = cost(worker, before)
    assert tokens == long.token_ids[:60]
    assert 3 <= len(probes) <= 6
    # A probe forked before its chain's last token is stored computes that one, too.
    assert prefilled <= LENGTH + len(probes) * (1 + len(ids))
    assert decoded == 60 + 4 * len(probes)
    prompt = oracle.tokenizer(PROMPT).input_ids
    for kept, said, usage in probes:
        expected = oracle.generate(prompt + kept + ids, SamplingParams(max_tokens=4, **GREEDY))
        assert said == expected.outputs[0].token_ids
        assert usage.prefilled - len(ids) in (0, 1)


@pytest.mark.parametrize("as_ids", [False, True])
def test_a_fork_of_something_that_is_gone_goes_on_from_its_tokens(worker, oracle, as_ids):
    ids = oracle.tokenizer(PROMPT).input_ids

    def play(task):
        given = {"input_tokens": ids} if as_ids else {"input_str": PROMPT}
        gone = GenerationTask(worker_tag="generation", max_tokens=5, **given, **GREEDY)
        yield from drain(Branch(NativeGenerationController(GREEDY), [gone]))
        probe = gone.fork(" So? ", max_tokens=4, **GREEDY)
        yield [probe]
        return gone.output_tokens, probe.output_tokens

    said, more = played(worker, play)
    prompt = ids + said + oracle.tokenizer(" So? ").input_ids
    expected = oracle.generate(prompt, SamplingParams(max_tokens=4, **GREEDY)).outputs[0]
    assert more == expected.token_ids


ENDINGS = [
    "length",
    "stop token",
    "stop string",
    "stop string kept",
    "stop string within a token",
    "stream",
]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("gone", [False, True])
def test_joined_parts_are_the_tokens_that_the_sequence_holds(worker, oracle, long, ending, gone):
    fields = {"max_tokens": 12, "num_logprobs": 0, **GREEDY}
    if ending == "stop token":
        fields["stop_token_ids"] = [long.token_ids[9]]
    elif ending == "stop string within a token":
        place = long.text.index("He") + 1  # "He" is one token
        fields["stop"], fields["max_tokens"] = long.text[place : place + 3], 90
        assert long.text.index(fields["stop"]) == place
    elif ending.startswith("stop string"):
        fields["stop"] = oracle.tokenizer.decode(long.token_ids[8:10])
        fields["include_stop_str_in_output"] = ending.endswith("kept")

    def play(task):
        first = GenerationTask(input_str=PROMPT, worker_tag="generation", **fields)
        if ending == "stream":
            first = StreamGenerationTask.create_from_generation_task(first, 5)
        if gone:
            yield from drain(Branch(NativeGenerationController(), [first]))
        else:
            yield [first]
        free = {"stop": [], "stop_token_ids": [], "num_logprobs": 0, "max_tokens": 4}
        second = first.fork(" So? ", **free)
        yield [second]
        third = second.fork("Then: ", **free)
        yield [third]
        held = third.request_handle.session.tokens
        kept = [first.output_tokens, second.inserted_tokens]
        text = f"{first.output_str} So? {second.output_str}Then: {third.output_str}"
        return third.joined, text, held, third, kept

    joined, text, held, third, (said, inserted) = played(worker, play)
    assert joined.text == text
    if ending == "stop string within a token":  # what is left of the token comes before the suffix
        assert len(inserted) > len(oracle.tokenizer(" So? ").input_ids)
    assert len(said) == 5 or ending != "stream"
    assert joined.token_ids == held[LENGTH:]
    assert third.inserted_tokens == oracle.tokenizer("Then: ").input_ids
    pairs = zip(joined.token_ids, joined.logprobs, strict=True)
    drawn = [(token, entry) for token, entry in pairs if entry]
    total = sum(entry[token].logprob for token, entry in drawn)
    assert joined.cumulative_logprob == pytest.approx(total)


def test_a_fork_that_goes_to_another_model_goes_there_as_text(worker):
    def play(task):
        yield [task_here := ask(PROMPT, max_tokens=3)]
        probe = task_here.fork("!", max_tokens=2, **GREEDY)
        probe.worker_tag = "other"
        yield [probe]
        return probe.input_str, probe.output_str

    fields = {"kv_cache_config": CACHE, "dtype": "float32"}
    with EngineWorker(LLM(speaking("sentencepiece"), **fields)) as other:
        workers = {"generation": worker, "other": other}
        with ScaffoldingLlm(Play(play), workers) as llm:
            text, said = llm.generate(PROMPT).output.meta["found"]
        alone = asyncio.run(other.llm.generate(text, SamplingParams(max_tokens=2, **GREEDY)))
    assert said == alone.outputs[0].text


def test_a_fork_whose_prompt_was_changed_is_a_task_like_any_other(worker, direct):
    def play(task):
        main = ask(PROMPT, max_tokens=5)
        yield [main]
        other = main.fork("", max_tokens=5, **GREEDY)
        other.input_str = "Other"
        plain = ask("Other", max_tokens=5)
        yield [other, plain]
        return other.output_tokens == plain.output_tokens

    assert played(worker, play)


def test_parked_sequences_are_few(worker):
    def play(task):
        held = []
        for number in range(6):
            yield [ask(f"Number {number}", max_tokens=2)]
            held.append(len(sequences(worker)))
        return held

    assert max(played(worker, play)) <= 3  # max_parked=2, and the one that was started last


# ---- streams -----------------------------------------------------------------------------------


def ahead(worker):
    """Let the engine go on while nobody waits, to the end of all it is at."""
    wait_until(lambda: not worker.llm._frontend.is_busy)


@pytest.fixture(scope="module")
def texts(oracle):
    """Number of tokens -> the text that a stream has shown by then."""
    outputs = oracle.stream(PROMPT, SamplingParams(max_tokens=100, logprobs=1, **GREEDY))
    return {len(o.outputs[0].token_ids): o.outputs[0] for o in outputs}


def test_a_stream_comes_back_with_exactly_its_step_however_far_the_engine_is(worker, texts):
    def play(task):
        stream = ask(PROMPT, StreamGenerationTask, max_tokens=100, streaming_step=30)
        stream.num_logprobs, sizes = 1, []
        while not stream.end_flag:
            yield [stream]
            sizes.append(stream.num_generated)
            seen = texts[sizes[-1]]
            assert (stream.output_str, stream.output_tokens) == (seen.text, seen.token_ids)
            assert stream.logprobs == seen.logprobs
            assert stream.cumulative_logprob == seen.cumulative_logprob
            assert (stream.finish_reason is None) == (sizes[-1] < 100)
            if len(sizes) == 1:  # the engine goes on while nobody waits, to the end
                ahead(worker)
                stream.streaming_step = 7
        return sizes, stream.finish_reason, stream.usage.decoded

    before = worker.llm.stats
    sizes, reason, decoded = played(worker, play)
    assert sizes == [30, 37, 44, 51, 58, 65, 72, 79, 86, 93, 100]
    assert (reason, decoded, cost(worker, before)[1]) == ("length", 100, 100)


def test_a_stream_whose_last_step_is_a_whole_one_has_ended_with_it(worker):
    def play(task):
        stream = ask(PROMPT, StreamGenerationTask, max_tokens=20, streaming_step=10)
        yield [stream]
        first = stream.end_flag
        yield [stream]
        return first, stream.end_flag, stream.finish_reason

    assert played(worker, play) == (False, True, "length")


def test_a_stop_string_ends_a_stream_that_is_looked_at_later(worker, long):
    stop = "sc"
    kept = long.text.index(stop)

    def play(task):
        stream = ask(PROMPT, StreamGenerationTask, max_tokens=60, streaming_step=1, stop=stop)
        yield [stream]
        ahead(worker)
        seen = []
        while not stream.end_flag:
            seen.append((stream.output_str, stream.stop_reason))
            yield [stream]
        return seen, stream.output_str, stream.stop_reason

    seen, text, reason = played(worker, play)
    assert (text, reason) == (long.text[:kept], stop)
    assert len(seen) > 5
    assert all(text.startswith(one) and why is None for one, why in seen)
    assert not any(one.endswith("s") for one, _ in seen[-1:])  # it may be the beginning of a stop


def test_a_fork_is_taken_where_its_parent_was_seen_although_that_is_ahead(worker, oracle, long):
    ids = oracle.tokenizer(" So? ").input_ids
    prompt = oracle.tokenizer(PROMPT).input_ids

    def play(task):
        main = ask(PROMPT, StreamGenerationTask, max_tokens=60, streaming_step=13)
        found = []
        while not main.end_flag:
            yield [main]
            if not found:
                ahead(worker)
            probe = main.fork(" So? ", max_tokens=4, **GREEDY)
            yield [probe]
            found.append((main.num_generated, probe.output_tokens, probe.usage))
        return found

    probes = played(worker, play)
    assert [size for size, _, _ in probes] == [13, 26, 39, 52, 60]
    for size, said, usage in probes[:-1]:
        params = SamplingParams(max_tokens=4, **GREEDY)
        expected = oracle.generate(prompt + long.token_ids[:size] + ids, params).outputs[0]
        assert said == expected.token_ids
        assert usage.prefilled - len(ids) in (0, 1)


def test_a_stream_that_is_ahead_is_kept_until_it_has_been_seen(worker, long):
    """More sequences end than are parked, and the stream is none of those that leave."""

    def play(task):
        main = ask(PROMPT, StreamGenerationTask, max_tokens=30, streaming_step=10)
        yield [main]
        ahead(worker)
        yield [main]
        for number in range(5):
            yield [ask(f"Number {number}", max_tokens=1)]
        probe = main.fork("!", max_tokens=1, **GREEDY)
        yield [probe]
        yield [main]
        return main.output_tokens, probe.usage.prefilled

    assert played(worker, play) == (long.token_ids[:30], 1)


def test_what_is_streamed_of_a_stream_is_what_its_steps_have_shown(worker, long):
    class Streams(Controller):
        def process(self, tasks, **kwargs):
            stream = ask(PROMPT, StreamGenerationTask, max_tokens=30, streaming_step=4)
            stream.streaming_output_flag = True
            yield [stream]
            ahead(worker)
            yield [stream]
            tasks[0].result = stream.result

    with ScaffoldingLlm(Streams(), {"generation": worker}) as llm:
        result = llm.generate_async(PROMPT)
        events = [event.output for event in result.events()]
    assert [t for event in events for t in event.token_ids] == long.token_ids[:8]
    assert "".join(event.text for event in events) == result.output.text


@pytest.mark.parametrize("step", [-1, 2.5, None, True])
def test_a_step_that_is_no_number_of_tokens_is_refused(worker, step):
    stream = StreamGenerationTask(input_str=PROMPT, streaming_step=step)
    for one in (worker, ScriptedWorker(["x"]), OpenaiWorker(None, "m")):
        with pytest.raises(ParameterError, match="streaming_step"):
            asyncio.run(one.run_task(stream))


def test_a_stream_is_streamed_while_its_steps_are_waited_for(worker, long):
    class Streams(Controller):
        def process(self, tasks, **kwargs):
            stream = ask(PROMPT, StreamGenerationTask, max_tokens=30, streaming_step=10)
            stream.streaming_output_flag = True
            while not stream.end_flag:
                yield [stream]
                stream.streaming_step = 0 if stream.num_generated < 20 else 1
            tasks[0].result = stream.result

    with ScaffoldingLlm(Streams(), {"generation": worker}) as llm:
        result = llm.generate_async(PROMPT)
        events = [event.output for event in result.events()]
    assert [t for event in events for t in event.token_ids] == long.token_ids[:30]
    assert "".join(event.text for event in events) == result.output.text


def test_the_priority_of_a_request_reaches_the_engine(worker):
    def play(task):
        urgent, plain = ask(PROMPT, max_tokens=1, priority=-7), ask(PROMPT, max_tokens=1)
        yield [urgent, plain]
        return [one.llm_request_params["priority"] for one in (urgent, plain)]

    assert played(worker, play, priority=3) == [-7, 3]


def test_a_step_of_zero_comes_back_at_once(worker):
    def play(task):
        stream = ask(PROMPT, StreamGenerationTask, max_tokens=100, streaming_step=0)
        sizes = []
        while not stream.end_flag:
            yield [stream]
            sizes.append(len(stream.output_tokens))
            let_go.set()
            time.sleep(0.01)
        return sizes

    with held_back(worker.llm, after=30) as let_go:
        sizes = played(worker, play)
    assert sizes[0] < 100  # it was not waited for
    assert sizes[-1] == 100


def test_a_stream_can_be_cancelled(worker):
    def play(task):
        stream = ask(PROMPT, StreamGenerationTask, max_tokens=200, streaming_step=5)
        yield [stream]
        stream.cancel_flag = True
        yield [stream]
        num_kept = len(stream.output_tokens)
        assert stream.usage.decoded - stream.usage.discarded == num_kept, "the rest is in no text"
        return stream.end_flag, stream.finish_reason, 5 <= num_kept < 200

    with held_back(worker.llm, after=20):
        assert played(worker, play) == (True, "abort", True)


def test_a_stream_that_is_cancelled_keeps_what_was_seen_of_it(worker, long):
    def play(task):
        stream = ask(PROMPT, StreamGenerationTask, max_tokens=20, streaming_step=5)
        yield [stream]
        ahead(worker)  # it has ended by itself, but nobody knows
        text, stream.cancel_flag = stream.output_str, True
        yield [stream]
        assert (stream.end_flag, stream.finish_reason) == (True, "abort")
        assert (stream.output_tokens, stream.output_str) == (long.token_ids[:5], text)
        return stream.usage.decoded, stream.usage.discarded

    assert played(worker, play) == (20, 15)


def test_a_stream_that_is_left_ends_with_its_request_and_is_paid_for(worker):
    def play(task):
        stream = ask(PROMPT, StreamGenerationTask, max_tokens=200, streaming_step=5)
        yield [stream]

    before = worker.llm.stats
    with held_back(worker.llm, after=20):
        result = answer(Play(play), worker)
    assert not sequences(worker)
    assert cost(worker, before) == (result.usage.prefilled, result.usage.decoded)
    assert 5 <= result.usage.decoded < 200
    assert result.usage.discarded == result.usage.decoded - 5
    # Every token but the first, which the prefill yields, took a step.
    assert result.metrics.steps == result.usage.decoded - 1


# ---- samples -----------------------------------------------------------------------------------


def test_samples_share_the_prefill_and_differ(worker):
    params = {"n": 4, "max_tokens": 8, "seed": 3, "ignore_eos": True}
    before = worker.llm.stats
    first = answer(NativeGenerationController(params), worker)
    prefilled, decoded = cost(worker, before)
    assert LENGTH <= prefilled <= LENGTH + 3  # each further sample draws its own first token
    assert decoded == 32
    assert len({tuple(output.token_ids) for output in first.outputs}) == 4
    again = answer(NativeGenerationController(params), worker)
    assert [o.token_ids for o in again.outputs] == [o.token_ids for o in first.outputs]


def test_samples_under_one_seed_are_none_of_those_under_the_next(worker):
    def drawn(**params):
        params = {"max_tokens": 8, "ignore_eos": True, **params}
        outputs = answer(NativeGenerationController(params), worker).outputs
        return [tuple(output.token_ids) for output in outputs]

    ones, twos = drawn(n=4, seed=1), drawn(n=4, seed=2)
    assert len({*ones, *twos}) == 8
    assert drawn(seed=1) == ones[:1]

    def play(task):
        copies = GenerationTask(input_str=PROMPT, worker_tag="generation", seed=1, max_tokens=8)
        copies = copies.samples_of(4)
        yield copies
        return [tuple(copy.output_tokens) for copy in copies]

    copied = played(worker, play)
    assert len({*ones, *copied}) == 8


def test_a_fork_goes_on_as_its_request_would(worker, oracle):
    """It draws with the request's temperature, seed and length, though none of its own are set."""
    params = {"temperature": 0.9, "seed": 7, "max_tokens": 6, "ignore_eos": True}

    def play(task):
        task.worker_tag = "generation"
        yield [task]
        yield [fork := task.fork(" So? ")]
        yield (samples := task.fork(" So? ").samples_of(3))
        found = task.output_tokens, fork.output_tokens, [s.output_tokens for s in samples]
        fork.input_str = "Another prompt: it continues nothing."
        yield [fork]
        assert (fork.inserted_tokens, fork.num_kept_tokens) == (None, None)
        return found

    said, more, samples = played(worker, play, sampling_params=params)
    prompt = oracle.tokenizer(PROMPT).input_ids + said + oracle.tokenizer(" So? ").input_ids
    assert more == oracle.generate(prompt, SamplingParams(**params)).outputs[0].token_ids
    assert len({tuple(tokens) for tokens in [more, *samples]}) == 4


def test_branches_with_the_same_prompt_prefill_it_once(worker):
    native = NativeGenerationController({"max_tokens": 8, "ignore_eos": True})
    before = worker.llm.stats
    result = answer(MajorityVoteController(native, 5, early_stop=False), worker)
    prefilled, decoded = cost(worker, before)
    assert LENGTH <= prefilled <= LENGTH + 4
    assert decoded == 40
    assert result.usage.decoded == 40


# ---- the end -----------------------------------------------------------------------------------


def test_a_cancelled_request_gives_its_pages_back_at_once(worker):
    native = NativeGenerationController({**GREEDY, "n": 3})
    with (
        ScaffoldingLlm(native, {"generation": worker}) as llm,
        held_back(worker.llm, after=20),
    ):
        result = llm.generate_async(PROMPT, sampling_params={"max_tokens": 240})
        wait_until(lambda: sequences(worker))
        result.abort()
        with pytest.raises(Exception, match="cancelled"):
            result.result(60)
        wait_until(lambda: not sequences(worker))  # the engine's thread takes the command


@pytest.mark.parametrize("kind", [GenerationTask, StreamGenerationTask])
def test_a_cancelled_task_is_ended_while_its_request_goes_on(worker, kind):
    def play(task):
        endless = ask(PROMPT, kind, max_tokens=240)
        endless.streaming_step = 500
        yield FirstDone([endless, ask("Hello", max_tokens=2)])
        yield [ComputeTask(wait_until, lambda: len(sequences(worker)) == 1)]
        return True

    with held_back(worker.llm, after=20):
        assert played(worker, play)


def test_the_budget_is_kept_by_the_engine(worker):
    def play(task):
        yield [ask(PROMPT, max_tokens=100)]

    result = answer(Play(play), worker, budget=Budget(tokens=25))
    assert result.usage.completion_tokens == 25


def test_two_scaffolding_llms_share_one_worker(worker, long):
    native = NativeGenerationController({**GREEDY, "max_tokens": 12})
    workers = {"generation": worker}
    with ScaffoldingLlm(native, workers) as one, ScaffoldingLlm(native, workers) as two:
        results = [llm.generate_async(PROMPT) for llm in (one, two) for _ in range(4)]
        texts = {tuple(result.result(60).output.token_ids) for result in results}
    assert texts == {tuple(long.token_ids[:12])}


def test_an_llm_that_was_taken_over_is_given_back(direct, long):
    worker = TRTLLMWorker(direct, direct.tokenizer)
    assert worker.tokenizer is direct.tokenizer
    worker.shutdown()
    assert direct.generate(PROMPT, SamplingParams(max_tokens=3, **GREEDY)).outputs[0].token_ids


def test_an_async_llm_that_was_given_goes_on_after_shutdown(direct):
    with EngineWorker(AsyncLLM.over(direct)) as worker:
        llm = worker.llm
    params = SamplingParams(max_tokens=3, **GREEDY)
    assert asyncio.run(llm.generate(PROMPT, params)).finished
    llm.shutdown()


def test_a_worker_with_an_llm_of_its_own_honours_or_refuses_each_argument():
    with pytest.raises(ParameterError, match="backend"):
        TRTLLMWorker.init_with_new_llm(speaking(), backend="tensorrt")
    with pytest.raises(ParameterError, match="scheduler_config"):
        TRTLLMWorker.init_with_new_llm(speaking(), scheduler_config={})
    with pytest.raises(ParameterError, match="max_batchsize"):
        TRTLLMWorker.init_with_new_llm(speaking(), max_batchsize=3)
    worker = TRTLLMWorker.init_with_new_llm(
        speaking(), "pytorch", 3, 64, 0.5, dtype="float32", kv_cache_config={"max_tokens": 256}
    )
    limits = worker.llm._frontend.engine.limits
    assert (limits.max_batch_size, limits.max_num_tokens) == (3, 64)
    worker.shutdown()


def test_a_worker_loads_an_embedded_model_by_name():
    worker = EngineWorker.init_with_new_llm(
        "forethought/countdown", kv_cache_config={"max_tokens": 256}
    )
    assert worker.llm.model_dir == assets.embedded_dir("countdown")
    worker.shutdown()


def test_a_tokenizer_of_another_model_is_refused(direct):
    other = byte_level().__class__(tokenizer_object=tiny_backend())
    with pytest.raises(ParameterError, match="not the model's"):
        EngineWorker(direct, other)


def tiny_backend():
    from tokenizers import Tokenizer, models

    return Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))


def test_a_method_may_guess_ahead_and_its_result_tells_how_well():
    """Twice the same samples, with drafts and without; the branches' steps are counted too."""
    fields = {"speculative_config": {"decoding_type": "NGram"}, **FIELDS}
    with EngineWorker(LLM(speaking(), **fields)) as worker:
        results = []
        for speculation in ({"enabled": False}, {"max_draft_len": 2}):
            native = NativeGenerationController()
            controller = MajorityVoteController(native, 2, early_stop=False)
            params = {"max_tokens": 40, "speculation": speculation, **GREEDY}
            with ScaffoldingLlm(controller, {"generation": worker}) as llm:
                results.append(llm.generate(PROMPT, sampling_params=params))
    plain, guessed = results
    assert plain.output.text == guessed.output.text
    assert (plain.metrics.drafted, plain.metrics.steps) == (0, 2 * 39)
    assert guessed.metrics.accepted > 0
    assert guessed.metrics.steps + guessed.metrics.accepted == 2 * 39
    assert len(guessed.metrics.accepted_by_position) <= 2


@pytest.mark.parametrize("most", [-1, 2.5, "8", None])
def test_a_number_of_parked_sequences_that_is_none_is_refused(oracle, most):
    llm = AsyncLLM.over(oracle)
    try:
        with pytest.raises(ParameterError, match="invalid max_parked"):
            EngineWorker(llm, max_parked=most)
    finally:
        llm.shutdown()


def test_a_task_that_is_cancelled_while_others_leave_for_it_leaves_none_behind(worker):
    """Those that leave are closed one after another, and the first takes its time here."""

    def play(task):
        branch = worker._cache
        for number in range(3):
            yield [ask(f"Number {number}", max_tokens=1)]
        branch._capacity = 1
        endless = ask("Hello", max_tokens=240)
        with AsCompleted([endless, ComputeTask(time.sleep, 0.005)]) as running:
            pending = [*branch._held]
            close = pending[0].session.close

            async def slowly():
                await asyncio.sleep(0.1)
                await close()

            pending[0].session.close = slowly
            yield running
        yield [ComputeTask(wait_until, lambda: len(sequences(worker)) <= 1)]
        return True

    gc.disable()
    try:
        assert played(worker, play)
    finally:
        gc.enable()


@pytest.mark.parametrize("most", [3, 10, 25, 31, 47])
def test_a_budget_that_runs_out_anywhere_leaves_the_best_so_far_and_no_sequence(worker, most):
    """Samples, streams and forks concurrently, some of them stopped in the middle of a step."""

    def play(task):
        main = ask(PROMPT, StreamGenerationTask, max_tokens=60, streaming_step=4)
        best, told = 0, None
        try:
            with AsCompleted([main, *ask(PROMPT, max_tokens=9, seed=1).samples_of(2)]) as running:
                while running:
                    done = yield running
                    best = main.num_generated
                    if done is main and not main.end_flag:
                        fork = main.fork(" So? ", max_tokens=3, on_failure="drop")
                        running.add(
                            main, Branch(NativeGenerationController(), [fork], None, "drop")
                        )
        except BudgetExceeded as error:
            told = error.what
        return best, told

    best, told = played(worker, play, budget=Budget(tokens=most))
    assert told == f"the budget of {most} tokens is spent"
    assert 0 <= best <= most


@pytest.mark.parametrize("most", [9, 30, 50])
def test_samples_that_a_budget_cuts_have_exactly_its_tokens_together(worker, most):
    controller = MajorityVoteController(NativeGenerationController({"max_tokens": 60}), 4)
    params = {"ignore_eos": True, "seed": 5, "temperature": 1.0}
    with ScaffoldingLlm(controller, {"generation": worker}) as llm:
        result = llm.generate(PROMPT, sampling_params=params, budget=Budget(tokens=most))
    spent = result.usage
    assert (spent.completion_tokens, result.spent_budget) == (most, "tokens")
    assert spent.decoded == most + spent.discarded
    assert (result.output.finish_reason, result.output.text is None) == ("length", False)
    assert 0 < len(result.output.token_ids) <= most


def test_a_request_that_a_budget_of_tokens_has_ended_is_replayed(worker):
    """What it stops ends later than what had been done, and controllers go on in between."""

    def voting():
        chain = DynasorGenerationController(chunk_size=8, temperature=1.0)
        return MajorityVoteController(chain, default_sample_num=3)

    params = {"seed": 3, "max_tokens": 60, "ignore_eos": True}
    for most in range(20, 120, 7):
        with ScaffoldingLlm(voting(), worker, trace=True) as llm:
            result = llm.generate(PROMPT, sampling_params=params, budget=Budget(tokens=most))
        again = replay(result.trace, voting())
        assert again.output.token_ids == result.output.token_ids
        assert again.output.text == result.output.text
        assert again.usage.completion_tokens == result.usage.completion_tokens == most
        assert again.spent_budget == result.spent_budget == "tokens"


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_controller_that_quits_leaves_no_sequence(worker, kind):
    def play(task):
        main = ask(PROMPT, StreamGenerationTask, max_tokens=60, streaming_step=4)
        with AsCompleted([main, ask(PROMPT, max_tokens=50)]) as running:
            yield running
            raise kind

    with pytest.raises(UsageError, match="a controller"):
        played(worker, play)


@pytest.fixture
def thinker():
    """A worker over a model that knows markers of thoughts; it must leave no page behind."""
    llm = LLM(thinking(), **FIELDS)
    with EngineWorker(llm) as worker:
        yield worker
        expect_empty(llm._frontend.engine)


def test_thinking_budgets_travel_with_tasks_into_the_engine_and_tell_how_the_thought_ended(thinker):
    params = {"max_tokens": 40, "thinking_budget": 9, "thinking_end": "Now.</think>", **GREEDY}
    output = answer(NativeGenerationController(), thinker, "Hi<think>\n", sampling_params=params)
    with LLM(thinking(), **FIELDS) as llm:
        direct = llm.generate("Hi<think>\n", SamplingParams(**params)).outputs[0]
    assert output.output.token_ids == direct.token_ids
    assert output.output.thinking == direct.thinking == ThinkingOutput(9, ThoughtEnd.BUDGET)


def test_a_fork_within_a_thought_goes_on_under_the_budget_of_the_whole(thinker):
    """The tokens of the forked task count, as does the text put behind them."""

    def play(task):
        fields = {"thinking_budget": 20, "worker_tag": "generation", **GREEDY}
        first = GenerationTask(input_str="Hi<think>\n", max_tokens=6, **fields)
        yield [first]
        fork = first.fork(" how are you", max_tokens=40)
        yield [fork]
        return fork.inserted_tokens, fork.output_tokens, fork.thinking

    inserted, tokens, thought = played(thinker, play)
    end = thinker.tokenizer.convert_tokens_to_ids("</think>")
    assert tokens.index(end) == 20 - 6 - len(inserted)
    assert thought == ThinkingOutput(20, ThoughtEnd.BUDGET)
