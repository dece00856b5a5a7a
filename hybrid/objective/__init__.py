"""The grammar: steps that assign credit, losses that see the student, reductions that count; all pure functions."""
