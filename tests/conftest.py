"""A suite that a script has started in the background inherits an ignored SIGINT: here Ctrl-C works again, in
what the tests start too."""

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)
