"""Chat templates: what they write is what transformers writes, and what goes wrong in one is one line, in bounded time
and memory.
"""

import datetime
import json
import resource
import subprocess
import sys
import threading
import time
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
    "ascii": "{{ messages[0].content | tojson(ensure_ascii=true) }}",
    "loops": "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "undefined": "a{{ messages[0].nothing }}{{ nothing }}{{ bos_token }}",
    "blocks": "  {% if true %}\n  x\n  {% endif %}\n",
    "namespace": "{% set n = namespace(a=1) %}{% set n.a = n.a + 1 %}{{ n.a }}{{ dict(b=2) }}",
    "macro": "{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(messages[1]['content']) }}",
}


def text_of(source, ask=True, turns=TALK):
    facts = {"template": source, "names": {"bos_token": "<s>"}}
    return S.chat_text(SimpleNamespace(facts=facts), turns, ask)


@pytest.mark.parametrize("name", AS_TRANSFORMERS)
def test_texts_are_those_of_transformers(name):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = [{"role": role.strip("<|>"), "content": text} for role, text in TALK]
    (expected,), _ = utils.render_jinja_template(
        [messages],
        chat_template=AS_TRANSFORMERS[name],
        add_generation_prompt=True,
        bos_token="<s>",
    )
    assert text_of(AS_TRANSFORMERS[name]) == expected
    if name == "date":
        assert expected == f"{datetime.date.today()}Be é."


FAULTS = {
    "{{ raise_exception('no\nsystem') }}": "no",
    "{% if %}": "Expected an expression, got 'end of statement block'",
    "{% unknown %}": "Encountered unknown tag 'unknown'.",
    "{{ none.x.y }}": "'None' has no attribute 'x'",
    "{{ 1 / 0 }}": "ZeroDivisionError: division by zero",
    "{{ 'a' + 1 }}": "TypeError: can only concatenate str",
    "{{ messages[0].content | nothing }}": "No filter named 'nothing'.",
    "{% include 'x' %}": "TypeError: no loader for this environment specified",
    "{{ ''.__class__.__mro__ }}": "access to attribute '__class__' of 'str' object is unsafe.",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError: maximum recursion depth exceeded",
    "{{ 'x' * 10 ** 10 }}": "MemoryError: ",
    "{{ 'x' | center(10 ** 10) }}": "MemoryError: ",
    "{{ range(10 ** 9) | list }}": "OverflowError: Range too big.",
    "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}": "writes more than 16 million letters",
    "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}": "MemoryError: ",
    "{{ messages.append(1) }}": "is not safely callable|unsafe",
    " {{ '' }}\n": "writes nothing for this conversation",
    "{" * 9 + "(" * 9999: "RecursionError|Expected|unexpected|ended",
}


@pytest.mark.parametrize("source", FAULTS)
def test_what_goes_wrong_in_a_template_is_one_line(source):
    line = refusal(S.UserError, "^chat template: ", text_of, source)
    assert S.re.search(FAULTS[source], line), line
    assert text_of("{{ messages[1].content }}") == "Hi <b>"


@pytest.mark.full
def test_a_template_that_never_ends_is_ended(monkeypatch):
    """Also in a thread, and in one operation of C. The next template has a new process; the fourth time none."""
    monkeypatch.setattr(S.template_process(), "endings", 0)
    endless = "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}"
    lines = []
    began = time.perf_counter()

    def work():
        lines.append(refusal(S.UserError, "", text_of, endless))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert lines == ["chat template: took more than 3 seconds"]
    assert time.perf_counter() - began < 60
    assert text_of("{{ messages[1].content }}") == "Hi <b>"
    monkeypatch.setattr(S.template_process(), "endings", 3)
    refusal(S.UserError, "took too much time or memory too often", text_of, "{{ 1 }}")


@pytest.mark.full
def test_one_endless_operation_is_ended(monkeypatch):
    monkeypatch.setattr(S.template_process(), "endings", 0)
    refusal(
        S.UserError, "took more than 3 seconds|MemoryError", text_of, "{{ (10 ** (10 ** 9)) % 7 }}"
    )


def test_limits_of_the_system_may_be_there():
    """As of `ulimit -v` on a cluster: until 2026-11-27 every template failed behind one."""

    def limit():
        for kind, most in ((resource.RLIMIT_AS, 1 << 33), (resource.RLIMIT_CPU, 600)):
            resource.setrlimit(kind, (most, most))

    words = [sys.executable, "-c", S.TemplateProcess().code]
    request = json.dumps(["{{ 1 + 1 }}", {}]) + "\n"
    done = subprocess.run(words, input=request, preexec_fn=limit, stdout=subprocess.PIPE, text=True)
    assert done.stdout == '{"text": "2"}\n'


def test_a_template_for_tools_is_taken_where_there_are_some():
    facts = {"template": "plain", "tool_template": "{{ tools | length }} tools", "names": {}}
    tokenizer = SimpleNamespace(facts=facts)
    assert S.chat_text(tokenizer, TALK, True) == "plain"
    turns = [("<|tools|>", [{"name": "a"}]), *TALK]
    assert S.chat_text(tokenizer, turns, True) == "1 tools"


def test_jinja2_is_named_if_it_is_missing(monkeypatch):
    monkeypatch.setitem(S.sys.modules, "jinja2", None)
    refusal(S.UserError, "needs jinja2: pip install jinja2", S.template_process.__wrapped__)
