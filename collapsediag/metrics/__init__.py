"""Room: metrics. One family a file; importing the package registers them all."""

from __future__ import annotations

from collapsediag.metrics import from_matrix as from_matrix
from collapsediag.metrics import information as information
from collapsediag.metrics import retrieval as retrieval
from collapsediag.metrics import tools as tools
