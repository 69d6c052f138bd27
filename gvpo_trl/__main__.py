"""Runs the command line as a module, for launchers: `accelerate launch -m gvpo_trl train --config FILE`."""

import sys

from gvpo_trl.cli.main import main

sys.exit(main())
