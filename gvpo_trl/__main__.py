"""`python -m gvpo_trl`, for launchers that want a module: `accelerate launch -m gvpo_trl train --config FILE`."""

import sys

from gvpo_trl.cli.main import main

sys.exit(main())
