"""The log's half in a trainer: bases of any optimizer's state, step records, and redoing steps by the optimizer itself.

Torch and the standard library.
"""
