"""Measuring: geometries, cold-cache timing, floors, correctness of what was timed, rows, tables and plots.

Import order inside: geometries, cases -> reference -> timing, floors -> candidates -> rows -> report -> cli. `steps` is
the complete decode step of a model, and `engine` that of vLLM, in the same rows. `tune` makes the kernels' tables, and
`predictions` holds the planner against measured rows.
"""
