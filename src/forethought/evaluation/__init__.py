"""Measuring methods: the same problems, solved by each, with what it cost.

``problems`` (what to solve), ``recipe`` (a method with its settings), ``runner`` (many problems in
flight, graded as they finish), ``lockstep`` (why their token counts repeat), ``statistics``
(intervals), ``report`` and ``plot`` (what people see), ``demo`` (the four recipes that the package
shows itself with).
"""

IN_FLIGHT = 64
"""Chains of thought under way at once unless told otherwise."""
