"""`python -m hpcmoe`: the same as the `hpcmoe` command."""

import sys

from hpcmoe.cli.main import main

sys.exit(main())
