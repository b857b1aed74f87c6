"""Room: metrics. One family a file; importing the package registers them all."""

from __future__ import annotations

from collapsediag.metrics import bookkeeping as bookkeeping
from collapsediag.metrics import diversity as diversity
from collapsediag.metrics import entropy as entropy
from collapsediag.metrics import entropy_batch as entropy_batch
from collapsediag.metrics import entropy_fit as entropy_fit
from collapsediag.metrics import format as format
from collapsediag.metrics import from_matrix as from_matrix
from collapsediag.metrics import from_rollouts as from_rollouts
from collapsediag.metrics import gradient as gradient
from collapsediag.metrics import information as information
from collapsediag.metrics import length as length
from collapsediag.metrics import pass_at_k as pass_at_k
from collapsediag.metrics import retrieval as retrieval
from collapsediag.metrics import rewards as rewards
from collapsediag.metrics import tools as tools
