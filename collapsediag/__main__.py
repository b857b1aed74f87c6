"""`python -m collapsediag`."""

from __future__ import annotations

import sys

from collapsediag.cli import main

sys.exit(main())
