"""Measuring methods: the same problems, solved by each, with what it cost.

``problems`` (what to solve), ``grader`` (right or wrong), ``recipe`` (a method with its settings),
``runner`` (many problems in flight), ``statistics`` (intervals), ``report`` and ``plot`` (what people
see), ``demo`` (the four recipes that the package shows itself with).
"""
