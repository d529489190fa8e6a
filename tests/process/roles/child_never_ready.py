"""An engine's process that loads for ever."""

import time

time.sleep(600)
