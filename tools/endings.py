"""How every tool ends after Ctrl-C and behind `| head`: without a traceback."""

import os
import sys
from collections.abc import Callable


def run_tool(main: Callable[..., int | None], *arguments: str | list[str]) -> None:
    """Call the main of a tool and end the process with the exit code that it returns.

    After Ctrl-C it is 130, with one line. If nobody reads the output it is 141, with nothing.
    """
    try:
        try:
            code = main(*arguments)
        finally:
            sys.stdout.flush()  # otherwise Python does so later, where no error can be caught
    except KeyboardInterrupt:
        sys.stderr.write("stopped by SIGINT\n")
        code = 130  # 128 and SIGINT
    except BrokenPipeError:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # Python flushes once more at the end
        code = 141  # 128 and SIGPIPE
    sys.exit(code)
