"""tools/endings.py: how every tool ends after Ctrl-C and behind `| head`."""

import os
import re
import subprocess
import sys

import pytest

from conftest import ROOT, load_tool

endings = load_tool("endings")


def test_ctrl_c_is_one_line(capsys):
    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        endings.run_tool(interrupt)
    assert ended.value.code == 130 and capsys.readouterr().err == "stopped by SIGINT\n"


@pytest.mark.parametrize("words", ["tokens.py {}", "sync.py --check"])
def test_a_closed_pipe_is_silent(words):
    reader, writer = os.pipe()
    os.close(reader)
    name, *given = words.format(ROOT / "conftest.py").split()
    command = [sys.executable, ROOT / "tools" / name, *given]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_every_tool_ends_so():
    tools = [path.read_text(encoding="utf-8") for path in ROOT.glob("tools/*.py")]
    ends = [re.search(r'__name__ == "__main__":\n    (\w+)\(', text) for text in tools]
    assert [end[1] for end in ends if end] == ["run_tool"] * 10
