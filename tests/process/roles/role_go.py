"""Not a role: what others share that go on when the test says so."""

import os
import time


def wait_for_go() -> None:
    """Return once there is a file `go` in the folder where the launcher was started."""
    while not os.path.exists("go"):
        time.sleep(0.01)
