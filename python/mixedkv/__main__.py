import sys

from mixedkv.cli import main

sys.exit(main())
