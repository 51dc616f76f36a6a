"""Evaluation of methods: the same problems, solved by each, with accuracy and cost.

``tasks`` (problems of a known kind, with their instruction and grader), ``data_files`` (records of
published data sets), ``problems`` (a question with its answer; users' own files), ``graders``
(which answers are right), ``recipe`` (a method with its settings), ``runner`` (many problems in
flight, graded as they finish), ``lockstep`` (why token counts repeat), ``journal`` (attempts in a
file, so that a killed run goes on), ``comparison`` (several methods), ``statistics`` (intervals and
tests), ``thoughts`` (regret, behaviours), ``search`` (which method to use), ``report`` (tables,
plot, JSON, HTML), ``demo``, ``inspect_provider`` (methods as models of inspect_ai).
"""

IN_FLIGHT = 64
"""Default number of chains of thought in flight."""
