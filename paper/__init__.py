"""The paper's results, reproduced: a study per figure, and a verdict on each claim."""
