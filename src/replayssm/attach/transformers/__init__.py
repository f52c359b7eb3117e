"""Attaching to a transformers model, without naming a recurrence or rewriting a forward.

    find       which modules of a model are recurrent layers, and what can be said about a model that has none
    rebind     a mixer's own forward with the functions that touch the state replaced
    sequences  the slots of one cache, and the step that runs over its layers
    layers     the objects inside a transformers cache that stand for those slots
    attached   the handle of one attached model

A mixer's forward computes projections, gates and norms as ever. Where it asks its cache for a state it gets a
`StateHandle`, which it passes on to the functions that we replaced.
"""
