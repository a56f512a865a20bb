"""Faults and clocks for runs of tests. The `patch` of Place.run calls these with the script T, in the
process of the run and before its main.
"""

import itertools
import os
import re
import resource
import signal
import sys
import time
import types


def before(owner, name, act):
    """Let a function of `owner` call act with its arguments first."""
    inner = getattr(owner, name)

    def outer(*given, **words):
        act(*given, **words)
        return inner(*given, **words)

    setattr(owner, name, outer)


def at_step(T, step, act, *given):
    """Call act(*given) at the begin of data step `step`; the step before is logged after that."""

    def look(clock, number):
        if number == step:
            act(*given)

    before(T.Clock, "progress", look)


def at_file(pattern, count, act, *given):
    """Call act(*given) before the run opens, makes, renames or removes its `count`-th file or folder
    whose path below OUT_DIR has this pattern.
    """
    left = itertools.count(count - 1, -1)

    def look(event, arguments):
        if event in ("open", "os.mkdir", "os.rename", "shutil.rmtree"):
            path = str(arguments[0])
            is_meant = path.startswith(os.environ["OUT_DIR"]) and re.search(pattern, path)
            if is_meant and next(left) == 0:
                act(*given)

    sys.addaudithook(look)


def send(name, pause=0.3):
    """Get a signal, and go on after so many seconds."""
    os.kill(os.getpid(), getattr(signal, name))
    time.sleep(pause)


def stop(T, step, name="SIGTERM"):
    at_step(T, step, send, name)


def limit(size):
    """Let a file of more than `size` bytes fail as on a full disk; -1: no limit."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


TICKS = types.SimpleNamespace(seconds=0.0)


def pass_time(seconds):
    """Let the clock of `ticks` go on."""
    TICKS.seconds += seconds


def ticks(T, least=0.02, more=0.06):
    """Let training seconds go by the steps that were begun, 20 to 80 ms each."""
    number = itertools.count(1)
    before(T.Clock, "progress", lambda *_: pass_time(least + more * (0.618 * next(number) % 1)))
    T.time = types.SimpleNamespace(**{**vars(time), "perf_counter": lambda: TICKS.seconds})


def spoil(T, steps, what):
    """Make the "loss", a "gradient" alone or the "weights" of these data steps NaN, for a script whose
    steps have one micro-batch.
    """
    number = itertools.count()
    inner = T.GPT.forward

    def forward(net, *given):
        is_spoilt = T.torch.is_grad_enabled() and next(number) in steps
        if is_spoilt and what == "weights":
            net.embed.data[3] = float("nan")
        loss = inner(net, *given)
        if is_spoilt and what == "loss":
            return loss * float("nan")
        if is_spoilt and what == "gradient":
            return loss + (0 * net.embed.sum()).sqrt()  # 0, whose derivative is 0 x infinity
        return loss

    T.GPT.forward = forward
