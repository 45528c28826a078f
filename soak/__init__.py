"""Faults at random moments, over all engines: `python -m soak --minutes 30 --seed 1`. See README.md."""
