"""The paper's results, run again: a study per figure, and what came of each claim."""
