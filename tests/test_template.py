"""Chat templates: what they write is what transformers writes, and what goes wrong in one is one line, in bounded time
and memory.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

import train_sft as S
from conftest import refusal

TALK = [("<|system|>", "Be é."), ("<|user|>", "Hi <b>"), ("<|assistant|>", "Yes & no")]
GENERATION = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{% set x = m.content %}{{ x }}"
    "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}\n{{ x is defined }}{% endfor %}"
)
AS_TRANSFORMERS = {
    "generation": GENERATION,
    "date": "{{ strftime_now('%Y-%m-%d') }}{{ messages[0].content }}",
    "tojson": "{{ messages | tojson(indent=2, sort_keys=true) }}{{ messages[0] | tojson(separators=(',', ':')) }}",
    "ascii": "{{ messages[0].content | tojson(ensure_ascii=true) }}{{ messages | tojson(false) }}",
    "loops": "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "undefined": "a{{ messages[0].nothing }}{{ nothing }}{{ bos_token }}",
    "blocks": "  {% if true %}\n  x\n  {% endif %}\n",
    "namespace": "{% set n = namespace(a=1) %}{% set n.a = n.a + 1 %}{{ n.a }}{{ dict(b=2) }}",
    "macro": "{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(messages[1]['content']) }}",
}


def text_of(source, ask=True, turns=TALK):
    facts = {"template": source, "names": {"bos_token": "<s>"}}
    return S.chat_text(SimpleNamespace(facts=facts), turns, ask)


def test_texts_are_those_of_transformers():
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = [{"role": role.strip("<|>"), "content": text} for role, text in TALK]
    for name, source in AS_TRANSFORMERS.items():
        given = dict(chat_template=source, add_generation_prompt=True, bos_token="<s>")
        (expected,), _ = utils.render_jinja_template([messages], **given)
        assert text_of(source) == expected, name


def test_the_date_is_that_of_the_run(monkeypatch):
    """SOURCE_DATE_EPOCH is what a run sets for its process of templates; another process reads it anew."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", str(43200 + 86400 * 364))
    process = S.TemplateProcess()
    monkeypatch.setattr(S, "template_process", lambda: process)
    assert text_of("{{ strftime_now('%d %b %Y') }}") == "31 Dec 1970"


FAULTS = {
    "{{ raise_exception('no\nsystem') }}": "no",
    "{% if %}": "Expected an expression",
    "{{ none.x.y }}": "'None' has no attribute 'x'",
    "{{ 1 / 0 }}": "ZeroDivisionError",
    "{{ ''.__class__.__mro__ }}": "__class__.*unsafe",
    "{{ messages.append(1) }}": "is not safely callable|unsafe",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError",
    "{" * 9 + "(" * 9999: "RecursionError|Expected|unexpected|ended",
    "{{ 'x' | center(10 ** 10) }}": "MemoryError",
    "{{ range(10 ** 9) | list }}": "OverflowError",
    "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}": "more than 16 million letters",
    "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}": "MemoryError",
    " {{ '' }}\n": "writes nothing",
}


def test_what_goes_wrong_in_a_template_is_one_line():
    for source, fault in FAULTS.items():
        refusal(S.UserError, f"^chat template: .*({fault})", text_of, source)
        assert text_of("{{ messages[1].content }}") == "Hi <b>"


@pytest.mark.full
@pytest.mark.parametrize(
    "endless",
    [
        "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        "{{ (10 ** (10 ** 9)) % 7 }}",
    ],
)
def test_a_template_that_never_ends_is_ended(endless, monkeypatch):
    """Also in a thread, and in one operation of C. The next template has a new process; the fourth time none."""
    monkeypatch.setattr(S.template_process(), "endings", 0)
    lines = []

    def work():
        lines.append(refusal(S.UserError, "3 seconds|MemoryError", text_of, endless))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert len(lines) == 1 and text_of("{{ messages[1].content }}") == "Hi <b>"
    monkeypatch.setattr(S.template_process(), "endings", 3)
    refusal(S.UserError, "too much time or memory too often", text_of, "{{ 1 }}")


