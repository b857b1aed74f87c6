"""The log-likelihood matrix: every trace scored under every context.

Legend: N traces (rows), P distinct contexts (columns).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collapsediag.arrays import to_numpy
from collapsediag.errors import MatrixError
from collapsediag.whole_files import ending, replacing

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

# A summed log-probability this far above zero is float noise of the trainer; more is a sign error or a missing mask.
POSITIVE_LOGP_TOLERANCE = 1e-4
# A file that unpacks to more was not written here: 100,000 traces under 1,000 contexts are less.
MAX_FILE_BYTES = 2**30


def _index_vector(values: Any, name: str) -> IntArray:
    array = _array(values, name)
    if array.ndim == 1 and array.size == 0:
        return np.zeros(0, dtype=np.int64)  # an empty list has no integer type of its own
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise MatrixError(f"{name} must be a flat vector of integers, found shape {array.shape} of {array.dtype}.")
    if int(array.max()) > np.iinfo(np.int64).max:
        raise MatrixError(f"{name} holds {int(array.max())}, which no 64-bit integer can hold.")
    return array.astype(np.int64)


def _array(values: Any, name: str) -> NDArray[Any]:
    try:
        return to_numpy(values)
    except (TypeError, ValueError) as error:
        raise MatrixError(f"{name} is not an array of numbers ({error}).") from error


@dataclass(frozen=True, kw_only=True, eq=False)
class LogLikelihoodMatrix:
    """`logp_NP[i, j] = sum_t log p(Z_i,t | X_j, Z_i,<t)`, and what belongs to its rows and columns.

    logp_NP: [N, P] summed log-likelihoods, nats, float64 (any numpy or torch float goes in).
    length_N: [N] number of reasoning tokens of each trace; 0 marks an empty trace, which every metric leaves out.
    own_N: [N] column of each trace's own context.
    group_N: [N] which group (prompt) a trace belongs to, for intervals; own_N where not given.
    multiplicity_P: [P] how many groups share a column; ones where not given.
    scored_NP: [N, P] which cells were scored, all where not given. Budget mode scores the own column and K others of
        each row; the cells left out hold NaN in logp_NP, and metrics reweight the K others by (P-1)/K.

    Non-finite entries are allowed (a model with NaN weights is a finding, not a crash): `usable_N` leaves such rows
    out, and every metric counts them.

    Raises MatrixError where the parts do not fit, or where a log-likelihood is positive.

    >>> m = LogLikelihoodMatrix(logp_NP=[[-1.0, -3.0], [-4.0, -2.0]], length_N=[2, 2], own_N=[0, 1])
    >>> m.n_traces, m.n_contexts
    (2, 2)
    """

    logp_NP: FloatArray
    length_N: IntArray
    own_N: IntArray
    group_N: IntArray = None  # type: ignore[assignment]  # never None after construction
    multiplicity_P: IntArray = None  # type: ignore[assignment]  # never None after construction
    scored_NP: BoolArray = None  # type: ignore[assignment]  # never None after construction

    def __post_init__(self) -> None:
        logp = _array(self.logp_NP, "logp_NP")
        if logp.ndim != 2 or logp.dtype.kind not in "fiu":
            raise MatrixError(
                f"logp_NP must be a matrix [traces, contexts] of numbers, found shape {logp.shape} of {logp.dtype}."
            )
        logp = logp.astype(np.float64)
        n, p = logp.shape
        length = _index_vector(self.length_N, "length_N")
        own = _index_vector(self.own_N, "own_N")
        group = own if self.group_N is None else _index_vector(self.group_N, "group_N")
        multiplicity = (
            np.ones(p, dtype=np.int64)
            if self.multiplicity_P is None
            else _index_vector(self.multiplicity_P, "multiplicity_P")
        )
        for name, vector in (("length_N", length), ("own_N", own), ("group_N", group)):
            if vector.size != n:
                raise MatrixError(
                    f"{name} has {vector.size} entries but logp_NP has {n} rows ({n} x {p}). One trace was scored and "
                    "not labelled, or labelled and not scored; build both from the same pairs."
                )
        if multiplicity.size != p:
            raise MatrixError(
                f"multiplicity_P has {multiplicity.size} entries but logp_NP has {p} columns ({n} x {p})."
            )
        if n and p and (own.min() < 0 or own.max() >= p):
            row = int(np.flatnonzero((own < 0) | (own >= p))[0])
            raise MatrixError(
                f"own_N[{row}] is {int(own[row])} but there are {p} columns (0 to {p - 1}). Each trace's own context "
                "must be among the scored contexts."
            )
        if n and not p:
            raise MatrixError(f"logp_NP has {n} rows and no column: no context was scored.")
        scored = np.ones((n, p), dtype=np.bool_) if self.scored_NP is None else _array(self.scored_NP, "scored_NP")
        if scored.shape != (n, p) or scored.dtype != np.bool_:
            raise MatrixError(
                f"scored_NP must be booleans of shape ({n}, {p}), found shape {scored.shape} of {scored.dtype}."
            )
        if not scored[np.arange(n), own].all():
            row = int(np.flatnonzero(~scored[np.arange(n), own])[0])
            raise MatrixError(f"scored_NP[{row}, {int(own[row])}] is False: every trace's own context must be scored.")
        logp[~scored] = np.nan
        if length.size and length.min() < 0:
            raise MatrixError(f"length_N[{int(length.argmin())}] is {int(length.min())}; a length cannot be negative.")
        if multiplicity.size and multiplicity.min() < 1:
            raise MatrixError(
                f"multiplicity_P[{int(multiplicity.argmin())}] is {int(multiplicity.min())}; every column has a group."
            )
        positive = np.argwhere(logp > POSITIVE_LOGP_TOLERANCE)
        if positive.size:
            i, j = (int(v) for v in positive[0])
            raise MatrixError(
                f"logp_NP[{i}, {j}] is {logp[i, j]:.6g}: a log-likelihood cannot be positive. Was a probability, a "
                "loss (sign flipped) or a log-ratio passed?"
            )
        for name, array in (
            ("logp_NP", logp),
            ("length_N", length),
            ("own_N", own),
            ("group_N", group),
            ("multiplicity_P", multiplicity),
            ("scored_NP", scored),
        ):
            frozen = array.view()
            frozen.flags.writeable = False
            object.__setattr__(self, name, frozen)

    @property
    def n_traces(self) -> int:
        """Number of rows, empty and non-finite ones included."""
        return int(self.logp_NP.shape[0])

    @property
    def n_contexts(self) -> int:
        """Number of columns, P."""
        return int(self.logp_NP.shape[1])

    @property
    def is_complete(self) -> bool:
        """Every cell was scored (no budget mode)."""
        return bool(self.scored_NP.all())

    @property
    def nonfinite_N(self) -> BoolArray:
        """[N] rows of non-empty traces that hold a NaN or an infinity in a scored cell."""
        finite = (np.isfinite(self.logp_NP) | ~self.scored_NP).all(axis=1)
        return np.asarray(~finite & (self.length_N > 0))

    @property
    def usable_N(self) -> BoolArray:
        """[N] rows that metrics read: not empty, all entries finite."""
        return np.asarray((self.length_N > 0) & ~self.nonfinite_N)

    def rows(self, keep_N: Any) -> LogLikelihoodMatrix:
        """The matrix of a subset of traces (boolean mask or indices); all columns stay."""
        return LogLikelihoodMatrix(
            logp_NP=self.logp_NP[keep_N],
            length_N=self.length_N[keep_N],
            own_N=self.own_N[keep_N],
            group_N=self.group_N[keep_N],
            multiplicity_P=self.multiplicity_P,
            scored_NP=self.scored_NP[keep_N],
        )

    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """The arrays by name, as `save` writes them."""
        names = ("logp_NP", "length_N", "own_N", "group_N", "multiplicity_P", "scored_NP")
        return {name: getattr(self, name) for name in names}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an .npz (no pickle) through a temporary name, so that a reader never sees half a file."""
        with replacing(Path(path)) as temporary, open(temporary, "wb") as stream:
            np.savez(stream, **self.arrays())  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LogLikelihoodMatrix:
        """Read what `save` wrote. Raises MatrixError naming the file if it is damaged or not such a file."""
        try:
            # Opened here: numpy leaves the file open where the archive is damaged.
            with open(ending(Path(path)), "rb") as stream, np.load(stream, allow_pickle=False) as stored:
                n_bytes = sum(entry.file_size for entry in stored.zip.infolist())
                if n_bytes > MAX_FILE_BYTES:
                    raise ValueError(f"unpacked it has {n_bytes >> 20} MB, more than {MAX_FILE_BYTES >> 20}")
                return cls(**{name: stored[name] for name in stored.files})
        except FileNotFoundError:
            raise
        except Exception as error:
            raise MatrixError(f"{path}: not a readable matrix file ({type(error).__name__}: {error}).") from error
