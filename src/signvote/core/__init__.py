"""The algorithm: pure functions and small state. No I/O, no clock, no printing, no global randomness."""
