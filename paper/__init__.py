"""The paper's results, run again: a study per figure, one that explains a figure, and the claims."""
