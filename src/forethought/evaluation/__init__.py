"""Evaluation of methods: the same problems, solved by each, with accuracy and cost.

``problems`` (questions and grading), ``recipe`` (a method with its settings; those of the demo),
``runner`` (many problems in flight, graded as they finish; the comparison of several methods),
``lockstep`` (why token counts repeat), ``report`` (intervals, tables, JSON, plot).
"""

IN_FLIGHT = 64
"""Default number of chains of thought in flight."""
