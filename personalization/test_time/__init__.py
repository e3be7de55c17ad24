"""Test-time adaptation: objective, loop, safety and checkpoints."""
