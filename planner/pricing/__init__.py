"""The price of a plan: the formulas of costmodels applied to what planner.execution lists.

Seconds of a step and bytes of a device; of one plan, or of all splits of an operator at a time.
"""
