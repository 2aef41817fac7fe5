"""Other projects: models of transformers, trainers, rollouts, and layers that are known by names of their functions.
A library is imported when it is used.

It imports _lib, batch, checks, collectives, comm, engine, functions, intercept, layouts, masks, mixers, strategies,
styles and verify. Begin with `transformers/registration.py`.
"""
