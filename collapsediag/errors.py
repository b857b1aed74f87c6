"""Every error the library raises on purpose.

    CollapsediagError                 the base: `except CollapsediagError` catches all of them, and nothing else
    ├── RolloutError   (ValueError)   a rollout or a batch that contradicts itself
    ├── PairError      (ValueError)   no usable (context, reasoning) pairs, or settings that cannot give any
    ├── MatrixError    (ValueError)   a log-likelihood matrix whose parts do not fit together
    ├── MetricError    (ValueError)   a metric asked for where it is not defined
    ├── ReaderError    (ValueError)   a saved file that cannot be read: names file, line, key
    ├── ScoringError   (RuntimeError) the model could not score what it was given
    ├── SettingsError  (ValueError)   a setting that does not exist or does not fit
    ├── RunFolderError (OSError)      a run folder that cannot be written or read
    ├── TrackerError   (RuntimeError) an experiment tracker is not reached, or refuses
    └── MissingExtraError (ImportError) an optional package is missing: names the pip line

Each leaf also is the standard error that it stands for, so code that knows nothing of this library can catch it. A
message says what was found, where, what was expected, and what to do.
"""

from __future__ import annotations


class CollapsediagError(Exception):
    """Base of every error this library raises on purpose."""


class RolloutError(CollapsediagError, ValueError):
    """A rollout or a batch that contradicts itself."""


class PairError(CollapsediagError, ValueError):
    """No usable (context, reasoning) pairs, or settings that cannot give any."""


class MatrixError(CollapsediagError, ValueError):
    """A log-likelihood matrix whose parts do not fit together."""


class MetricError(CollapsediagError, ValueError):
    """A metric was asked for where it is not defined."""


class ReaderError(CollapsediagError, ValueError):
    """A saved file that cannot be read."""


class ScoringError(CollapsediagError, RuntimeError):
    """The model could not score what it was given."""


class SettingsError(CollapsediagError, ValueError):
    """A setting that does not exist or does not fit."""


class RunFolderError(CollapsediagError, OSError):
    """A run folder that cannot be written or read."""


class TrackerError(CollapsediagError, RuntimeError):
    """An experiment tracker is not reached, or refuses."""


class MissingExtraError(CollapsediagError, ImportError):
    """An optional package is missing."""
