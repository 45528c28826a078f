"""Studies beyond the paper: attacks, labels, options of a worker, the choice of a rule; and their tables."""
