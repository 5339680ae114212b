"""Make stdin the controlling terminal, so that Ctrl-C is a signal, and run mixedkv with the arguments."""

from __future__ import annotations

import fcntl
import signal
import sys
import termios

fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.default_int_handler)

from mixedkv.cli import main  # noqa: E402

sys.exit(main(sys.argv[1:]))