def test_the_ctrl_c_of_a_terminal_does_not_end_the_process():
    """It goes to the process group of the run, which finishes its step. SIGTERM of Slurm goes to all."""
    text_of("{{ 1 }}")
    pid = S.template_process().process.pid
    assert os.getpgid(pid) != os.getpgid(0)
    os.kill(pid, signal.SIGTERM)
    assert text_of("{{ 2 }}") == "2" and S.template_process().process.pid == pid


def test_limits_of_the_system_may_be_there():
    """As of `ulimit -v` on a cluster: until 2026-11-27 every template failed behind one."""

    def limit():
        for kind, most in ((resource.RLIMIT_AS, 1 << 33), (resource.RLIMIT_CPU, 600)):
            resource.setrlimit(kind, (most, most))

    words = [sys.executable, "-c", S.TemplateProcess().code]
    request = json.dumps(["{{ 1 + 1 }}", {}]) + "\n"
    done = subprocess.run(words, input=request, preexec_fn=limit, stdout=subprocess.PIPE, text=True)
    assert done.stdout == '{"text": "2"}\n'
    # macOS refuses such a limit: until 2026-11-29 every template failed there.
    words[2] = (
        "import jinja2, resource, sys; sys.platform = 'darwin'; resource.setrlimit = None\n"
        + words[2]
    )
    assert subprocess.check_output(words, input=request, text=True) == done.stdout


def test_a_template_for_tools_is_taken_where_there_are_some():
    facts = {"template": "plain", "tool_template": "{{ tools | length }} tools", "names": {}}
    tokenizer = SimpleNamespace(facts=facts)
    assert S.chat_text(tokenizer, TALK, True) == "plain"
    turns = [("<|tools|>", [{"name": "a"}]), *TALK]
    assert S.chat_text(tokenizer, turns, True) == "1 tools"


def test_a_field_that_a_template_demands_is_written():
    """Mistral's refuses a tool's result without an id: without it there is no other text to compare."""
    source = (
        "{% for m in messages %}{% if m.role == 'tool' and not m.tool_call_id %}"
        "{{ raise_exception('no id') }}{% endif %}{{ m.content }}{{ m.tool_call_id }}{% endfor %}"
    )
    tokenizer = SimpleNamespace(facts={"template": source, "names": {}, "added": {}, "stop": []})
    result = {"role": "tool", "content": "r", "tool_call_id": "c", "name": "f"}
    notes = set()
    turns = S.fitted_turns(tokenizer, [*TALK[:2], S.message_turn(result, notes)], notes)
    assert S.chat_text(tokenizer, turns, False) == "Be é.Hi <b>rc"
    assert {name for kind, name in notes if kind == "not used"} == {"message.name"}


def test_arguments_are_a_text_for_a_template_that_prints_them_as_they_are():
    """Beside a content, too: Python's own form of a dict would stand in the prompt."""
    source = (
        "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
        "{{ call.function.name }}{{ call.function.arguments }}{% endfor %}{% endfor %}"
    )
    tokenizer = SimpleNamespace(facts={"template": source, "names": {}, "added": {}, "stop": []})
    calls = [{"function": {"name": "f", "arguments": {"x": 1}}}]
    for content in ("See", None):
        message = {"role": "assistant", "content": content, "tool_calls": calls}
        turns = S.fitted_turns(tokenizer, [TALK[1], S.message_turn(message, set())], set())
        assert S.chat_text(tokenizer, turns, False) == "Hi <b>" + (content or "") + 'f{"x": 1}'


def test_jinja2_is_named_if_it_is_missing(monkeypatch):
    monkeypatch.setitem(S.sys.modules, "jinja2", None)
    refusal(S.UserError, "needs jinja2: pip install jinja2", S.template_process.__wrapped__)
