"""Every error signvote raises on purpose.

SignVoteError
  ConfigError      a setting out of its range, an unknown name
  LayoutError      parameters that do not fit the layout
  BallotError      a message that must not be counted; .reason is the cause in one word
  StateError       a state or checkpoint of another kind, layout or version
  DataError        a data file is missing, unreadable or damaged
  EngineError      workers did not connect, or differ in settings that they must share
"""

from __future__ import annotations


class SignVoteError(Exception):
    """Base of all errors raised by signvote."""


class ConfigError(SignVoteError, ValueError):
    """A setting is out of range or a name is unknown."""


class LayoutError(SignVoteError, ValueError):
    """Parameters do not fit the layout."""


class BallotError(SignVoteError, ValueError):
    """A message must not be counted. `reason` is one word, for statistics; the text explains it."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class StateError(SignVoteError, ValueError):
    """A state dict or checkpoint does not fit the object that should load it."""


class DataError(SignVoteError):
    """A data file is missing, unreadable or damaged."""


class EngineError(SignVoteError, RuntimeError):
    """Workers did not connect, or differ in settings that they must share; the text names them."""
