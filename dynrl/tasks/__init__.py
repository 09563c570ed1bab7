"""Tasks: where they come from, which are drawn next, and how an answer is judged.

Nothing here imports JAX: worker processes and simulations start without it.
"""
