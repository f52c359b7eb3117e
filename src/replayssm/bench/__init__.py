"""Measuring the kernels: geometries, cold-cache timing, floors, correctness of what was timed, rows, tables and plots.

Import order inside: geometries, cases -> reference -> timing, floors -> candidates -> rows -> report -> cli. `steps` is
the complete decode step of a model, in the same rows.
"""
