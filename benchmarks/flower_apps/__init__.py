"""Apps that flower_cost.py runs."""
