"""Sampling params of all kinds, and rows of logits, for property tests of a small vocabulary."""

from __future__ import annotations

from hypothesis import strategies as st

from forethought.config.sampling import SamplingParams

VOCABULARY = 12
grid = st.integers(-16, 16).map(lambda x: x / 4)  # exact in float32, so that equals stay equal
logit_rows = st.lists(grid, min_size=VOCABULARY, max_size=VOCABULARY)
tokens = st.integers(0, VOCABULARY - 1)
sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.25, 0.6, 1.0, 1.7]),
    top_k=st.integers(0, VOCABULARY + 2),
    top_p=st.sampled_from([1.0, 0.97, 0.83, 0.61, 0.37, 0.013]),
    min_p=st.sampled_from([0.0, 0.013, 0.21, 0.97]),
    repetition_penalty=st.sampled_from([1.0, 0.5, 2.0]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.5]),
    logit_bias=st.dictionaries(tokens, st.integers(-6, 6).map(float), max_size=3),
    min_tokens=st.integers(0, 4),
    stop_token_ids=st.lists(tokens, max_size=2).map(tuple),
    ignore_eos=st.booleans(),
)
