"""Started as a program of its own: becomes another program that dies when the thread which started it dies.

Usage: python -I leash.py PARENT_PID NAME=VALUE… -- PROGRAM ARGUMENT…

On Linux the kernel sends SIGKILL (prctl PR_SET_PDEATHSIG, which survives exec), so a node that is killed without
warning leaves no daemon behind. Other systems have no such signal: there only an orderly exit ends the program.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Never returns: this process becomes the program."""
    separator = sys.argv.index("--")
    if os.getsid(0) != os.getpid():  # the leader of a session has its own process group already
        os.setpgid(0, 0)  # Ctrl-C in a terminal is for the node, which then ends this program in order
    parent = int(sys.argv[1])
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the leash was on
            sys.exit(1)
    settings = dict(setting.split("=", 1) for setting in sys.argv[2:separator])
    program = sys.argv[separator + 1 :]
    os.execve(program[0], program, {**os.environ, **settings})


if __name__ == "__main__":
    main()
