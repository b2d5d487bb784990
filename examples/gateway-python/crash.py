"""Dies where it is told to, once: `CRASH_AT=after_effect CRASH_ONCE=/tmp/crashed python orders.py 8081`.

The file that CRASH_ONCE names is made at the crash; while it is there, nothing crashes any more.
"""

import os
import signal


def crash_at(point, first=lambda: None):
    if os.environ.get("CRASH_AT") != point:
        return
    try:
        open(os.environ["CRASH_ONCE"], "x").close()
    except FileExistsError:
        return
    first()
    os.kill(os.getpid(), signal.SIGKILL)
