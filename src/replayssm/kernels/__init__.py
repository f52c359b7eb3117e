"""How it is fast: Triton templates with the same names as the verbs of `flow`."""
