"""Every method under small budgets: an answer and what was spent, or nothing to answer with."""

import pytest

from forethought import methods
from forethought.errors import BudgetExceeded
from forethought.scaffolding import Budget, ScaffoldingLlm
from forethought.testing.method import PARAMS, _SampleWorker
from forethought.testing.samples import sample_score
from method_cases import ALL, OPTIONS, create, prompt_of, respond_of

TOKENS = (1, 20, 120)
CALLS = (1, 2, 6)
BEFORE_AN_ANSWER = {
    "sleep_time": "thoughts about the context, before there is a question",
    "iterdrag": "a follow-up question",
}
"""Methods whose first call generates something else than an answer."""
JUDGEMENTS = ("(sure, likely or impossible)", "Score: ", "Feedback: ", "Inferences: ")
"""Parts of prompts that ask about an answer."""


def run(name, budget=None):
    """The result of a method on its samples, and its worker."""
    controller = create(name)
    worker = _SampleWorker(respond_of(name), sample_score, None)
    params = OPTIONS.get(name, {}).get("params", PARAMS)
    options = {} if budget is None else {"budget": budget}
    with ScaffoldingLlm(controller, dict.fromkeys(methods.worker_tags(controller), worker)) as llm:
        result = llm.generate_async(prompt_of(name), sampling_params=params, **options)
        try:
            result.result(60)
        except BudgetExceeded as error:
            return result, worker, error
    return result, worker, None


@pytest.mark.parametrize("name", ALL)
def test_a_method_with_a_spent_budget_answers_without_spending_more(name):
    whole, worker, _ = run(name)
    needed = {"tokens": whole.usage.completion_tokens, "calls": len(worker.calls)}
    cases = [("tokens", limit) for limit in TOKENS] + [("calls", limit) for limit in CALLS]
    for kind, limit in cases:
        if limit >= needed[kind]:
            continue
        result, worker, error = run(name, Budget(**{kind: limit}))
        where = f"{name} with {limit} {kind}"
        spent = {"tokens": result.usage.completion_tokens, "calls": len(worker.calls)}
        assert spent[kind] <= limit, where
        if name == "repeated_sampling" and result.spent_budget is None:
            assert result.output.text, where  # accepted before another sample was to begin
            continue
        assert result.spent_budget == kind, where
        if error is not None:
            assert name in BEFORE_AN_ANSWER, where
            assert len(worker.calls) == 1, where
            continue
        assert result.output.text, where
        assert not any(each in result.output.text for each in JUDGEMENTS), where
