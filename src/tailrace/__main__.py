"""``python -m tailrace`` is the command ``tailrace``."""

from __future__ import annotations

import sys

from .cli.start import main

sys.exit(main())
